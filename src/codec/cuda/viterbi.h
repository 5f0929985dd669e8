// Trellis search on a GPU: the states of codec/viterbi.h, bit for bit, ties and the fp32 fallback included; and LDLQ
// around it.
//
// One block of 512 threads searches one or two tiles at a time, a block per multiprocessor. Which one finishes first
// decides nothing but the time. Source: docs/decisions/cuda-quantizer.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "codec/viterbi.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace espalier::codec {

struct LdlqMatrix {
  const double* weight = nullptr;  // [k, n], rotated; device memory, like all below
  double* error = nullptr;         // [k, n]: written, weight minus codebook values
  const double* feedback =
      nullptr;  // [k, k] of block_ldl_feedback: row r is what the errors below block r/16 add to target row r
  uint16_t* trellis = nullptr;  // [k/16, n/16, 8*k2]: written
  // Feedback along the outputs (codec/column_encoder.h), inside blocks of 128 columns: both null without it.
  const double* output_feedback = nullptr;  // [n/128, 128, 128], each a block_ldl_feedback
  double* corrected = nullptr;              // [k, n]: written, error plus what the errors below add
};

struct DeviceSearchOptions {
  SearchOptions search;   // `tier` has no meaning here
  bool one_tile = false;  // search single tiles where pairs are faster: for less work than multiprocessors
};

// Tables and working memory for one codebook, width and device. Move-only; one stream at a time.
class DeviceSearch {
 public:
  // Errors: invalid_argument for a width that is_searchable_width refuses; resource_exhausted; unavailable without a
  // device.
  static Result<DeviceSearch> create(device::Stream& stream, const DeviceSearchOptions& options);

  // tiles [n_tiles, 256]:f32 finite, states [n_tiles, 256]:u16, both in device memory. Queued on the stream.
  Status search(device::Stream& stream, const float* tiles, int64_t n_tiles, uint16_t* states);
  // LDLQ over all matrices at once, all [k, n], multiples of 128, all with or all without feedback along the outputs;
  // with it n must be a multiple of 128 * tiles_per_block(). Queued. The same bytes for any composition of the batch.
  Status ldlq(device::Stream& stream, std::span<const LdlqMatrix> matrices, int64_t k, int64_t n);

  // Tiles of this object's calls that were searched again with fp32 costs. Waits for the stream.
  Result<int64_t> count_float_tiles(device::Stream& stream) const;
  int tiles_per_block() const { return tiles_per_block_; }
  const float* values() const { return values_.data(); }  // the codebook, [65536]:f32 in device memory
  const SearchOptions& options() const { return options_; }

 private:
  Status launch(device::Stream& stream, struct SearchWork work, int64_t n_units);

  SearchOptions options_;
  int variant_ = 0;
  int tiles_per_block_ = 1;
  int n_blocks_ = 0;
  device::DeviceArray<uint32_t> words_;
  device::DeviceArray<float> reach_;  // pairs
  device::DeviceArray<int16_t> codes_;
  device::DeviceArray<float> values_;
  device::DeviceBuffer rows_, costs_, arrays_;
  device::DeviceArray<unsigned> counters_;  // next unit of work, tiles searched with fp32 costs
  device::DeviceArray<LdlqMatrix> matrices_;
  device::DeviceArray<int> progress_;
  float unit_ = 1, farthest_ = 0;
};

// Tiles and states in host memory. For tests and small jobs.
Result<std::vector<uint16_t>> search_tiles_on_device(device::Stream& stream, std::span<const float> tiles,
                                                     const DeviceSearchOptions& options);

}  // namespace espalier::codec
