#include "codec/int8_matmul_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/hadamard.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

// v = kSlope * s + kOffset up to the rounding to fp16 (fp16 0x1EEE and 1024 * 0x1EEE + 0xC931), both exact.
constexpr double kSlope = 0.00676727294921875;
constexpr double kOffset = 1024 * kSlope - 10.3828125;
constexpr double kCentredOffset = kOffset + kSumCentre * kSlope;  // v = kSlope * (s - 510) + this

constexpr float kTiny = 0x1.0p-60f;  // below it 127 / max could overflow
constexpr float kBoost = 0x1.0p80f;

uint32_t magnitude_bits(float v) {
  return std::bit_cast<uint32_t>(v) & 0x7FFFFFFFu;
}

}  // namespace

QuantizedRows::QuantizedRows(const Int8Job& job, Int8Mode mode, bool as_bytes)
    : weight_(job.weight),
      x_(job.x),
      n_rows_(job.rows),
      n_chunks_(job.weight.k() / kChunk),
      mode_(mode),
      as_bytes_(as_bytes),
      quads_(std::make_unique_for_overwrite<uint64_t[]>(static_cast<size_t>(n_rows_ * n_chunks_ * kQuadsPerChunk))),
      scale_(std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n_rows_ * n_chunks_))),
      shift_(std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n_rows_ * n_chunks_))),
      centre_(std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(n_rows_ * n_chunks_))) {}

void QuantizedRows::quantize_chunk(int64_t chunk) {
  const double steps = mode_ == Int8Mode::kResidual ? 254.0 : 1.0;  // of the integers in one d
  float suh[kChunk];
  for (int i = 0; i < kChunk; ++i) suh[i] = decode_f16(weight_.suh[chunk * kChunk + i]);
  for (int64_t r = 0; r < n_rows_; ++r) {
    const int64_t at = chunk * n_rows_ + r;
    uint64_t* quads = quads_.get() + at * kQuadsPerChunk;
    const float* x = x_ + r * weight_.k() + chunk * kChunk;
    float v[kChunk];
    for (int i = 0; i < kChunk; ++i) v[i] = x[i] * suh[i];
    hadamard_along_rows(v, 1, kChunk);
    uint32_t largest = 0;
    for (int i = 0; i < kChunk; ++i) largest = std::max(largest, magnitude_bits(v[i]));
    const float max = std::bit_cast<float>(largest);
    if (largest == 0 || !std::isfinite(max)) {
      std::fill(quads, quads + kQuadsPerChunk, uint64_t{0});
      scale_[at] = shift_[at] = largest == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      centre_[at] = 0;
      continue;
    }
    const float boost = max < kTiny ? kBoost : 1.0f;  // exact
    const float inverse = 127.0f / (max * boost);
    int16_t q[kChunk];
    int32_t sum = 0;
    if (mode_ == Int8Mode::kResidual) {
      for (int i = 0; i < kChunk; ++i) {
        const float t = v[i] * boost * inverse;
        const float main = std::rint(t);
        const float residual = std::rint(254.0f * (t - main));
        q[i] = static_cast<int16_t>(static_cast<int32_t>(254.0f * main + residual));
      }
    } else {
      for (int i = 0; i < kChunk; ++i) q[i] = static_cast<int16_t>(static_cast<int32_t>(std::rint(v[i] * boost * inverse)));
    }
    for (int i = 0; i < kChunk; ++i) sum += q[i];
    if (as_bytes_) {
      for (int i = 0; i < kChunk; ++i) q[i] = static_cast<int16_t>((q[i] & 0xFF) * 0x101);
    }
    for (int p = 0; p < kQuadsPerChunk; ++p) {  // rows 2t, 2t+1 and 2t+8, 2t+9 of tile p / 4
      const int16_t* pair = q + p / 4 * kTile + p % 4 * 2;
      int16_t quad[4] = {pair[0], pair[1], pair[8], pair[9]};
      quads[p] = std::bit_cast<uint64_t>(quad);
    }
    const double d = static_cast<double>(max) / (127.0 * steps);
    scale_[at] = static_cast<float>(d * kSlope);
    shift_[at] = static_cast<float>(d * kCentredOffset * sum);
    centre_[at] = kSumCentre * sum;  // at most 510 * 32385 * 128 < 2^31
  }
}

Int8Rows QuantizedRows::rows_of(int64_t chunk, int64_t first, int64_t rows) const {
  const int64_t at = chunk * n_rows_ + first;
  return {quads_.get() + at * kQuadsPerChunk, scale_.get() + at, centre_.get() + at, rows};
}

float QuantizedRows::start(int64_t row) const {
  float sum = 0;
  for (int64_t c = 0; c < n_chunks_; ++c) sum += shift_[c * n_rows_ + row];
  return sum;
}

}  // namespace espalier::codec
