#include "stages/make_pack.h"

#include <gmock/gmock.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "format/json.h"
#include "format/tensor_index.h"
#include "unit/stages/small_checkpoint.h"
#include "unit/stages/test_files.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

MakePackOptions options_in(const test::TempFolder& dir, double bits) {
  EXPECT_TRUE(write_dataset(dir / "data.jsonl", test::random_token_rows({120, 40, 80}, "calibration")).ok());
  MakePackOptions options;
  options.checkpoint = test::small_checkpoint_dir();
  options.data = dir / "data.jsonl";
  options.out = dir / "pack";
  options.tool = "espalier test";
  options.quantize.bits = bits;
  return options;
}

std::string manifest(const fs::path& pack) {
  return read_text_file(pack / "MANIFEST.sha256").value();
}

// The checks below look at one finished 3-bit pack (the fastest width to search) from different sides; encoding it is the expensive
// part.

void it_loads_and_every_matrix_has_the_width_that_was_asked_for(const fs::path& pack, const MakePackReport& report) {
  EXPECT_DOUBLE_EQ(report.bpw, 3.0);
  const Result<WeightLoader> loader = WeightLoader::open(pack.string());
  ASSERT_TRUE(loader.ok()) << loader.status().message();
  EXPECT_TRUE(loader->coverage().missing.empty());
  EXPECT_TRUE(loader->coverage().unexpected.empty());
  const std::vector<MatrixSpec> specs = quantizable_matrices(loader->config());
  EXPECT_EQ(report.matrices, static_cast<int64_t>(specs.size()));
  for (const MatrixSpec& spec : specs) {
    const std::optional<ConstView> trellis = loader->index().find(spec.stem + ".trellis");
    ASSERT_TRUE(trellis.has_value()) << spec.stem;
    EXPECT_EQ(trellis->shape, (Shape{spec.in / 16, spec.out / 16, 48})) << spec.stem;
    EXPECT_FALSE(loader->index().contains(spec.stem + ".weight")) << spec.stem;
  }
}

void native_tensors_keep_their_bytes(const fs::path& dir) {
  const TensorIndex pack = TensorIndex::open(dir).value();
  const TensorIndex source = TensorIndex::open(test::small_checkpoint_dir()).value();
  int kept = 0;
  for (const std::string& name : source.names()) {
    const std::optional<ConstView> now = pack.find(name);
    if (!now.has_value()) continue;
    const ConstView before = source.get(name).value();
    EXPECT_EQ(now->dtype, before.dtype) << name;
    EXPECT_EQ(now->shape, before.shape) << name;
    EXPECT_TRUE(std::equal(now->bytes().begin(), now->bytes().end(), before.bytes().begin(), before.bytes().end()))
        << name;
    ++kept;
  }
  for (const char* name :
       {"embed.weight", "norm.weight", "layers.0.hc_attn_fn", "layers.1.attn.indexer.weights_proj.weight",
        "layers.1.attn.indexer.wk.weight", "layers.0.engram.embed.weight", "layers.0.engram.q_weight",
        "mtp.0.markov_head.head.weight", "mtp.0.confidence_head.proj.weight", "layers.2.ffn.gate.bias_vl"}) {
    EXPECT_TRUE(pack.contains(name)) << name;
  }
  EXPECT_GT(kept, 70);
}

void records_name_inputs_options_coverage_and_every_matrix_and_nothing_of_the_host(const fs::path& pack,
                                                                                   const MakePackReport& report) {
  const Json run = read_json_file(pack / "run.json").value();
  EXPECT_EQ(run["options"]["bits"], 3);
  EXPECT_EQ(run["options"]["preset"], "fast");
  EXPECT_EQ(run["options"]["damping"], "by effective tokens");
  EXPECT_EQ(run["fallbacks"], Json::array());
  EXPECT_EQ(run["inputs"]["calibration_tokens"], 240);
  EXPECT_EQ(run["coverage"].size(), 4u);  // 3 layers, 1 drafter stage
  EXPECT_EQ(run["coverage"][0]["expert_tokens"].size(), 3u);
  EXPECT_GT(run["draft_calls"], 0);
  std::vector<std::string> native;
  for (const Json& n : run["native_matrices"]) native.push_back(n["name"]);
  EXPECT_THAT(native, ::testing::Contains("layers.1.attn.indexer.wk"));
  const std::string lines = read_text_file(pack / "matrices.jsonl").value();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), report.matrices);
  const Json lock = read_json_file(pack / "source.lock.json").value();
  EXPECT_EQ(lock["files"].size(), 3u);  // shard, config, tokenizer
  for (const char* name :
       {"run.json", "matrices.jsonl", "source.lock.json", "config.json", "quantization_config.json"}) {
    const std::string text = read_text_file(pack / name).value();
    EXPECT_THAT(text, ::testing::Not(HasSubstr(pack.parent_path().string()))) << name;
    EXPECT_THAT(text, ::testing::Not(HasSubstr(ESPALIER_SOURCE_DIR))) << name;
  }
}

