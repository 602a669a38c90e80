#include "cpu/kernels/kernels.h"

namespace k3 {

extern const Kernels kKernels_portable;
#if defined(__x86_64__)
extern const Kernels kKernels_avx2;
extern const Kernels kKernels_avx512;
#endif

namespace {

bool machine_runs(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == "portable";
}

const Kernels* table_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return &kKernels_avx512;
  if (isa == "avx2") return &kKernels_avx2;
#endif
  return isa == "portable" ? &kKernels_portable : nullptr;
}

}  // namespace

Result<const Kernels*> select_kernels(const std::string& isa) {
  if (isa == "auto") {
    for (const char* name : {"avx512", "avx2", "portable"}) {
      if (machine_runs(name)) return table_of(name);
    }
  }
  const Kernels* table = table_of(isa);
  if (table == nullptr) {
    return invalid_argument("--isa ", isa, ": expected auto, avx512, avx2 or portable");
  }
  if (!machine_runs(isa)) {
    return invalid_argument("--isa ", isa, ": this machine's processor does not have it");
  }
  return table;
}

}  // namespace k3
