#include "model/engram.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tensor/float_formats.h"

namespace espalier {
namespace {

using uint128 = unsigned __int128;

bool is_prime(int64_t n) {
  if (n < 2) return false;
  for (int64_t d = 2; d * d <= n; d += d == 2 ? 1 : 2) {
    if (n % d == 0) return false;
  }
  return true;
}

// numpy's default_rng(seed).integers(0, bound): SeedSequence, PCG64 (XSL-RR), Lemire's bounded draw.
class NumpyPcg64 {
 public:
  explicit NumpyPcg64(uint64_t seed) {
    uint32_t word[4] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0};
    uint32_t h = 0x43b0d7e5u;
    const auto hash = [&h](uint32_t v) {
      v ^= h;
      h *= 0x931e8875u;
      v *= h;
      return v ^ (v >> 16);
    };
    uint32_t pool[4];
    for (int i = 0; i < 4; ++i) pool[i] = hash(word[i]);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        if (i == j) continue;
        const uint32_t r = pool[j] * 0xca01f9ddu - hash(pool[i]) * 0x4973f715u;
        pool[j] = r ^ (r >> 16);
      }
    }
    uint32_t out[8];
    h = 0x8b51f9ddu;
    for (int i = 0; i < 8; ++i) {
      uint32_t v = pool[i % 4] ^ h;
      h *= 0x58f38dedu;
      v *= h;
      out[i] = v ^ (v >> 16);
    }
    uint64_t a[4];
    for (int i = 0; i < 4; ++i)
      a[i] = static_cast<uint64_t>(out[2 * i]) | (static_cast<uint64_t>(out[2 * i + 1]) << 32);
    increment_ = 2 * ((static_cast<uint128>(a[2]) << 64) + a[3]) + 1;
    state_ = 0;
    step();
    state_ += (static_cast<uint128>(a[0]) << 64) + a[1];
    step();
  }

  uint64_t bounded(uint64_t bound) {
    const uint64_t threshold = (0 - bound) % bound;  // 2^64 mod bound
    for (;;) {
      const uint128 m = static_cast<uint128>(next()) * bound;
      if (static_cast<uint64_t>(m) >= threshold) return static_cast<uint64_t>(m >> 64);
    }
  }

 private:
  void step() {
    const uint128 multiplier = (static_cast<uint128>(0x2360ED051FC65DA4ull) << 64) + 0x4385DF649FCCF645ull;
    state_ = state_ * multiplier + increment_;
  }
  uint64_t next() {
    step();
    const uint64_t x = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    const unsigned turn = static_cast<unsigned>(state_ >> 122);
    return turn == 0 ? x : (x >> turn) | (x << (64 - turn));
  }

  uint128 state_ = 0;
  uint128 increment_ = 0;
};

}  // namespace

Result<std::vector<EngramHash>> make_engram_hashes(const Config& config) {
  const EngramConfig& e = config.engram;
  std::vector<EngramHash> out;
  int64_t last = 0;  // primes are never used twice, across layers too
  for (size_t slot = 0; slot < e.layers.size(); ++slot) {
    EngramHash hash;
    for (int64_t n = 2; n <= e.max_ngram; ++n) {
      int64_t candidate = std::max(e.vocab - 1, last);
      for (int64_t head = 0; head < e.n_heads; ++head) {
        do ++candidate;
        while (!is_prime(candidate));
        hash.offsets.push_back(hash.n_rows);
        hash.primes.push_back(candidate);
        hash.n_rows += candidate;
        last = candidate;
      }
    }
    if (hash.n_rows != e.n_rows[slot]) {
      return data_loss("config: 'engram_num_embeddings'[" + std::to_string(slot) +
                       "]: expected the sum of the layer's primes " + std::to_string(hash.n_rows) + ", found " +
                       std::to_string(e.n_rows[slot]));
    }
    const int64_t half = INT64_MAX / e.n_classes / 2;
    NumpyPcg64 rng(static_cast<uint64_t>(10007) * static_cast<uint64_t>(e.layers[slot]));
    for (int64_t i = 0; i < e.max_ngram; ++i) {
      hash.multipliers.push_back(
          2 * static_cast<int64_t>(rng.bounded(static_cast<uint64_t>(std::max<int64_t>(half, 1)))) + 1);
    }
    out.push_back(std::move(hash));
  }
  return out;
}

void engram_rows(const EngramHash& hash, std::span<const int32_t> history, int64_t p, int32_t pad_class,
                 int64_t n_heads, int64_t* rows) {
  bool is_blocked = false;
  int64_t mixed = 0;
  const int64_t max_ngram = static_cast<int64_t>(hash.multipliers.size());
  for (int64_t s = 0; s < max_ngram; ++s) {
    is_blocked = is_blocked || p < s || history[static_cast<size_t>(p - s)] == kEngramDead;
    const int64_t token = is_blocked ? pad_class : history[static_cast<size_t>(p - s)];
    mixed ^= token * hash.multipliers[static_cast<size_t>(s)];
    for (int64_t head = 0; s >= 1 && head < n_heads; ++head) {
      const size_t column = static_cast<size_t>((s - 1) * n_heads + head);
      rows[column] = hash.offsets[column] + mixed % hash.primes[column];
    }
  }
}

Status read_engram_row(const EngramTable& table, int64_t row, float* out) {
  static const std::array<float, 256> value_of = [] {
    std::array<float, 256> values;
    for (int i = 0; i < 256; ++i) values[static_cast<size_t>(i)] = decode_e4m3(static_cast<uint8_t>(i));
    return values;
  }();
  const int64_t dim = table.codes.shape[1];
  const uint8_t* codes = static_cast<const uint8_t*>(table.codes.data) + row * dim;
  const uint8_t* scales = static_cast<const uint8_t*>(table.scales.data) + row * (dim / 32);
  bool is_finite = true;
  for (int64_t begin = 0; begin < dim; begin += 32) {
    const float scale = decode_e8m0(scales[begin / 32]);
    const int64_t end = std::min(begin + 32, dim);
    for (int64_t i = begin; i < end; ++i) {
      out[i] = round_bf16(value_of[codes[i]] * scale);
      is_finite = is_finite && std::isfinite(out[i]);
    }
  }
  for (int64_t i = 0; i < dim && !is_finite; ++i) {
    if (!std::isfinite(out[i])) {
      return data_loss("tensor '" + table.name + ".weight': element [" + std::to_string(row) + ", " +
                       std::to_string(i) +
                       "]: expected a finite number, found NaN or infinity; the file is damaged, download it again");
    }
  }
  return ok_status();
}

}  // namespace espalier
