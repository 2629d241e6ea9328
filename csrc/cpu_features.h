// Selects the instruction set at run time, so that one build works on every machine.
#pragma once

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tiered_kv {

// Tests set this to run the portable code on a machine with better instructions.
inline std::atomic<bool> force_portable{false};

#if defined(__x86_64__)

inline bool has_avx2() {
  static const bool supported = __builtin_cpu_supports("avx2");
  return supported && !force_portable.load(std::memory_order_relaxed);
}

inline bool has_sha_ni() {
  static const bool supported = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    // Not all compilers know "sha" in __builtin_cpu_supports, so read CPUID leaf 7.
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
           ((b >> 29) & 1) != 0;
  }();
  return supported && !force_portable.load(std::memory_order_relaxed);
}

#endif

}  // namespace tiered_kv
