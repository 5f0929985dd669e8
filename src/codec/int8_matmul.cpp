#include "codec/int8_matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/check.h"
#include "codec/int8_matmul_kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace espalier::codec {
namespace {

// Rows that share one decoding: enough to hide it, few enough for their partial sums to stay in the second cache.
constexpr int64_t kRowGroup = 256;
// Column blocks that one thread takes through a chunk together: neighbours in memory, so the more the better (18
// instead of 2 give a fifth at one row), as long as their partial sums stay in the second cache.
constexpr int64_t kMostBlocks = 32;
// Units a thread: enough that a busy core or an uneven list costs little.
constexpr int64_t kUnitsPerThread = 2;

#if defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;  // every other AArch64 system that we know of
#endif
}
#endif

#if defined(__x86_64__)
// AMD's cores multiply 32 bits as fast as 16, Intel's take two operations; the bits are the same.
bool prefers_columns() {
  static const bool is_amd = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
  }();
  return is_amd;
}
#endif

const Int8Kernels& kernels_of(SimdTier tier) {
  switch (tier) {
#if defined(__aarch64__)
    case SimdTier::kBaseline:
      return has_dot_product() ? int8_kernels_neon() : int8_kernels_portable();
#elif defined(__x86_64__)
    case SimdTier::kAvx512:
      return prefers_columns() ? int8_kernels_columns_avx512() : int8_kernels_avx512();
    case SimdTier::kAvx2:
      return int8_kernels_avx2();
#endif
    default:
      return int8_kernels_portable();
  }
}

template <typename T>
std::unique_ptr<T[]> array(int64_t size) {
  return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(size));
}

// One job, its quantized rows, and its share of the loops over chunks and over units (row group, some column blocks).
struct Prepared {
  const Int8Job* job;
  Int8Form form;
  int64_t n_chunks;
  int64_t units_per_group;
  int64_t first_chunk;
  int64_t first_unit;
  std::unique_ptr<uint64_t[]> quads;  // [chunk, row, quads_size]; the others [chunk, row]
  std::unique_ptr<float[]> scale;
  std::unique_ptr<float[]> shift;
  std::unique_ptr<int32_t[]> centre;

  Int8Rows rows_of(int64_t chunk, int64_t first, int64_t rows) const {
    const int64_t at = chunk * job->rows + first;
    return {quads.get() + at * quads_size(form), scale.get() + at, centre.get() + at, rows};
  }
  // What z starts from; NaN for a row that is not finite.
  float start(int64_t row) const {
    float sum = 0;
    for (int64_t c = 0; c < n_chunks; ++c) sum += shift[c * job->rows + row];
    return sum;
  }
};

// The job that index `i` of a loop falls into.
template <int64_t Prepared::*kFirst>
const Prepared& job_of(const std::vector<Prepared>& jobs, int64_t i) {
  auto next = std::upper_bound(jobs.begin(), jobs.end(), i, [](int64_t v, const Prepared& p) { return v < p.*kFirst; });
  return *(next - 1);
}

void quantize_chunk(const Int8Kernels& kernels, const Prepared& p, int64_t chunk) {
  const Exl3View& weight = p.job->weight;
  const int64_t at = chunk * p.job->rows;
  kernels.quantize(
      weight.suh + chunk * kChunk, p.job->x + chunk * kChunk, weight.k(), p.job->rows, p.form,
      {p.quads.get() + at * quads_size(p.form), p.scale.get() + at, p.shift.get() + at, p.centre.get() + at});
}

