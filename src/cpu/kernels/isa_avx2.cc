#define K3_ISA_AVX2
#define K3_ISA_NS isa_avx2
#include "cpu/kernels/table.h"

namespace k3 {
extern const Kernels kKernels_avx2;
const Kernels kKernels_avx2 = isa_avx2::make_table("avx2");
}  // namespace k3
