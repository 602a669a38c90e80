#define K3_ISA_AVX512
#define K3_ISA_NS isa_avx512
#include "cpu/kernels/table.h"

namespace k3 {
extern const Kernels kKernels_avx512;
const Kernels kKernels_avx512 = isa_avx512::make_table("avx512");
}  // namespace k3
