#include "stages/swap_sweep.h"

#include <algorithm>
#include <cmath>

#include "stages/eval/statistics.h"
#include "stages/quantize/stream.h"

namespace espalier {
namespace {

// Puts a pack's experts into native weights, and takes them out again.
class Exchange {
 public:
  Exchange(BlockWeights& native, std::vector<ExpertWeights>& other, int expert)
      : native_(native), other_(other), expert_(expert) {
    swap();
  }
  ~Exchange() { swap(); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

 private:
  void swap() {
    if (expert_ < 0) return std::swap(native_.moe.experts, other_);
    const auto e = static_cast<size_t>(expert_);
    std::swap(native_.moe.experts[e], other_[e]);
  }
  BlockWeights& native_;
  std::vector<ExpertWeights>& other_;
  int expert_;
};

// The exchange of all layers that a restored layer splits off; swaps.size(): none.
size_t whole_of(const std::vector<Swap>& swaps, const Swap& restored) {
  const auto it = std::find_if(swaps.begin(), swaps.end(), [&](const Swap& s) {
    return s.layer < 0 && s.expert < 0 && s.pack == restored.pack && s.noise == restored.noise;
  });
  return static_cast<size_t>(it - swaps.begin());
}

class Sweep {
 public:
  Sweep(const WeightLoader& native, const std::vector<const WeightLoader*>& packs, const std::vector<Swap>& swaps,
        const SwapSweepOptions& options, Progress& progress, ThreadPool& pool)
      : native_(native),
        config_(native.config()),
        packs_(packs),
        swaps_(swaps),
        progress_(progress),
        pool_(pool),
        context_{config_, native.engram_hashes(), native.engram_token_map(), options.numerics, pool, nullptr} {}

  // KL sums [n_swaps, rows.size()].
  Status run(const GlobalWeights& globals, const std::vector<DatasetRow>& rows, std::vector<double>* kl) {
    ASSIGN_OR_RETURN(CalibrationStream clean, CalibrationStream::begin(context_, globals, rows));
    std::vector<CalibrationStream> open(swaps_.size());
    for (size_t i = 0; i < swaps_.size(); ++i) {
      if (swaps_[i].layer < 0) open[i] = clean;
    }
    for (int layer = 0; layer < config_.n_layers; ++layer) {
      ASSIGN_OR_RETURN(BlockWeights weights, native_.load_block(pool_, layer));
      std::vector<BlockWeights> others;
      for (const WeightLoader* pack : packs_) {
        ASSIGN_OR_RETURN(BlockWeights block, pack->load_block(pool_, layer));
        others.push_back(std::move(block));
      }
      for (size_t i = 0; i < swaps_.size(); ++i) {
        if (swaps_[i].layer == layer) open[i] = swaps_[i].restores ? open[whole_of(swaps_, swaps_[i])] : clean;
      }
      for (size_t i = 0; i < swaps_.size(); ++i) {
        const Swap& s = swaps_[i];
        if (s.layer > layer) continue;
        if (s.restores ? layer > s.layer : s.layer == layer || s.layer < 0) {
          std::vector<ExpertWeights>& pack = others[static_cast<size_t>(s.pack)].moe.experts;
          std::vector<ExpertWeights> noisy;
          if (s.noise) noisy = noisy_experts(weights.moe.experts, pack, *s.noise, layer, pool_);
          const Exchange exchange(weights, s.noise ? noisy : pack, s.expert);
          RETURN_IF_ERROR(open[i].advance_layer(context_, weights, layer, progress_));
        } else {
          RETURN_IF_ERROR(open[i].advance_layer(context_, weights, layer, progress_));
        }
        count(rows);
      }
      RETURN_IF_ERROR(clean.advance_layer(context_, weights, layer, progress_));
      count(rows);
    }
    for (size_t r = 0; r < rows.size(); ++r) {
      const std::vector<int32_t> scored = scored_positions(rows[r]);
      ASSIGN_OR_RETURN(const Tensor reference, clean.logits(context_, globals, r));
      for (size_t i = 0; i < swaps_.size(); ++i) {
        if (progress_.is_cancelled()) return cancelled("stopped at row '" + rows[r].id + "'");
        ASSIGN_OR_RETURN(const Tensor candidate, open[i].logits(context_, globals, r));
        ASSIGN_OR_RETURN((*kl)[i * rows.size() + r], row_kl(reference, candidate, scored, rows[r]));
      }
    }
    return ok_status();
  }

 private:
  void count(const std::vector<DatasetRow>& rows) {
    int64_t n = 0;
    for (const DatasetRow& row : rows) n += static_cast<int64_t>(row.ids.size());
    progress_.advance(n);
  }

