// Fills the kernel table of the ISA being compiled. Included last by each isa_*.cc.
#pragma once

#include "cpu/kernels/elementwise.h"
#include "cpu/kernels/gemm.h"
#include "cpu/kernels/kda.h"
#include "cpu/kernels/mla.h"
#include "cpu/kernels/router.h"

namespace k3::K3_ISA_NS {

constexpr Kernels make_table(const char* name) {
  return {name,
          gemm_bf16,
          gemm_f32,
          gemm_mxfp4,
          gemm_bf16_t,
          rms_norm,
          attn_res,
          kda,
          mla_attend,
          router,
          situ,
          sigmoid_gate,
          add,
          combine,
          bf16_to_f32,
          f32_to_bf16,
          map<exp_lanes>,
          map<sigmoid_lanes>,
          map<tanh_lanes>};
}

}  // namespace k3::K3_ISA_NS
