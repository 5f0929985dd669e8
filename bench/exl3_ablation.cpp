// What does every option of the EXL3 quantizer gain or lose?
//
// True error tr(E^T H E) / tr(W^T H W) of each variant, raw Hessian, original basis, stored fp16 scales, divided by that of the
// defaults (golden cases: also by exllamav3's recorded error), geometric mean per group. Groups: (a) the golden linears with a
// Hessian; (b) synthetic 512x512 with log-normal rows, columns and channels, rank 16 plus noise activations, 2048 rows; (c) 24
// matrices of routed experts of the pocket model, Hessians from 24 calibration rows through the native network. For (b) and (c)
// also with the Hessian of other rows ("held out"), which says whether a gain is fitting the calibration.
// Usage: bench_exl3_ablation [--pocket DIR] [--golden DIR]... [--only SUBSTRING]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/rng.h"
#include "codec/quantizer.h"
#include "codec/strip_product.h"
#include "model/moe.h"
#include "stages/quantize/encode.h"
#include "stages/quantize/stream.h"
#include "bench/peer/golden_cases.h"

namespace espalier {
namespace {

using codec::QuantizedMatrix;
using codec::QuantizeOptions;

std::vector<int> exp_widths() { const char* e = getenv("EXP_K"); if (!e) return {4, 6, 8}; std::vector<int> v; for (; *e; ++e) v.push_back(2 * (*e - 48)); return v; }

struct Sample {
  std::string group;  // rows of the table
  std::string name;
  int64_t k = 0, n = 0;
  int k2 = 6;
  codec::Codebook codebook = codec::Codebook::kMul1;
  std::vector<float> weight;
  std::vector<double> hessian;
  std::vector<double> held_out;  // empty: none
  double recorded = 0;           // exllamav3's true error; 0: unknown
  int n_seeds = 1;
};

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

void add_golden(const std::filesystem::path& path, std::vector<Sample>* samples, ThreadPool& pool) {
  const SafetensorsFile file = codec::golden::open(path);
  for (codec::golden::Case& c : codec::golden::cases(file)) {
    if (c.hessian.empty()) continue;
    Sample s{"golden", c.name, c.k, c.n, c.k2, c.codebook, std::move(c.weight), std::move(c.hessian), {}, 0, 3};
    s.recorded = codec::measure_error(s.weight.data(), c.decoded.data(), s.k, s.n, s.hessian.data(), pool).true_error;
    samples->push_back(std::move(s));
  }
}

// X^T X / rows for rows of rank 16 plus noise, channels scaled by `channel`.
std::vector<double> synthetic_hessian(int64_t k, int64_t rows, const std::vector<double>& channel, const std::string& name, ThreadPool& pool) {
  const CounterRng basis(3, "synthetic basis");
  const CounterRng rng(4, name);
  constexpr int kRank = 16;
  std::vector<double> x(static_cast<size_t>(rows * k));
  pool.parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double z[kRank];
      for (int q = 0; q < kRank; ++q) z[q] = gaussian(rng, static_cast<uint64_t>(r * (k + kRank) + q));
      for (int64_t i = 0; i < k; ++i) {
        double v = gaussian(rng, static_cast<uint64_t>(r * (k + kRank) + kRank + i));
        for (int q = 0; q < kRank; ++q) v += z[q] * gaussian(basis, static_cast<uint64_t>(i * kRank + q)) * 0.5;
        x[static_cast<size_t>(r * k + i)] = v * channel[static_cast<size_t>(i)];
      }
    }
  });
  std::vector<double> h(static_cast<size_t>(k * k)), transposed(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) transposed[static_cast<size_t>(i * rows + r)] = x[static_cast<size_t>(r * k + i)];
  }
  pool.parallel_for(k / codec::kStripWidth, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> strip(static_cast<size_t>(rows * codec::kStripWidth));
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t r = 0; r < rows; ++r) std::copy_n(x.data() + r * k + s * codec::kStripWidth, codec::kStripWidth, strip.data() + r * codec::kStripWidth);
      codec::StripProduct p;
      p.a = transposed.data();
      p.a_stride = rows;
      p.strip = strip.data();
      p.out = h.data() + s * codec::kStripWidth;
      p.out_stride = k;
      p.rows = k;
      p.cols = rows;
      codec::strip_product(p, active_simd_tier());
    }
  });
  for (double& v : h) v /= static_cast<double>(rows);
  return h;
}

