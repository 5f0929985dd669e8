// The whole network on the GPU: the tiny golden checkpoint against the vendor's recordings and, bit for bit, against the CPU; the pocket
// model; packs; drafts.
#include "model/cuda/network.h"

#include <unistd.h>

#include <filesystem>
#include <map>

#include "format/tensor_index.h"
#include "model/names.h"

#include "tests/gpu/ops_data.h"
#include "unit/model/golden_fixture.h"

namespace espalier::cuda {
namespace {

using codec::cuda::must;
using codec::cuda::taken;
using ops::bit_differences;

std::shared_ptr<const DeviceModel> load(const std::string& dir) { return taken(DeviceModel::load(dir, {}, 0, test_pool())); }

std::shared_ptr<const DeviceModel> tiny() {
  static const std::shared_ptr<const DeviceModel> model = load(golden_dir() + "/tiny-a");
  return model;
}

std::vector<float> values(const Tensor& t) { return {t.f32(), t.f32() + t.size()}; }

// Logits of every position, fed in calls of `call` tokens, each in chunks of `chunk`.
std::vector<float> device_logits(const std::shared_ptr<const DeviceModel>& model, const std::vector<int32_t>& ids, Numerics numerics, int64_t call,
                                 int64_t chunk = 256) {
  const auto sequence = taken(DeviceSequence::create(model, {numerics, false, chunk}));
  std::vector<float> out;
  for (size_t at = 0; at < ids.size(); at += static_cast<size_t>(call)) {
    const size_t n = std::min(static_cast<size_t>(call), ids.size() - at);
    const Tensor logits = taken(sequence->forward({ids.data() + at, n}, true));
    out.insert(out.end(), logits.f32(), logits.f32() + logits.size());
  }
  return out;
}

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

// The tiny checkpoint with every matrix that can be one replaced by a random EXL3 matrix, of all widths and codebooks in turn.
class RandomPack {
 public:
  RandomPack() : dir_(std::filesystem::temp_directory_path() / ("espalier_gpu_pack_" + std::to_string(getpid()))) {
    namespace fs = std::filesystem;
    const std::string from = golden_dir() + "/tiny-a";
    fs::remove_all(dir_);
    fs::create_directories(dir_);
    for (const char* f : {"config.json", "tokenizer.json"}) fs::copy_file(from + "/" + f, dir_ / f);
    const TensorIndex index = taken(TensorIndex::open(from));
    const Config config = taken(load_config(from));
    std::map<std::string, ConstView> tensors;
    for (const std::string& name : index.names()) tensors[name] = *index.find(name);
    std::vector<codec::Exl3Tensor> owned;
    const std::vector<MatrixSpec> specs = quantizable_matrices(config);
    owned.reserve(specs.size());
    for (size_t i = 0; i < specs.size(); ++i) {
      const MatrixSpec& spec = specs[i];
      const std::string native = spec.kind == MatrixKind::kWoA ? block_prefix(config, spec.block) + "attn.wo_a" : spec.stem;
      tensors.erase(native + ".weight");
      tensors.erase(native + ".scale");
      const auto codebook = i % 4 == 0 ? codec::Codebook::kMcg : i % 4 == 1 ? codec::Codebook::k3Inst : codec::Codebook::kMul1;
      const int k2 = codebook == codec::Codebook::kMul1 ? codec::cuda::kAllWidths[i % 11] : static_cast<int>(2 + 2 * (i % 8));
      owned.push_back(codec::cuda::random_tensor(spec.in, spec.out, k2, codebook, spec.stem));
      for (const codec::NamedPart& part : codec::stored_parts(spec.stem, owned.back())) tensors[part.name] = part.view;
    }
    std::vector<NamedView> views;
    for (const auto& [name, view] : tensors) views.push_back({name, view});
    must(write_safetensors(dir_ / "model.safetensors", views));
  }
  ~RandomPack() { std::filesystem::remove_all(dir_); }
  std::string dir() const { return dir_.string(); }

 private:
  std::filesystem::path dir_;
};

TEST(NetworkCuda, an_exl3_pack_has_the_bits_of_the_cpu) {
  const RandomPack pack;
  expect_cpu_bits(pack.dir());
}

TEST(NetworkCuda, a_device_that_does_not_exist_is_an_error) {
  EXPECT_EQ(DeviceModel::load(golden_dir() + "/tiny-a", {}, 99, test_pool()).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace espalier::cuda