void drafter_hessians_come_from_draft_calls_and_from_the_taps(const QuantizeReport& details) {
  const int64_t calls = details.draft_calls;
  const auto record = [&](const std::string& stem) {
    for (const MatrixRecord& r : details.matrices) {
      if (r.stem == stem) return r;
    }
    ADD_FAILURE() << "no record of " << stem;
    return MatrixRecord();
  };
  EXPECT_EQ(calls,
            (120 / 8) + (40 / 8) + (80 / 8) - 3);  // the last stretch of each row ends past the last usable position
  EXPECT_EQ(record("mtp.0.main_proj").tokens, 240);
  EXPECT_EQ(record("mtp.0.attn.wq_a").tokens, 5 * calls);
  EXPECT_GT(record("mtp.0.attn.wkv").tokens, 5 * calls);
  EXPECT_EQ(record("head").tokens, 240);
  EXPECT_EQ(record("layers.0.attn.wq_a").tokens, 240);
}

void it_is_not_taken_for_a_checkpoint(MakePackOptions options) {
  ThreadPool pool(1);
  SilentProgress progress;
  options.checkpoint = options.out.string();
  options.out += ".again";
  const Result<MakePackReport> r = make_pack(options, progress, pool);
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.error().message(), HasSubstr("holds EXL3 matrices already"));
}

TEST(MakePack, a_pack_is_complete_and_its_bytes_are_the_same_for_one_and_two_threads) {
  const test::TempFolder dir;
  SilentProgress progress;
  ThreadPool two(2);
  const MakePackOptions options = options_in(dir, 3);
  const Result<MakePackReport> r = make_pack(options, progress, two);
  ASSERT_TRUE(r.ok()) << r.status().message();
  it_loads_and_every_matrix_has_the_width_that_was_asked_for(options.out, *r);
  native_tensors_keep_their_bytes(options.out);
  records_name_inputs_options_coverage_and_every_matrix_and_nothing_of_the_host(options.out, *r);
  drafter_hessians_come_from_draft_calls_and_from_the_taps(r->details);
  it_is_not_taken_for_a_checkpoint(options);

  ThreadPool one(1);
  MakePackOptions again = options;
  again.out = dir / "again";
  ASSERT_TRUE(make_pack(again, progress, one).ok());
  EXPECT_EQ(manifest(again.out), manifest(options.out));
}

TEST(MakePack, half_steps_and_fallbacks_reach_the_packs_records) {
  const test::TempFolder dir;
  SilentProgress progress;
  ThreadPool pool(2);
  MakePackOptions options = options_in(dir, 3.5);
  options.quantize.head_bits = 1.5;
  options.quantize.drafter_bits = 2.5;
  options.quantize.encode.prior_w13 = options.quantize.encode.prior_w2 = 0;  // experts without tokens have nothing then
  EXPECT_TRUE(write_dataset(options.data, test::random_token_rows({3}, "three tokens")).ok());
  const Result<MakePackReport> r = make_pack(options, progress, pool);
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_DOUBLE_EQ(r->bpw, 3.5);
  const TensorIndex pack = TensorIndex::open(options.out).value();
  EXPECT_EQ(pack.get("layers.0.attn.wq_a.trellis").value().shape[2], 56);
  EXPECT_EQ(pack.get("head.trellis").value().shape[2], 24);
  EXPECT_EQ(pack.get("mtp.0.attn.wq_a.trellis").value().shape[2], 40);
  const Json config = read_json_file(options.out / "config.json").value();
  EXPECT_EQ(config["quantization_config"]["bits"], 3.5);
  EXPECT_EQ(config["quantization_config"]["head_bits"], 1.5);
  EXPECT_EQ(config["quantization_config"]["mtp_bits"], 2.5);
  const Json run = read_json_file(options.out / "run.json").value();
  EXPECT_EQ(run["options"]["bits"], 3.5);
  EXPECT_EQ(run["options"]["head_bits"], 1.5);
  EXPECT_EQ(run["options"]["drafter_bits"], 2.5);
  EXPECT_EQ(run["options"]["dense_bits"], nullptr);
  bool unrouted = false;
  for (const Json& f : run["fallbacks"]) {
    EXPECT_EQ(f["tensor"].get<std::string>().rfind(f["layer"].get<std::string>(), 0), 0u);
    unrouted = unrouted || (f["tensor"].get<std::string>().find(".experts.") != std::string::npos &&
                            f["reason"] == "Hessian of zeros: all inputs count the same");
  }
  EXPECT_TRUE(unrouted) << "three tokens, two experts each, three layers: some expert sees none\n" << run["fallbacks"].dump();
}