void add_synthetic(double row, double column, double channel, double correlation, std::vector<Sample>* samples, ThreadPool& pool) {
  constexpr int64_t k = 512; static const int64_t n = getenv("EXP_N") ? atoi(getenv("EXP_N")) : 512;
  char text[64];
  std::snprintf(text, sizeof text, "512x512 %.1f/%.1f/%.1f", row, column, channel);
  const CounterRng rng(5, text);
  Sample s{text, text, k, n, 6, codec::Codebook::kMul1, std::vector<float>(static_cast<size_t>(k * n)), {}, {}, 0, 1};
  std::vector<double> of_row(k), of_channel(k), of_column(static_cast<size_t>(std::max(k, n)));
  for (int64_t i = 0; i < k; ++i) {
    const double a = gaussian(rng, static_cast<uint64_t>(i)), b = gaussian(rng, static_cast<uint64_t>(k + i));
    of_row[static_cast<size_t>(i)] = std::exp(row * a);
    of_channel[static_cast<size_t>(i)] = std::exp(channel * (correlation * a + std::sqrt(1 - correlation * correlation) * b));
    of_column[static_cast<size_t>(i)] = std::exp(column * gaussian(rng, static_cast<uint64_t>(2 * k + i)));
  }
  for (int64_t i = 0; i < k * n; ++i) {
    s.weight[static_cast<size_t>(i)] = static_cast<float>(0.02 * gaussian(rng, static_cast<uint64_t>(3 * k + i)) * of_row[static_cast<size_t>(i / n)] * of_column[static_cast<size_t>(i % n)]);
  }
  s.hessian = synthetic_hessian(k, 2048, of_channel, "fit", pool);
  s.held_out = synthetic_hessian(k, 8192, of_channel, "held out", pool);
  for (int k2 : exp_widths()) {
    s.k2 = k2;
    samples->push_back(s);
  }
}

// Inputs of every layer of the native network for the given rows.
std::vector<MoeInputs> native_inputs(const WeightLoader& loader, const std::vector<DatasetRow>& rows, ThreadPool& pool) {
  const CallContext context{loader.config(), loader.engram_hashes(), loader.engram_token_map(), Numerics::kKvq, pool, nullptr};
  SilentProgress progress;
  const GlobalWeights globals = loader.load_globals(pool).value();
  CalibrationStream stream = CalibrationStream::begin(context, globals, rows).value();
  std::vector<MoeInputs> inputs;
  for (int layer = 0; layer < context.config.n_layers; ++layer) {
    const BlockWeights weights = loader.load_block(pool, layer).value();
    BlockCapture capture({}, false, pool);
    CHECK(stream.observe_layer(context, weights, layer, &capture, progress).ok());
    capture.finish();
    inputs.push_back(capture.moe());
    CHECK(stream.advance_layer(context, weights, layer, progress).ok());
  }
  return inputs;
}

