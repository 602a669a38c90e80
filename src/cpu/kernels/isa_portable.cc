#define K3_ISA_NS isa_portable
#include "cpu/kernels/table.h"

namespace k3 {
extern const Kernels kKernels_portable;
const Kernels kKernels_portable = isa_portable::make_table("portable");
}  // namespace k3
