// The network on the GPU with products in integers and sums that threads share: every row by itself, whatever the calls; near the CPU's logits.
// And recorded passes, in both products, against the same launches one by one.
#include "tests/gpu/network_data.h"

namespace espalier::cuda {
namespace {

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double error = 0, power = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = double{got[i]} - double{expected[i]};
    error += d * d, power += double{expected[i]} * double{expected[i]};
  }
  return got.size() == expected.size() ? std::sqrt(error / power) : 1e9;
}

const RandomPack& mul1_pack() {
  static const RandomPack pack(true);
  return pack;
}

std::vector<int32_t> some_ids(int64_t n, int64_t vocab) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>((i * i * 7 + i / 3) % std::min<int64_t>(vocab, 400)));
  return ids;
}

std::vector<float> cpu_logits(const std::string& dir, const std::vector<int32_t>& ids, Numerics numerics) {
  const auto cpu = taken(Model::load(dir, {}, test_pool()));
  SequenceState state(cpu->config());
  ForwardOptions o;
  o.numerics = numerics;
  o.all_logits = true;
  return values(taken(forward(*cpu, state, ids, o, test_pool())).logits);
}

TEST(NetworkCudaFast, calls_and_chunks_of_any_size_give_the_same_bits) {
  for (const std::string& dir : {golden_dir() + "/tiny-a", mul1_pack().dir()}) {
    const auto model = load(dir, Products::kInt8Residual);
    const std::vector<int32_t> ids = some_ids(150, model->config().vocab);
    for (Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
      const std::vector<float> whole = device_logits(model, ids, numerics, 1000);
      for (int64_t call : {1, 2, 3, 5, 8, 9, 16, 40}) {
        EXPECT_EQ(bit_differences(device_logits(model, ids, numerics, call), whole), "") << dir << " " << numerics_name(numerics) << " calls of " << call;
      }
      EXPECT_EQ(bit_differences(device_logits(model, ids, numerics, 1000, 7), whole), "") << dir << " chunks of 7";
    }
  }
}

// A product in integers is within 4e-4 (codec/cuda/product.h, experts.h); from an id to a logit there are at most so many in series, whose errors
// have nothing to do with each other: six in a layer (wq_a, wq_b, wo_a, wo_b, gate or up, down), one of every Engram layer, the head.
double bound_of_logits(const Config& c) {
  return 4e-4 * std::sqrt(6.0 * c.n_layers + static_cast<double>(c.engram.layers.size()) + 1);
}

// Where nothing is chosen: one expert or entry instead of another changes a token by more than all roundings. Without the cache formats, whose
// codes flip on a last bit.
TEST(NetworkCudaFast, logits_are_near_those_of_the_cpu) {
  const RandomPack mul1(true, true), mixed(false, true);
  for (const std::string& dir : {golden_dir() + "/tiny-a", mul1.dir(), mixed.dir()}) {
    const auto model = load(dir, Products::kInt8Residual);
    const std::vector<int32_t> ids = some_ids(60, model->config().vocab);
    const bool is_native = dir == golden_dir() + "/tiny-a";  // its products are fp32 in another order
    const double bound = is_native ? 1e-4 : bound_of_logits(model->config());
    EXPECT_LT(relative_error(device_logits(model, ids, Numerics::kFull, 1000), cpu_logits(dir, ids, Numerics::kFull)), bound) << dir;
  }
}

// Where experts and entries are chosen, most tokens get the same ones.
TEST(NetworkCudaFast, most_tokens_keep_their_experts_and_entries) {
  const std::string dir = mul1_pack().dir();
  const auto model = load(dir, Products::kInt8Residual);
  const std::vector<int32_t> ids = some_ids(60, model->config().vocab);
  const std::vector<float> got = device_logits(model, ids, Numerics::kFull, 1000), expected = cpu_logits(dir, ids, Numerics::kFull);
  ASSERT_EQ(got.size(), expected.size());
  const auto row = [&](const std::vector<float>& of, size_t t) {
    const auto begin = of.begin() + static_cast<std::ptrdiff_t>(t * of.size() / ids.size());
    return std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(of.size() / ids.size()));
  };
  size_t n_near = 0;
  for (size_t t = 0; t < ids.size(); ++t) n_near += relative_error(row(got, t), row(expected, t)) < bound_of_logits(model->config()) ? 1 : 0;
  EXPECT_GE(n_near, ids.size() * 3 / 4);
}