// Hessians of one expert, as the stage `quantize` makes them: routed rows weighted by g^2; with the layer-wide prior when
// `use_prior`. [0]: w1 and w3, [1]: w2.
std::vector<std::vector<double>> expert_hessians(const CallContext& context, const ExpertWeights& expert, const MoeInputs& inputs, int e, bool use_prior, ThreadPool& pool) {
  const ExpertTokens routed = tokens_by_expert(inputs, context.config.n_experts)[static_cast<size_t>(e)];
  std::vector<float> scale;
  for (float g : routed.weights) scale.push_back(routing_scale(g, 2));
  const auto hidden_of = [&](const std::vector<int32_t>& tokens, const float* factors) {
    HessianAccumulator accumulator(expert.w2.in());
    std::vector<float> x(tokens.size() * static_cast<size_t>(inputs.d_model)), z(tokens.size() * static_cast<size_t>(expert.w2.in()));
    for (size_t i = 0; i < tokens.size(); ++i) std::copy_n(inputs.x.data() + tokens[i] * inputs.d_model, inputs.d_model, x.data() + static_cast<int64_t>(i) * inputs.d_model);
    expert_hidden(context, expert, x.data(), static_cast<int64_t>(tokens.size()), nullptr, z.data());
    accumulator.add(pool, z.data(), static_cast<int64_t>(tokens.size()), factors);
    return accumulator.finish(pool);
  };
  HessianAccumulator own(inputs.d_model), all(inputs.d_model);
  add_rows(pool, inputs, routed.tokens, scale.data(), &own);
  HessianPrior prior, hidden_prior;
  if (use_prior) {
    all.add(pool, inputs.x.data(), inputs.n_tokens());
    prior = make_prior(all.finish(pool));
    hidden_prior = make_prior(hidden_of(sample_tokens(inputs.n_tokens(), 4096, 0, "prior"), nullptr));
  }
  return {blend_with_prior(own.finish(pool), prior, static_cast<double>(context.config.d_model) / 4).values,
          blend_with_prior(hidden_of(routed.tokens, scale.data()), hidden_prior, static_cast<double>(context.config.d_ff) / 4).values};
}

void add_pocket(const std::string& dir, std::vector<Sample>* samples, ThreadPool& pool) {
  const Dataset data = load_dataset(std::filesystem::path(dir) / "data" / "calibration.jsonl").value();
  const std::vector<DatasetRow> some = spread_rows(data.rows, 48);
  std::vector<DatasetRow> fit, other;
  for (size_t i = 0; i < some.size(); ++i) (i % 2 == 0 ? fit : other).push_back(some[i]);
  const WeightLoader loader = WeightLoader::open(dir).value();
  const CallContext context{loader.config(), loader.engram_hashes(), loader.engram_token_map(), Numerics::kKvq, pool, nullptr};
  const std::vector<MoeInputs> fit_inputs = native_inputs(loader, fit, pool), other_inputs = native_inputs(loader, other, pool);
  for (int layer = 0; layer < context.config.n_layers; ++layer) {
    const BlockWeights weights = loader.load_block(pool, layer).value();
    const int e = (5 * layer + 3) % context.config.n_experts;
    const ExpertWeights& expert = weights.moe.experts[static_cast<size_t>(e)];
    const auto h = expert_hessians(context, expert, fit_inputs[static_cast<size_t>(layer)], e, true, pool);
    const auto held_out = expert_hessians(context, expert, other_inputs[static_cast<size_t>(layer)], e, false, pool);
    const Linear* const linears[] = {&expert.w1, &expert.w3, &expert.w2};
    for (int m = 0; m < 3; ++m) {
      Sample s{m < 2 ? "pocket w1 w3" : "pocket w2", "layers." + std::to_string(layer) + ".ffn.experts." + std::to_string(e) + ".w" + "132"[m], linears[m]->in(), linears[m]->out(), 6, codec::Codebook::kMul1, {}, h[m / 2], held_out[m / 2], 0, 1};
      s.weight.resize(static_cast<size_t>(s.k * s.n));
      linears[m]->weight_kn(pool, s.weight.data());
      for (int k2 : exp_widths()) {
        s.k2 = k2;
        samples->push_back(s);
      }
    }
  }
}

struct Variant {
  std::string name;
  std::function<void(QuantizeOptions&)> change;
};