void multiply_unit(const Int8Kernels& kernels, const Prepared& p, int64_t unit, std::vector<float>& z) {
  const Exl3View& weight = p.job->weight;
  const int64_t part = unit % p.units_per_group;
  const int64_t all_blocks = weight.n() / kBlock;
  const int64_t first_block = part * all_blocks / p.units_per_group;
  const int64_t n_blocks = (part + 1) * all_blocks / p.units_per_group - first_block;
  const int64_t first = unit / p.units_per_group * kRowGroup;
  const int64_t rows = std::min(kRowGroup, p.job->rows - first);
  z.resize(static_cast<size_t>(n_blocks * rows * kBlock));
  std::vector<float> starts(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    starts[static_cast<size_t>(r)] = p.start(first + r);
    for (int64_t b = 0; b < n_blocks; ++b)
      std::fill_n(z.data() + (b * rows + r) * kBlock, kBlock, starts[static_cast<size_t>(r)]);
  }
  const bool as_words = p.form == Int8Form::kPlainWords || p.form == Int8Form::kResidualWords;
  const auto product = as_words ? kernels.words : kernels.bytes;
  const int64_t block_words = kBlock / kTile * tile_words(weight.trellis.k2);
  const int64_t chunk_words = kChunk / kTile * (weight.n() / kTile) * tile_words(weight.trellis.k2);
  for (int64_t c = 0; c < p.n_chunks; ++c) {
    for (int64_t b = 0; b < n_blocks; ++b) {
      const int64_t next_words = b + 1 < n_blocks ? block_words : chunk_words - b * block_words;
      product(weight.trellis, {c, first_block + b, next_words}, p.rows_of(c, first, rows),
              z.data() + b * rows * kBlock);
    }
  }
  for (int64_t b = 0; b < n_blocks; ++b) {
    float* y = p.job->y + first * weight.n() + (first_block + b) * kBlock;
    kernels.rotate(weight.svh + (first_block + b) * kBlock, z.data() + b * rows * kBlock, rows, y, weight.n());
    for (int64_t r = 0; r < rows; ++r) {  // the same NaN everywhere
      if (std::isnan(starts[static_cast<size_t>(r)]))
        std::fill_n(y + r * weight.n(), kBlock, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

}  // namespace

bool has_int8_matmul(const Exl3View& weight) {
  return weight.trellis.codebook == Codebook::kMul1;
}

void int8_matmul_with(const Int8Kernels& kernels, ThreadPool& pool, std::span<const Int8Job> jobs, Int8Mode mode) {
  int64_t all_blocks = 0;
  for (const Int8Job& job : jobs) {
    CHECK(has_int8_matmul(job.weight) && is_width(job.weight.trellis.k2)) << codebook_name(job.weight.trellis.codebook);
    CHECK(job.weight.k() % kBlock == 0 && job.weight.n() % kBlock == 0) << job.weight.k() << "x" << job.weight.n();
    if (job.rows > 0) all_blocks += job.weight.n() / kBlock;
  }
  std::vector<Prepared> prepared;
  prepared.reserve(jobs.size());
  int64_t chunks = 0;
  int64_t units = 0;
  int64_t most_rows = 1;
  for (const Int8Job& job : jobs) {
    if (job.rows == 0 || job.weight.n() == 0) continue;
    const bool as_bytes = mode == Int8Mode::kPlain && job.rows <= kernels.max_byte_rows;
    Prepared p;
    p.job = &job;
    p.form = as_bytes ? kernels.byte_form : mode == Int8Mode::kPlain ? Int8Form::kPlainWords : Int8Form::kResidualWords;
    p.n_chunks = job.weight.k() / kChunk;
    const int64_t n_blocks = job.weight.n() / kBlock;
    const int64_t most_blocks = std::clamp<int64_t>(2 * kRowGroup / job.rows, 1, kMostBlocks);
    const int64_t share = pool.n_threads() == 1 ? 1 : n_blocks * kUnitsPerThread * pool.n_threads() / all_blocks;
    p.units_per_group = std::clamp(share, (n_blocks + most_blocks - 1) / most_blocks, n_blocks);
    p.first_chunk = chunks;
    p.first_unit = units;
    const int64_t size = p.n_chunks * job.rows;
    p.quads = array<uint64_t>(size * quads_size(p.form));
    p.scale = array<float>(size);
    p.shift = array<float>(size);
    p.centre = array<int32_t>(size);
    chunks += p.n_chunks;
    units += (job.rows + kRowGroup - 1) / kRowGroup * p.units_per_group;
    most_rows = std::max(most_rows, job.rows);
    prepared.push_back(std::move(p));
  }
  // 64 chunks of one row take a few microseconds, less than waking a thread.
  pool.parallel_for(chunks, std::max<int64_t>(1, 64 / most_rows), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Prepared& p = job_of<&Prepared::first_chunk>(prepared, i);
      quantize_chunk(kernels, p, i - p.first_chunk);
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

void int8_matmul(ThreadPool& pool, std::span<const Int8Job> jobs, Int8Mode mode, SimdTier tier) {
  int8_matmul_with(kernels_of(tier), pool, jobs, mode);
}

void int8_matmul(ThreadPool& pool, const Exl3View& weight, const float* x, int64_t rows, float* y, Int8Mode mode,
                 SimdTier tier) {
  const Int8Job job{weight, x, rows, y};
  int8_matmul(pool, std::span(&job, 1), mode, tier);
}

}  // namespace espalier::codec