  Result<double> row_kl(const Tensor& reference, const Tensor& candidate, const std::vector<int32_t>& scored,
                        const DatasetRow& row) {
    const int64_t vocab = reference.dim(1);
    std::vector<double> kl(scored.size());
    pool_.parallel_for(static_cast<int64_t>(scored.size()), 4, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const auto t = static_cast<size_t>(scored[static_cast<size_t>(i)]);
        const auto of = [&](const Tensor& logits) {
          return logits.as<float>().subspan(t * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
        };
        kl[static_cast<size_t>(i)] = score_position(of(reference), of(candidate), row.ids[t + 1]).kl;
      }
    });
    double sum = 0;
    for (const double x : kl) sum += x;
    if (!std::isfinite(sum)) return data_loss("row '" + row.id + "': the logits are not finite; run 'espalier verify' on the model and the packs");
    return sum;
  }

  const WeightLoader& native_;
  const Config& config_;
  const std::vector<const WeightLoader*>& packs_;
  const std::vector<Swap>& swaps_;
  Progress& progress_;
  ThreadPool& pool_;
  const CallContext context_;
};

// Bytes of a row's state: streams and caches, as far as they matter.
uint64_t state_bytes(const Config& c, int64_t n_tokens) {
  const int64_t floats = n_tokens * (c.n_streams + 2) * c.d_model + c.n_layers * (c.window + SequenceState::kRewindRows) * c.head_dim;
  return static_cast<uint64_t>(floats) * sizeof(float);
}

}  // namespace

double SwapMeasurement::mean(size_t swap, size_t domain) const {
  double sum = 0;
  int64_t positions = 0;
  for (size_t r = 0; r < row_domain.size(); ++r) {
    if (static_cast<size_t>(row_domain[r]) != domain) continue;
    sum += kl[swap * row_domain.size() + r];
    positions += row_positions[r];
  }
  return positions == 0 ? 0 : sum / static_cast<double>(positions);
}

Result<SwapMeasurement> measure_swaps(const WeightLoader& native, const std::vector<const WeightLoader*>& packs,
                                      const std::vector<Swap>& swaps, const Dataset& data, const SwapSweepOptions& options,
                                      Progress& progress, ThreadPool& pool) {
  const Config& config = native.config();
  for (const Swap& s : swaps) {
    if (s.restores && (s.expert >= 0 || whole_of(swaps, s) == swaps.size())) {
      return invalid_argument("a restored layer is a whole one and needs the exchange of all layers beside it");
    }
  }
  for (const WeightLoader* pack : packs) {
    const Config& other = pack->config();
    if (other.n_layers != config.n_layers || other.n_experts != config.n_experts || other.d_model != config.d_model ||
        other.d_ff != config.d_ff || other.vocab != config.vocab) {
      return failed_precondition("'" + pack->dir() + "' has not the shape of '" + native.dir() + "': it was not made from it");
    }
  }
  SwapMeasurement out;
  out.domains = data.domains();
  std::vector<DatasetRow> rows;
  int64_t tokens = 0;
  for (const DatasetRow& row : data.rows) {
    const std::vector<int32_t> scored = scored_positions(row);
    if (scored.empty()) continue;
    rows.push_back(row);
    tokens += static_cast<int64_t>(row.ids.size());
    out.row_domain.push_back(static_cast<int32_t>(std::find(out.domains.begin(), out.domains.end(), row.domain) - out.domains.begin()));
    out.row_positions.push_back(static_cast<int64_t>(scored.size()));
  }
  if (rows.empty()) return data_loss("the data set has no scored positions: no row has an assistant or raw token after its first one");
  int64_t passes = config.n_layers;
  for (const Swap& s : swaps) passes += s.layer < 0 ? config.n_layers : config.n_layers - s.layer;
  progress.begin("swaps", passes * tokens);
  ASSIGN_OR_RETURN(const GlobalWeights globals, native.load_globals(pool));
  out.kl.assign(swaps.size() * rows.size(), 0);
  Sweep sweep(native, packs, swaps, options, progress, pool);
  for (size_t begin = 0; begin < rows.size();) {
    size_t end = begin;
    uint64_t bytes = 0;
    while (end < rows.size()) {
      const uint64_t more = state_bytes(config, static_cast<int64_t>(rows[end].ids.size())) * (swaps.size() + 1);
      if (end > begin && bytes + more > options.memory_bytes) break;
      bytes += more;
      ++end;
    }
    const std::vector<DatasetRow> batch(rows.begin() + static_cast<int64_t>(begin), rows.begin() + static_cast<int64_t>(end));
    std::vector<double> kl(swaps.size() * batch.size());
    RETURN_IF_ERROR(sweep.run(globals, batch, &kl));
    for (size_t i = 0; i < swaps.size(); ++i) {
      std::copy_n(kl.begin() + static_cast<int64_t>(i * batch.size()), batch.size(), out.kl.begin() + static_cast<int64_t>(i * rows.size() + begin));
    }
    begin = end;
  }
  return out;
}

}  // namespace espalier