std::vector<Variant> variants() {
  std::vector<Variant> v;
  v.push_back({"defaults (fast)", [](QuantizeOptions&) {}});
  v.push_back({"no refit", [](QuantizeOptions& o) { o.refit_rounds = 0; }});
  v.push_back({"refit x2", [](QuantizeOptions& o) { o.refit_rounds = 2; }});
  v.push_back({"refit x4", [](QuantizeOptions& o) { o.refit_rounds = 4; }});
  v.push_back({"4 cuts", [](QuantizeOptions& o) { o.n_cuts = 4; }});
  v.push_back({"descent x1", [](QuantizeOptions& o) { o.descent_sweeps = 1; }});
  v.push_back({"descent x2", [](QuantizeOptions& o) { o.descent_sweeps = 2; }});
  v.push_back({"descent x4", [](QuantizeOptions& o) { o.descent_sweeps = 4; }});
  v.push_back({"draws x4", [](QuantizeOptions& o) { o.n_draws = 4; }});
  v.push_back({"balanced (1/2, 1/4)", [](QuantizeOptions& o) { o.scale_rule.row_weight = 0.5; o.scale_rule.row_hessian = 0.25; }});
  v.push_back({"rows (0.6, 0.2)", [](QuantizeOptions& o) { o.scale_rule.row_weight = 0.6; o.scale_rule.row_hessian = 0.2; }});
  v.push_back({"rows (1, 0)", [](QuantizeOptions& o) { o.scale_rule.row_weight = 1; o.scale_rule.row_hessian = 0; }});
  v.push_back({"columns 1", [](QuantizeOptions& o) { o.scale_rule.column_weight = 1; }});
  v.push_back({"columns 3/4", [](QuantizeOptions& o) { o.scale_rule.column_weight = 0.75; }});
  v.push_back({"no blocks", [](QuantizeOptions& o) { o.scale_rule.normalise_blocks = false; }});
  v.push_back({"spread x0.97", [](QuantizeOptions& o) { o.spread = 0.97 * codec::best_spread(o.codebook, o.k2); }});
  v.push_back({"spread x1.03", [](QuantizeOptions& o) { o.spread = 1.03 * codec::best_spread(o.codebook, o.k2); }});
  v.push_back({"damping 0.005", [](QuantizeOptions& o) { o.damping = 0.005; }});
  v.push_back({"damping 0.01", [](QuantizeOptions& o) { o.damping = 0.01; }});
  v.push_back({"damping 0.05", [](QuantizeOptions& o) { o.damping = 0.05; }});
  v.push_back({"damping 0.1", [](QuantizeOptions& o) { o.damping = 0.1; }});
  return v;
}

// "damping=0.1,descent=2": a variant from the command line.
Variant parse_variant(const std::string& text) {
  return {text, [text](QuantizeOptions& o) {
            size_t at = 0;
            while (at < text.size()) {
              const size_t end = std::min(text.find(',', at), text.size());
              const size_t equals = text.find('=', at);
              const std::string key = text.substr(at, equals - at);
              const double value = std::atof(text.substr(equals + 1, end - equals - 1).c_str());
              if (key == "damping") o.damping = value;
              else if (key == "descent") o.descent_sweeps = static_cast<int>(value);
              else if (key == "refit") o.refit_rounds = static_cast<int>(value);
              else if (key == "cuts") o.n_cuts = static_cast<int>(value);
              else if (key == "draws") o.n_draws = static_cast<int>(value);
              else if (key == "a") o.scale_rule.row_weight = value;
              else if (key == "b") o.scale_rule.row_hessian = value;
              else if (key == "c") o.scale_rule.column_weight = value;
              else if (key == "two") o.two_sided = value != 0;
              else if (key == "tiles") o.spread_tiles = static_cast<int>(value);
              else if (key == "blocks") o.scale_rule.normalise_blocks = value != 0;
              else if (key == "spread") o.spread = value * codec::best_spread(o.codebook, o.k2);
              else CHECK(false) << "no option '" << key << "'";
              at = end + 1;
            }
          }};
}

struct Outcome {
  double fit = 0, held_out = 0;
};

