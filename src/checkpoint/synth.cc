#include "checkpoint/synth.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace k3 {
namespace {

// Standard deviation of the 16 E2M1 values drawn alike: sqrt(68.5 / 8).
constexpr double kE2m1MeanSquare = 68.5 / 8;

float uniform_half_width(double standard_deviation) {
  return static_cast<float>(standard_deviation * std::sqrt(3.0));
}

// Scale bytes such that decoded weights have the mean square 1 / fan_in: an eighth of the groups
// two exponents below the base, an eighth one below, the rest at the base or one above it.
void set_scales(int64_t fan_in, SynthTensor* t) {
  const double wanted = 1.0 / (static_cast<double>(fan_in) * kE2m1MeanSquare);
  int exponent = 0;
  double square = 1;  // 4^exponent
  const double low = (1.0 / 16 + 1.0 / 4) / 8;
  while (wanted / square < low + 0.75) {
    --exponent;
    square /= 4;
  }
  const double upper = std::clamp((wanted / square - low - 0.75) / (0.75 * 3), 0.0, 1.0);
  t->scale_base = 127 + exponent;
  t->scale_threshold = 256 - static_cast<int32_t>(std::lround(192 * upper));
}

template <typename Store>
void fill_floats(const SynthTensor& t, int64_t first, int64_t count, Store store) {
  const bool two_draws = t.kind == SynthKind::kTriangular;
  int64_t i = first;
  const int64_t end = first + count;
  const int64_t live_end = std::min(end, t.live);
  while (i < live_end) {
    const auto group = static_cast<uint64_t>(i) >> 2;
    const uint64_t a = synth_hash(t.key, group);
    const uint64_t b = two_draws ? synth_hash(t.key ^ kSynthSecondDraw, group) : 0;
    const int64_t stop = std::min<int64_t>(live_end, static_cast<int64_t>((group + 1) << 2));
    for (; i < stop; ++i) store(i - first, synth_value(t, static_cast<uint64_t>(i), a, b));
  }
  for (; i < end; ++i) store(i - first, 0.0f);
}

}  // namespace

SynthTensor synth_tensor(const ModelConfig& config, const TensorSpec& spec, uint64_t seed) {
  SynthTensor t;
  t.dtype = spec.dtype;
  t.key = synth_key(seed, spec.name);
  t.live = spec.bytes / static_cast<int64_t>(dtype_bytes(spec.dtype));
  const std::string_view name = spec.name;
  const auto width = [&](double standard_deviation) {
    t.half_width = uniform_half_width(standard_deviation);
  };
  const double fan_in = static_cast<double>(spec.shape.back());

  if (name.ends_with(".weight_packed")) {
    t.kind = SynthKind::kCodes;
  } else if (name.ends_with(".weight_scale")) {
    t.kind = SynthKind::kScales;
    set_scales(spec.shape.back() * kMxfp4Group, &t);
  } else if (name.ends_with("norm.weight")) {
    t.center = 1.0f;
    t.half_width = 0.25f;
  } else if (name.ends_with(".A_log")) {
    // The release has exp(A_log) between 0.47 and 11.8.
    t.live = config.kda_num_heads;
    t.center = 0.86f;
    t.half_width = 1.6f;
  } else if (name.ends_with(".dt_bias")) {
    // The release has -9.0 to 0.18, densest near -4.6.
    t.kind = SynthKind::kTriangular;
    t.center = -4.41f;
    t.half_width = 4.59f;
  } else if (name.ends_with(".e_score_correction_bias")) {
    // Small beside the spread of the sigmoids (0.2), yet enough to change a selection.
    t.half_width = 0.05f;
  } else if (spec.group == TensorGroup::kEmbedding) {
    width(1.0);
  } else if (spec.group == TensorGroup::kHead) {
    width(2.0 / std::sqrt(fan_in));  // logits with a standard deviation of 2
  } else {
    // Projections, convolution taps and attention-residual score vectors keep the scale of a
    // normalised input: 1 / sqrt(inputs per output). The last have scores of unit spread with it,
    // so that mixes are soft but not uniform.
    width(1.0 / std::sqrt(fan_in));
  }
  return t;
}

void synth_fill(const SynthTensor& t, int64_t first, int64_t bytes, std::byte* out) {
  if (t.dtype == DType::kBF16) {
    fill_floats(t, first / 2, bytes / 2, [out](int64_t i, float value) {
      const uint16_t bits = f32_to_bf16(value);
      std::memcpy(out + i * 2, &bits, 2);
    });
  } else if (t.dtype == DType::kF32) {
    fill_floats(t, first / 4, bytes / 4,
                [out](int64_t i, float value) { std::memcpy(out + i * 4, &value, 4); });
  } else if (t.kind == SynthKind::kCodes && first % 8 == 0) {
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
      const uint64_t hash = synth_hash(t.key, static_cast<uint64_t>(first + i) >> 3);
      std::memcpy(out + i, &hash, 8);  // codes are the hash itself; hosts are little-endian
    }
    for (; i < bytes; ++i) out[i] = static_cast<std::byte>(synth_byte(t, first + i));
  } else {
    for (int64_t i = 0; i < bytes;) {
      const auto group = static_cast<uint64_t>(first + i) >> 3;
      uint64_t hash = synth_hash(t.key, group);
      hash >>= 8 * ((first + i) & 7);
      const int64_t stop = std::min<int64_t>(bytes, static_cast<int64_t>((group + 1) << 3) - first);
      for (; i < stop; ++i, hash >>= 8) {
        out[i] = static_cast<std::byte>(synth_byte_from(t, static_cast<uint32_t>(hash) & 0xffu));
      }
    }
  }
}

int64_t synth_payload_bytes(const ModelConfig& config) {
  int64_t total = 0;
  for_each_tensor(config, [&](const TensorSpec& spec) { total += spec.bytes; });
  return total;
}

}  // namespace k3
