// Where results land between operations, and the epsilons that sources disagree on. One policy
// holds for a whole process; it is printed at start and in /version. docs/numerics.md has the
// table.
#pragma once

#include <string>

#include "core/status.h"

namespace k3 {

enum class Numerics {
  kF32,   // float32 between operations: the CPU's default
  kBf16,  // every landing of the HF reference rounds to bf16 (accumulation stays float32)
};

struct NumericsPolicy {
  Numerics numerics = Numerics::kF32;
  // The two MLA LoRA norms: the HF module runs 1e-6 (its constructor's default), every serving
  // engine and K3's published goldens 1e-5.
  float lora_norm_eps = 1e-5f;
  // L2 norm of KDA's q and k, added to the sum of squares inside the root.
  float l2_norm_eps = 1e-6f;

  bool bf16() const { return numerics == Numerics::kBf16; }
};

inline const char* numerics_name(Numerics n) { return n == Numerics::kBf16 ? "bf16" : "f32"; }

inline Result<Numerics> parse_numerics(const std::string& name) {
  if (name == "f32") return Numerics::kF32;
  if (name == "bf16") return Numerics::kBf16;
  return invalid_argument("--numerics ", name, ": expected f32 or bf16");
}

}  // namespace k3