Outcome evaluate(const Sample& s, const Variant& variant, ThreadPool& pool) {
  Outcome mean;
  for (int seed = 0; seed < s.n_seeds; ++seed) {
    QuantizeOptions options;
    options.k2 = s.k2;
    options.codebook = s.codebook;
    options.seed = static_cast<uint64_t>(seed);
    options.name = s.name;
    variant.change(options);
    const QuantizedMatrix q = codec::quantize_matrix(s.weight.data(), s.k, s.n, s.hessian.data(), options, pool).value();
    mean.fit += q.true_error / s.n_seeds;
    if (s.held_out.empty()) continue;
    std::vector<float> decoded(s.weight.size());
    codec::decode_weight(q.tensor.view(), decoded.data(), pool);
    mean.held_out += codec::measure_error(s.weight.data(), decoded.data(), s.k, s.n, s.held_out.data(), pool).true_error / s.n_seeds;
  }
  return mean;
}

int run(const std::vector<std::string>& golden, const std::string& pocket, const std::string& only, const std::string& only_group, const std::vector<std::string>& extra) {
  ThreadPool pool;
  std::vector<Sample> samples;
  for (const std::string& path : golden) add_golden(path, &samples, pool);
  add_synthetic(0.1, 0.1, 0.3, 0, &samples, pool);
  add_synthetic(0.3, 0.2, 0.5, -0.3, &samples, pool);
  add_synthetic(0.4, 0.4, 0.7, 0, &samples, pool);
  if (!pocket.empty()) add_pocket(pocket, &samples, pool);
  if (!only_group.empty()) std::erase_if(samples, [&](const Sample& s) { return s.group.find(only_group) == std::string::npos; });
  std::vector<std::string> rows;
  for (const Sample& s : samples) {
    const std::string row = s.group + (s.recorded > 0 ? "" : " K=" + codec::width_text(s.k2));
    if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
  }
  std::vector<Outcome> base;
  std::vector<Variant> list = variants();
  if (!extra.empty()) {
    list.resize(1);
    for (const std::string& text : extra) list.push_back(parse_variant(text));
  }
  for (const Variant& variant : list) {
    if (!base.empty() && !only.empty() && variant.name.find(only) == std::string::npos) continue;
    const auto start = std::chrono::steady_clock::now();
    std::vector<Outcome> outcomes(samples.size());
    pool.parallel_for(static_cast<int64_t>(samples.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) outcomes[static_cast<size_t>(i)] = evaluate(samples[static_cast<size_t>(i)], variant, pool);
    });
    if (base.empty()) base = outcomes;
    std::printf("%-32s", variant.name.c_str());
    for (const std::string& row : rows) {
      double fit = 0, held = 0, recorded = 0;
      int count = 0;
      for (size_t i = 0; i < samples.size(); ++i) {
        const Sample& s = samples[i];
        if (s.group + (s.recorded > 0 ? "" : " K=" + codec::width_text(s.k2)) != row) continue;
        ++count;
        fit += std::log(outcomes[i].fit / base[i].fit);
        if (s.recorded > 0) recorded += std::log(outcomes[i].fit / s.recorded);
        if (!s.held_out.empty()) held += std::log(outcomes[i].held_out / base[i].held_out);
      }
      if (recorded != 0) std::printf("  | %s: %.4f %.4f", row.c_str(), std::exp(fit / count), std::exp(recorded / count));
      else std::printf(" | %.4f %.4f", std::exp(fit / count), std::exp(held / count));
    }
    std::printf(" | %.1f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  for (const std::string& row : rows) std::printf("%s\n", row.c_str());
  return 0;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  std::vector<std::string> golden, extra;
  std::string pocket, only, group;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--golden") golden.push_back(argv[i + 1]);
    if (flag == "--pocket") pocket = argv[i + 1];
    if (flag == "--only") only = argv[i + 1];
    if (flag == "--variant") extra.push_back(argv[i + 1]);
    if (flag == "--group") group = argv[i + 1];
  }
  return espalier::run(golden, pocket, only, group, extra);
}
