#include "bench/exl3_quality/panel.h"

#include <algorithm>
#include <cmath>

#include "base/hash.h"
#include "bench/exl3_quality/cache.h"
#include "model/forward.h"

namespace espalier::quality {
namespace {

constexpr int64_t kChunk = 256;

struct Network {
  GlobalWeights globals;
  std::vector<BlockWeights> layers;
};

using Experts = std::vector<std::vector<ExpertWeights>>;  // by layer

Experts make_experts(const ExpertSet& set, const EncodedSet& encoded, int64_t n_experts) {
  Experts out(static_cast<size_t>(set.n_layers));
  for (auto& layer : out) layer.resize(static_cast<size_t>(n_experts));
  for (size_t i = 0; i < set.matrices.size(); ++i) {
    const MatrixSpec& spec = set.matrices[i].spec;
    ExpertWeights& expert = out[static_cast<size_t>(spec.block)][static_cast<size_t>(spec.expert)];
    Linear& place = spec.kind == MatrixKind::kExpertW1   ? expert.w1
                    : spec.kind == MatrixKind::kExpertW3 ? expert.w3
                                                         : expert.w2;
    place = Linear::from_exl3(encoded.tensors[i], WeightResidency::kUnpacked);
  }
  return out;
}

void swap_experts(Network& network, Experts& experts) {
  for (size_t layer = 0; layer < experts.size(); ++layer) std::swap(network.layers[layer].moe.experts, experts[layer]);
}

// Logits [n, vocab] of a whole row.
Status run_row(const CallContext& context, const Network& network, std::span<const int32_t> ids,
               std::vector<float>& logits) {
  SequenceState state(context.config);
  logits.clear();
  for (size_t begin = 0; begin < ids.size(); begin += kChunk) {
    StreamState stream;
    const std::span<const int32_t> chunk = ids.subspan(begin, std::min<size_t>(kChunk, ids.size() - begin));
    RETURN_IF_ERROR(begin_call(context, network.globals, state, chunk, &stream));
    for (size_t layer = 0; layer < network.layers.size(); ++layer) {
      RETURN_IF_ERROR(run_layer(context, network.layers[layer], static_cast<int>(layer), state, stream));
    }
    const Tensor out = finish_call(context, network.globals, state, stream, true);
    const std::span<const float> values = out.as<float>();
    logits.insert(logits.end(), values.begin(), values.end());
  }
  for (float x : logits) {
    if (!std::isfinite(x)) return data_loss("logits are not finite");
  }
  return ok_status();
}

ScoreSums score_row(const DatasetRow& row, const std::vector<int32_t>& scored, const std::vector<float>& native,
                    const std::vector<float>& candidate, ThreadPool& pool) {
  const size_t vocab = native.size() / row.ids.size();
  std::vector<PositionScore> scores(scored.size());
  pool.parallel_for(static_cast<int64_t>(scored.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto t = static_cast<size_t>(scored[static_cast<size_t>(i)]);
      const std::span<const float> p(native.data() + t * vocab, vocab), q(candidate.data() + t * vocab, vocab);
      scores[static_cast<size_t>(i)] = score_position(p, q, row.ids[t + 1]);
    }
  });
  ScoreSums sums;
  for (const PositionScore& s : scores) sums.add(s);
  return sums;
}

std::vector<double> numbers(const PanelScores& scores) {
  std::vector<double> out;
  for (const ScoreSums& s : scores.rows) {
    out.insert(out.end(), {static_cast<double>(s.positions), static_cast<double>(s.same_top1), s.kl, s.nll_reference,
                           s.nll_candidate});
  }
  return out;
}

PanelScores from_numbers(const std::vector<double>& v) {
  PanelScores out;
  for (size_t i = 0; i + 5 <= v.size(); i += 5) {
    out.rows.push_back({static_cast<int64_t>(v[i]), static_cast<int64_t>(v[i + 1]), v[i + 2], v[i + 3], v[i + 4]});
  }
  return out;
}

}  // namespace

ScoreSums PanelScores::total() const {
  ScoreSums sums;
  for (const ScoreSums& row : rows) sums.add(row);
  return sums;
}

Result<std::vector<PanelScores>> score_panel(const WeightLoader& loader, const ExpertSet& experts,
                                             const std::vector<PanelCandidate>& candidates,
                                             const std::vector<DatasetRow>& panel, const std::filesystem::path& work,
                                             Progress& progress, ThreadPool& pool) {
  // The forward pass itself has no fingerprint, so its results belong to this very program.
  ASSIGN_OR_RETURN(const std::string program, sha256_file_hex("/proc/self/exe"));
  const Config& config = loader.config();
  std::vector<std::pair<const DatasetRow*, std::vector<int32_t>>> rows;
  int64_t tokens = 0;
  for (const DatasetRow& row : panel) {
    std::vector<int32_t> scored = scored_positions(row);
    if (scored.empty()) continue;
    tokens += static_cast<int64_t>(row.ids.size());
    rows.emplace_back(&row, std::move(scored));
  }
  std::vector<PanelScores> out(candidates.size());
  std::vector<std::string> keys;
  std::vector<size_t> missing;
  const auto path_of = [&](size_t i) { return work / ("kl-" + sha256_hex(keys[i]).substr(0, 16) + ".bin"); };
  for (size_t i = 0; i < candidates.size(); ++i) {
    keys.push_back(experts.identity + " layers " + std::to_string(experts.n_layers) + " panel " +
                   dataset_content_sha256(panel) + " experts " + candidates[i].experts->digest + " program " + program);
    std::vector<double> values(rows.size() * 5);
    if (read_cache(path_of(i), keys[i], {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(double)})) {
      out[i] = from_numbers(values);
    } else {
      missing.push_back(i);
    }
  }
  if (missing.empty()) return out;

  Network network;
  ASSIGN_OR_RETURN(network.globals, loader.load_globals(pool));
  for (int layer = 0; layer < config.n_layers; ++layer) {
    ASSIGN_OR_RETURN(BlockWeights block, loader.load_block(pool, layer));
    network.layers.push_back(std::move(block));
  }
  std::vector<Experts> replacements;
  for (size_t i : missing) replacements.push_back(make_experts(experts, *candidates[i].experts, config.n_experts));
  const CallContext context{config, loader.engram_hashes(), loader.engram_token_map(), Numerics::kKvq, pool, nullptr};
  progress.begin("panel, tokens", tokens * static_cast<int64_t>(missing.size() + 1));
  std::vector<float> native, quantized;
  for (const auto& [row, scored] : rows) {
    const auto n = static_cast<int64_t>(row->ids.size());
    Status status = run_row(context, network, row->ids, native);
    progress.advance(n, "native");
    for (size_t c = 0; status.ok() && c < missing.size(); ++c) {
      if (progress.is_cancelled()) return cancelled("stopped on the panel; encoded matrices are kept");
      swap_experts(network, replacements[c]);
      status = run_row(context, network, row->ids, quantized);
      swap_experts(network, replacements[c]);
      if (!status.ok()) break;
      out[missing[c]].rows.push_back(score_row(*row, scored, native, quantized, pool));
      progress.advance(n, candidates[missing[c]].name);
    }
    if (!status.ok()) return std::move(status).with_context("panel row '" + row->id + "'");
  }
  for (size_t i : missing) {
    const std::vector<double> values = numbers(out[i]);
    RETURN_IF_ERROR(write_cache(path_of(i), keys[i],
                                {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(double)}));
  }
  return out;
}

}  // namespace espalier::quality