// Stops after a number of calls to advance.
class StopAfter : public Progress {
 public:
  explicit StopAfter(int n) : left_(n) {}
  void begin(std::string_view, int64_t) override {}
  void advance(int64_t, std::string_view) override { --left_; }
  bool is_cancelled() const override { return left_ <= 0; }

 private:
  std::atomic<int> left_;
};

TEST(MakePack, a_cancelled_run_leaves_no_folder_behind) {
  for (int n : {1, 5}) {
    const test::TempFolder dir;
    ThreadPool pool(2);
    StopAfter progress(n);
    const MakePackOptions options = options_in(dir, 3);
    const Result<MakePackReport> r = make_pack(options, progress, pool);
    ASSERT_FALSE(r.ok()) << n;
    EXPECT_EQ(r.error().code(), StatusCode::kCancelled) << r.error().message();
    EXPECT_FALSE(fs::exists(dir / "pack"));
    EXPECT_FALSE(fs::exists(dir / "pack.partial"));
  }
}

TEST(MakePack, wrong_outputs_and_widths_are_refused_before_any_work) {
  const test::TempFolder dir;
  ThreadPool pool(1);
  SilentProgress progress;
  const auto error = [&](MakePackOptions options) {
    const Result<MakePackReport> r = make_pack(options, progress, pool);
    return r.ok() ? "no error" : std::string(status_code_name(r.error().code())) + ": " + r.error().message();
  };
  const MakePackOptions good = options_in(dir, 3);
  MakePackOptions o = good;
  o.out = dir.path();
  EXPECT_THAT(error(o), HasSubstr("failed_precondition: output '"));
  EXPECT_THAT(error(o), HasSubstr("exists already"));
  o = good;
  o.out = o.checkpoint;
  EXPECT_THAT(error(o), HasSubstr("is the checkpoint itself"));
  fs::create_directory_symlink(good.checkpoint, dir / "link");
  o.out = dir / "link";
  EXPECT_THAT(error(o), HasSubstr("is the checkpoint itself"));
  o.out = fs::path(good.checkpoint) / "pack";
  EXPECT_THAT(error(o), HasSubstr("lies inside the checkpoint's folder"));
  o = good;
  o.quantize.bits = 9;
  EXPECT_THAT(error(o), HasSubstr("invalid_argument: --bits: expected 1 to 8 bits, or 1.5, 2.5, 3.5, found 9"));
  o = good;
  o.quantize.head_bits = 0;
  EXPECT_THAT(error(o), HasSubstr("--head-bits: expected 1 to 8 bits, or 1.5, 2.5, 3.5, found 0"));
  o = good;
  o.quantize.dense_bits = 2.5;
  o.quantize.encode.codec.codebook = codec::Codebook::kMcg;
  EXPECT_THAT(error(o), HasSubstr("--dense-bits: 2.5 bits need the codebook mul1, found mcg"));
  o = good;
  o.data = dir / "missing.jsonl";
  EXPECT_THAT(error(o), HasSubstr("not_found"));
  std::vector<DatasetRow> rows = test::random_token_rows({5}, "bad");
  rows[0].ids[3] = 512;
  ASSERT_TRUE(write_dataset(dir / "bad.jsonl", rows).ok());
  o.data = dir / "bad.jsonl";
  EXPECT_THAT(error(o), HasSubstr("id 512 at position 3 is not below the model's vocabulary of 512"));
  EXPECT_FALSE(fs::exists(good.out));
}

}  // namespace
}  // namespace espalier