TEST(NetworkCudaFast, a_pack_of_several_codebooks_runs_too) {
  const RandomPack pack(false);
  const auto model = load(pack.dir(), Products::kInt8Residual);
  const std::vector<int32_t> ids = some_ids(60, model->config().vocab);
  const std::vector<float> whole = device_logits(model, ids, Numerics::kFull, 1000);
  EXPECT_EQ(bit_differences(device_logits(model, ids, Numerics::kFull, 3), whole), "");
  EXPECT_EQ(bit_differences(device_logits(model, ids, Numerics::kFull, 1), whole), "");
}

TEST(NetworkCudaFast, drafts_do_not_depend_on_how_the_rows_were_fed) {
  const auto model = load(mul1_pack().dir(), Products::kInt8Residual);
  const std::vector<int32_t> ids = some_ids(40, model->config().vocab);
  std::vector<float> expected;
  for (int64_t call : {40, 1, 4}) {
    const auto sequence = taken(DeviceSequence::create(model, {Numerics::kKvq, true, 256}));
    for (int64_t at = 0; at < 40; at += call) {
      taken(sequence->forward({ids.data() + at, static_cast<size_t>(call)}, false));
      must(sequence->seed_drafter(call));
    }
    const DraftResult draft = taken(sequence->draft(ids[7]));
    if (expected.empty()) expected = values(draft.logits);
    EXPECT_EQ(bit_differences(values(draft.logits), expected), "") << "calls of " << call;
  }
}

TEST(NetworkCudaFast, eight_bits_without_residual_are_refused) {
  LoadOptions options;
  options.products = Products::kInt8;
  EXPECT_EQ(DeviceModel::load(golden_dir() + "/tiny-a", options, 0, test_pool()).status().code(), StatusCode::kUnimplemented);
}

// Calls repeat, so all but the first two of every kind replay what was recorded; caches grow meanwhile (256 entries at first).
TEST(NetworkCudaGraph, recorded_passes_have_the_bits_of_single_launches) {
  for (Products products : {Products::kExact, Products::kInt8Residual}) {
    const auto model = load(products == Products::kExact ? golden_dir() + "/tiny-a" : mul1_pack().dir(), products);
    const std::vector<int32_t> ids = some_ids(700, model->config().vocab);
    for (int64_t call : {1, 3, 8, 64}) {
      const std::vector<float> recorded = device_logits(model, ids, Numerics::kKvq, call, 64);
      EXPECT_EQ(bit_differences(recorded, device_logits(model, ids, Numerics::kKvq, call, 64, false)), "") << products_name(products) << " calls of " << call;
    }
  }
}

TEST(NetworkCudaGraph, rows_taken_back_leave_no_trace_in_recorded_passes) {
  const std::vector<int32_t> ids = some_ids(60, tiny()->config().vocab);
  const std::vector<float> whole = device_logits(tiny(), ids, Numerics::kKvq, 1000);
  const auto sequence = taken(DeviceSequence::create(tiny(), {Numerics::kKvq, true, 256}));
  const int64_t vocab = tiny()->config().vocab;
  taken(sequence->forward({ids.data(), 20}, false));
  for (int64_t at = 20; at + 4 <= 60; at += 4) {  // four rows, of which the last two are wrong and taken back
    const std::vector<int32_t> guess = {ids[static_cast<size_t>(at)], ids[static_cast<size_t>(at + 1)], 1, 2};
    taken(sequence->forward(guess, true));
    must(sequence->truncate(at + 2));
    const Tensor logits = taken(sequence->forward({ids.data() + at + 2, 2}, true));
    EXPECT_EQ(bit_differences(values(logits), {whole.begin() + (at + 2) * vocab, whole.begin() + (at + 4) * vocab}), "") << at;
  }
}

}  // namespace
}  // namespace espalier::cuda
