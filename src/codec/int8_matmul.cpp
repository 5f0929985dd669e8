#include "codec/int8_matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "codec/hadamard.h"
#include "codec/int8_matmul_kernels.h"
#include "codec/int8_matmul_rows.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

// Rows that share one decoding: enough to hide it, few enough for their partial sums to stay in the second cache.
constexpr int64_t kRowGroup = 256;

const Int8Kernels& kernels_of(SimdTier tier) {
  switch (tier) {
#if defined(__x86_64__)
    case SimdTier::kAvx512:
      return int8_kernels_avx512();
    case SimdTier::kAvx2:
      return int8_kernels_avx2();
#endif
    default:
      return int8_kernels_portable();
  }
}

// One job and its share of the loops over chunks and over (row group, column block).
struct Prepared {
  const Int8Job* job;
  QuantizedRows rows;
  bool as_bytes;
  int64_t first_chunk;
  int64_t first_unit;
};

// The job that index `i` of a loop falls into.
template <int64_t Prepared::*kFirst>
Prepared& job_of(std::vector<Prepared>& jobs, int64_t i) {
  auto next = std::upper_bound(jobs.begin(), jobs.end(), i, [](int64_t v, const Prepared& p) { return v < p.*kFirst; });
  return *(next - 1);
}

void multiply_unit(const Int8Kernels& kernels, const Prepared& p, int64_t unit, std::vector<float>& z) {
  const Exl3View& weight = p.job->weight;
  const int64_t n_blocks = weight.n() / kBlock;
  const int64_t block = unit % n_blocks;
  const int64_t first = unit / n_blocks * kRowGroup;
  const int64_t rows = std::min(kRowGroup, p.job->rows - first);
  z.resize(static_cast<size_t>(rows * kBlock));
  std::vector<float> starts(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    starts[static_cast<size_t>(r)] = p.rows.start(first + r);
    std::fill_n(z.data() + r * kBlock, kBlock, starts[static_cast<size_t>(r)]);
  }
  const auto kernel = p.as_bytes ? kernels.bytes : kernels.words;
  for (int64_t c = 0; c < p.rows.n_chunks(); ++c) kernel(weight.trellis, c, block, p.rows.rows_of(c, first, rows), z.data());
  float svh[kBlock];
  for (int c = 0; c < kBlock; ++c) svh[c] = decode_f16(weight.svh[block * kBlock + c]);
  for (int64_t r = 0; r < rows; ++r) {
    float* y = p.job->y + (first + r) * weight.n() + block * kBlock;
    if (std::isnan(starts[static_cast<size_t>(r)])) {
      std::fill_n(y, kBlock, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    float* zr = z.data() + r * kBlock;
    hadamard128_sum(zr);
    for (int c = 0; c < kBlock; ++c) y[c] = zr[c] * kHadamardScale * svh[c];
  }
}

}  // namespace

bool has_int8_matmul(const Exl3View& weight) {
  return weight.trellis.codebook == Codebook::kMul1;
}

void int8_matmul(ThreadPool& pool, std::span<const Int8Job> jobs, Int8Mode mode, SimdTier tier) {
  const Int8Kernels& kernels = kernels_of(tier);
  std::vector<Prepared> prepared;
  prepared.reserve(jobs.size());
  int64_t chunks = 0;
  int64_t units = 0;
  int64_t most_rows = 1;
  for (const Int8Job& job : jobs) {
    CHECK(has_int8_matmul(job.weight) && is_width(job.weight.trellis.k2)) << codebook_name(job.weight.trellis.codebook);
    CHECK(job.weight.k() % kBlock == 0 && job.weight.n() % kBlock == 0) << job.weight.k() << "x" << job.weight.n();
    if (job.rows == 0 || job.weight.n() == 0) continue;
    const bool as_bytes = mode == Int8Mode::kPlain && job.rows <= kernels.max_byte_rows;
    prepared.push_back({&job, QuantizedRows(job, mode, as_bytes), as_bytes, chunks, units});
    chunks += prepared.back().rows.n_chunks();
    units += (job.rows + kRowGroup - 1) / kRowGroup * (job.weight.n() / kBlock);
    most_rows = std::max(most_rows, job.rows);
  }
  // One row's chunks take a microsecond for eight, less than waking a thread; so small calls stay on this one.
  pool.parallel_for(chunks, std::max<int64_t>(1, 64 / most_rows), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Prepared& p = job_of<&Prepared::first_chunk>(prepared, i);
      p.rows.quantize_chunk(i - p.first_chunk);
    }
  });
  pool.parallel_for(units, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> z;
    for (int64_t i = begin; i < end; ++i) {
      const Prepared& p = job_of<&Prepared::first_unit>(prepared, i);
      multiply_unit(kernels, p, i - p.first_unit, z);
    }
  });
}

void int8_matmul(ThreadPool& pool, const Exl3View& weight, const float* x, int64_t rows, float* y, Int8Mode mode,
                 SimdTier tier) {
  const Int8Job job{weight, x, rows, y};
  int8_matmul(pool, std::span(&job, 1), mode, tier);
}

}  // namespace espalier::codec
