// Copies between blocks in host memory and slots of an arena.
#pragma once

#include "block_layout.h"

namespace tiered_kv {

// `batch` must have passed check_batch for `slots`. Does not need the GIL.
void copy_blocks(const BlockLayout& layout, const Batch& batch, Direction direction, uint8_t* slots,
                 int threads);

}  // namespace tiered_kv
