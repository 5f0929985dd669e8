// The whole network on the GPU: the tiny golden checkpoint against the vendor's recordings and, bit for bit, against the CPU; the pocket
// model; packs; drafts.
#include "model/cuda/network.h"

#include "tests/gpu/network_data.h"

namespace espalier::cuda {
namespace {

TEST(NetworkCuda, tiny_checkpoint_equals_the_vendors_recording_in_full) {
  for (const std::string& p : prompt_names()) {
    const Difference d = difference(device_logits(tiny(), prompt(p), Numerics::kFull, 1000).data(), fp32().floats(p + ".prefill.logits"));
    EXPECT_LE(d.worst, 1e-3f) << p << ": " << d;
  }
}

TEST(NetworkCuda, tiny_checkpoint_has_the_bits_of_the_cpu_in_every_numerics) {
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq, Numerics::kVendor}) {
    for (const std::string& p : prompt_names()) {
      EXPECT_EQ(bit_differences(device_logits(tiny(), prompt(p), numerics, 1000), values(all_logits(prompt(p), numerics, 256))), "")
          << numerics_name(numerics) << " " << p;
    }
  }
}

TEST(NetworkCuda, calls_and_chunks_of_any_size_give_the_same_bits) {
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
    for (const std::string p : {"p17", "p40", "p150"}) {
      const std::vector<float> whole = device_logits(tiny(), prompt(p), numerics, 1000);
      for (int64_t call : {1, 3, 16}) {
        EXPECT_EQ(bit_differences(device_logits(tiny(), prompt(p), numerics, call), whole), "") << numerics_name(numerics) << " " << p << " calls of " << call;
      }
      EXPECT_EQ(bit_differences(device_logits(tiny(), prompt(p), numerics, 1000, 7), whole), "") << numerics_name(numerics) << " " << p << " chunks of 7";
    }
  }
}

TEST(NetworkCuda, rows_taken_back_leave_no_trace) {
  const std::vector<int32_t> ids = prompt("p40");
  const std::vector<float> whole = device_logits(tiny(), ids, Numerics::kKvq, 1000);
  const auto sequence = taken(DeviceSequence::create(tiny(), {Numerics::kKvq, false, 256}));
  taken(sequence->forward({ids.data(), 20}, false));
  const std::vector<int32_t> wrong(9, ids[3]);
  taken(sequence->forward(wrong, true));
  must(sequence->truncate(20));
  const Tensor rest = taken(sequence->forward({ids.data() + 20, 20}, true));
  const int64_t vocab = tiny()->config().vocab;
  EXPECT_EQ(bit_differences(values(rest), {whole.begin() + 20 * vocab, whole.end()}), "");
  EXPECT_EQ(sequence->truncate(40 - SequenceState::kRewindRows - 1).code(), StatusCode::kInvalidArgument);
  sequence->reset();
  const Tensor again = taken(sequence->forward(ids, true));
  EXPECT_EQ(bit_differences(values(again), whole), "");
}

TEST(NetworkCuda, wrong_ids_are_refused_and_the_sequence_goes_on) {
  const auto sequence = taken(DeviceSequence::create(tiny(), {}));
  EXPECT_EQ(sequence->forward({}, true).status().code(), StatusCode::kInvalidArgument);
  const int32_t wrong[] = {static_cast<int32_t>(tiny()->config().vocab)};
  EXPECT_EQ(sequence->forward(wrong, true).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->n_tokens(), 0);
  EXPECT_TRUE(sequence->forward(prompt("p5"), false).ok());
}

TEST(NetworkCuda, drafts_have_the_bits_of_the_cpu) {
  const Model& m = *tiny_model();
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
    for (const std::string& p : prompt_names()) {
      const std::vector<int32_t> ids = prompt(p);
      SequenceState state(m.config());
      DrafterState drafter(m.config());
      ForwardOptions o;
      o.numerics = numerics;
      const auto sequence = taken(DeviceSequence::create(tiny(), {numerics, true, 256}));
      std::vector<int32_t> feed = ids;
      for (int round = 0; round < 4; ++round) {
        const int64_t n = static_cast<int64_t>(feed.size());
        const ForwardResult r = must_forward(state, feed, o);
        must(seed_drafter(m, drafter, r.taps, n, numerics, test_pool()));
        taken(sequence->forward(feed, false));
        must(sequence->seed_drafter(n));
        const int32_t token = ids[static_cast<size_t>(round) % ids.size()];
        const DraftResult expected = taken(draft(m, drafter, token, numerics, test_pool()));
        const DraftResult got = taken(sequence->draft(token));
        const std::string what = p + " round " + std::to_string(round) + " " + std::string(numerics_name(numerics));
        EXPECT_EQ(got.ids, expected.ids) << what;
        EXPECT_EQ(bit_differences(values(got.logits), values(expected.logits)), "") << what;
        EXPECT_EQ(bit_differences(values(got.confidence), values(expected.confidence)), "") << what;
        feed.assign(expected.ids.begin(), expected.ids.begin() + 1 + round % 3);
      }
    }
  }
}

// Bits of the CPU, and of token-by-token decoding, for the first rows of a model folder's panel.
void expect_cpu_bits(const std::string& dir) {
  const auto model = load(dir);
  const auto cpu = taken(Model::load(dir, {}, test_pool()));
  std::vector<int32_t> ids;
  const int64_t n_ids = std::min<int64_t>(cpu->config().vocab, 400);
  for (int64_t i = 0; i < 300; ++i) ids.push_back(static_cast<int32_t>((i * i * 7 + i / 3) % n_ids));
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
    SequenceState state(cpu->config());
    ForwardOptions o;
    o.numerics = numerics;
    o.all_logits = true;
    const ForwardResult expected = taken(forward(*cpu, state, ids, o, test_pool()));
    EXPECT_EQ(bit_differences(device_logits(model, ids, numerics, 1000), values(expected.logits)), "") << dir << " " << numerics_name(numerics);
    EXPECT_EQ(bit_differences(device_logits(model, ids, numerics, 5), values(expected.logits)), "") << dir << " calls of 5";
  }
}

TEST(NetworkCuda, pocket_model_has_the_bits_of_the_cpu) { expect_cpu_bits(ESPALIER_POCKET_DIR); }

TEST(NetworkCuda, an_exl3_pack_has_the_bits_of_the_cpu) {
  const RandomPack pack(false);
  expect_cpu_bits(pack.dir());
}

TEST(NetworkCuda, a_device_that_does_not_exist_is_an_error) {
  EXPECT_EQ(DeviceModel::load(golden_dir() + "/tiny-a", {}, 99, test_pool()).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace espalier::cuda
