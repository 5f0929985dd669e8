#include "codec/cuda/viterbi.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "codec/cuda/viterbi_variant.h"
#include "codec/viterbi_cost.h"
#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::codec {
namespace {

const std::vector<SearchVariant>& all_variants() {
  static const std::vector<SearchVariant> variants = [] {
    std::vector<SearchVariant> all = search_variants_low();
    for (const std::vector<SearchVariant>& more : {search_variants_middle(), search_variants_high()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  return variants;
}

// The first variant of this width that the device has shared memory for; with `one_tile` the first that takes single
// tiles.
int choose_variant(int k2, int shared_bytes, bool one_tile) {
  int chosen = -1;
  for (size_t i = 0; i < all_variants().size(); ++i) {
    const SearchVariant& v = all_variants()[i];
    if (v.k2 != k2 || v.shared_bytes > shared_bytes) continue;
    if (one_tile && v.tiles == 1) return static_cast<int>(i);
    if (chosen < 0) chosen = static_cast<int>(i);
  }
  return chosen;
}

}  // namespace

Result<DeviceSearch> DeviceSearch::create(device::Stream& stream, const DeviceSearchOptions& options) {
  const SearchOptions& o = options.search;
  if (!is_searchable_width(o.k2, o.codebook) || (o.n_cuts != 1 && o.n_cuts != 2 && o.n_cuts != 4)) {
    return invalid_argument("trellis search: no such width or number of cuts: " + std::to_string(o.k2) +
                            " half bits with codebook " + std::string(codebook_name(o.codebook)) + ", " +
                            std::to_string(o.n_cuts) + " cuts");
  }
  ASSIGN_OR_RETURN(const device::DeviceInfo info, device::find_device(stream.device()));
  DeviceSearch out;
  out.options_ = o;
  out.variant_ = choose_variant(o.k2, info.shared_bytes_per_block, options.one_tile);
  CHECK(out.variant_ >= 0) << "no kernel for a width of " << o.k2 << " half bits";
  const SearchVariant& variant = all_variants()[static_cast<size_t>(out.variant_)];
  out.tiles_per_block_ = variant.tiles;
  out.n_blocks_ = info.n_multiprocessors;

  const float* values = codebook_table_f32(o.codebook);
  const int unit = cost_unit(o.k2, o.codebook);
  std::vector<int16_t> codes(kNStates);
  for (int s = 0; s < kNStates; ++s) {
    codes[static_cast<size_t>(s)] =
        static_cast<int16_t>(std::clamp(std::floor(double{values[s]} * unit + 0.5), -32767.0, 32767.0));
    out.farthest_ = std::max(out.farthest_, std::fabs(static_cast<float>(codes[static_cast<size_t>(s)])));
  }
  out.unit_ = static_cast<float>(unit);
  std::vector<uint32_t> words(static_cast<size_t>(cuda::kCodeWords * cuda::kSearchThreads));
  std::vector<float> reach(2 * cuda::kSearchThreads);
  variant.place_codes(codes.data(), words.data(), reach.data());
  ASSIGN_OR_RETURN(out.words_, device::DeviceArray<uint32_t>::upload(stream, words, "trellis codes by thread"));
  ASSIGN_OR_RETURN(out.reach_, device::DeviceArray<float>::upload(stream, reach, "ends of trellis codes"));
  ASSIGN_OR_RETURN(out.codes_, device::DeviceArray<int16_t>::upload(stream, codes, "trellis codes"));
  ASSIGN_OR_RETURN(out.values_,
                   device::DeviceArray<float>::upload(stream, std::span<const float>(values, kNStates), "codebook"));
  ASSIGN_OR_RETURN(out.counters_,
                   device::DeviceArray<unsigned>::allocate(stream.device(), 2, "trellis search counters"));
  const size_t n_blocks = static_cast<size_t>(out.n_blocks_);
  ASSIGN_OR_RETURN(out.rows_,
                   device::DeviceBuffer::allocate(stream.device(), n_blocks * static_cast<size_t>(variant.row_bytes),
                                                  "kept trellis costs"));
  ASSIGN_OR_RETURN(out.costs_,
                   device::DeviceBuffer::allocate(
                       stream.device(), n_blocks * 8 * static_cast<size_t>(variant.float_nodes), "fp32 trellis costs"));
  ASSIGN_OR_RETURN(out.arrays_,
                   device::DeviceBuffer::allocate(stream.device(), n_blocks * static_cast<size_t>(variant.array_bytes),
                                                  "trellis costs"));
  RETURN_IF_ERROR(stream.fill_bytes(out.counters_.data(), 0, 2 * sizeof(unsigned)));
  RETURN_IF_ERROR(stream.synchronize());
  return Result<DeviceSearch>(std::move(out));
}

Status DeviceSearch::launch(device::Stream& stream, SearchWork work, int64_t n_units) {
  if (n_units == 0) return ok_status();
  const SearchVariant& variant = all_variants()[static_cast<size_t>(variant_)];
  work.tables.words = words_.data();
  work.tables.reach = reach_.data();
  work.tables.codes = codes_.data();
  work.tables.values = values_.data();
  work.tables.unit = unit_;
  work.tables.farthest = farthest_;
  work.rows = static_cast<unsigned char*>(rows_.data());
  work.row_bytes = variant.row_bytes;
  work.costs = static_cast<float*>(costs_.data());
  work.arrays = static_cast<unsigned char*>(arrays_.data());
  work.counters = counters_.data();
  work.n_cuts = options_.n_cuts;
  work.only_float = options_.costs == CostKind::kFloat;
  work.n_units = n_units;
  RETURN_IF_ERROR(stream.fill_bytes(counters_.data(), 0, sizeof(unsigned)));
  const device::ScopedDevice scope(stream.device());
  const int n_blocks = static_cast<int>(std::min<int64_t>(n_blocks_, n_units));
  ESPALIER_CUDA_TRY("trellis search", variant.launch(work, n_blocks, stream.handle()));
  return stream.launched("search_kernel");
}

Status DeviceSearch::search(device::Stream& stream, const float* tiles, int64_t n_tiles, uint16_t* states) {
  SearchWork work;
  work.tiles = tiles;
  work.states = states;
  work.n_tiles = n_tiles;
  return launch(stream, work, (n_tiles + tiles_per_block_ - 1) / tiles_per_block_);
}

Status DeviceSearch::ldlq(device::Stream& stream, std::span<const LdlqMatrix> matrices, int64_t k, int64_t n) {
  CHECK(k > 0 && n > 0 && k % kBlock == 0 && n % kBlock == 0) << "LDLQ of [" << k << ", " << n << "]";
  if (matrices.empty()) return ok_status();
  const bool two_sided = matrices[0].output_feedback != nullptr;
  for (const LdlqMatrix& m : matrices) CHECK((m.output_feedback != nullptr) == two_sided) << "a batch of both kinds";
  CHECK(!two_sided || n % (kBlock * tiles_per_block_) == 0) << "LDLQ of " << n << " columns in pairs of 128";
  const int64_t n_chains = static_cast<int64_t>(matrices.size()) * n / (kTile * tiles_per_block_);
  const int64_t n_units = n_chains * (k / kTile + (two_sided ? kBlock / kTile - 1 : 0));
  CHECK(n_units < (int64_t{1} << 31)) << "too many tiles in one batch";
  if (matrices_.size() < matrices.size()) {
    ASSIGN_OR_RETURN(matrices_,
                     device::DeviceArray<LdlqMatrix>::allocate(stream.device(), matrices.size(), "LDLQ batch"));
  }
  if (progress_.size() < static_cast<size_t>(n_chains)) {
    ASSIGN_OR_RETURN(
        progress_, device::DeviceArray<int>::allocate(stream.device(), static_cast<size_t>(n_chains), "LDLQ progress"));
  }
  RETURN_IF_ERROR(stream.copy_to_device(matrices_.data(), matrices.data(), matrices.size_bytes()));
  RETURN_IF_ERROR(stream.fill_bytes(progress_.data(), 0, static_cast<size_t>(n_chains) * sizeof(int)));
  SearchWork work;
  work.matrices = matrices_.data();
  work.progress = progress_.data();
  work.k = static_cast<int>(k);
  work.n = static_cast<int>(n);
  work.n_chains = static_cast<int>(n_chains);
  work.two_sided = two_sided;
  return launch(stream, work, n_units);
}

Result<int64_t> DeviceSearch::count_float_tiles(device::Stream& stream) const {
  ASSIGN_OR_RETURN(const std::vector<unsigned> counters, counters_.download(stream));
  return int64_t{counters[1]};
}

Result<std::vector<uint16_t>> search_tiles_on_device(device::Stream& stream, std::span<const float> tiles,
                                                     const DeviceSearchOptions& options) {
  CHECK(tiles.size() % kTileSize == 0) << tiles.size() << " numbers are no whole tiles";
  ASSIGN_OR_RETURN(DeviceSearch search, DeviceSearch::create(stream, options));
  ASSIGN_OR_RETURN(const device::DeviceArray<float> in, device::DeviceArray<float>::upload(stream, tiles, "tiles"));
  ASSIGN_OR_RETURN(const device::DeviceArray<uint16_t> states,
                   device::DeviceArray<uint16_t>::allocate(stream.device(), tiles.size(), "states"));
  RETURN_IF_ERROR(search.search(stream, in.data(), static_cast<int64_t>(tiles.size()) / kTileSize, states.data()));
  return states.download(stream);
}

}  // namespace espalier::codec
