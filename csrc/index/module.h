#pragma once

#include <pybind11/pybind11.h>

namespace tiered_kv {

// Adds SlotPool, BlockIndex and DurableIndex to the module.
void bind_index(pybind11::module_& module);

}  // namespace tiered_kv
