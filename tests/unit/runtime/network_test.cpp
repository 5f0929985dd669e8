#include "runtime/network.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "format/safetensors.h"

namespace espalier {
namespace {

const std::string kModel = ESPALIER_SOURCE_DIR "/tests/golden/model/tiny-a";

// Ids recorded with the golden model; I64 in the file, unaligned.
std::vector<int32_t> recorded(const std::string& file, const std::string& name) {
  auto opened = SafetensorsFile::open(ESPALIER_SOURCE_DIR "/tests/golden/model/tiny-a-ref/" + file);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  const Result<ConstView> view = opened->get(name);
  EXPECT_TRUE(view.ok()) << view.status().message();
  std::vector<int64_t> wide(static_cast<size_t>(view->size()));
  std::memcpy(wide.data(), view->data, static_cast<size_t>(view->size_bytes()));
  return {wide.begin(), wide.end()};
}

class NetworkTest : public ::testing::Test {
 protected:
  std::unique_ptr<Session> open(Numerics numerics, bool with_drafter) {
    std::shared_ptr<LanguageModel>& model = models_[numerics];
    if (!model) {
      auto loaded = load_network(kModel, {.numerics = numerics, .engram_dir = ""}, pool_);
      EXPECT_TRUE(loaded.ok()) << loaded.status().message();
      model = *loaded;
    }
    auto session = model->open_session(with_drafter);
    EXPECT_TRUE(session.ok());
    return std::move(*session);
  }

  static Tensor fed(Session& session, std::span<const int32_t> ids, bool all = false) {
    Result<Tensor> logits = session.feed(ids, all);
    EXPECT_TRUE(logits.ok()) << logits.status().message();
    return std::move(*logits);
  }

  static int32_t greedy(const Tensor& logits, int64_t row = 0) {
    const auto vocab = static_cast<size_t>(logits.dim(1));
    return *choose_token(logits.as<float>().subspan(static_cast<size_t>(row) * vocab, vocab), {.temperature = 0}, 0);
  }

  ThreadPool pool_{2};
  std::map<Numerics, std::shared_ptr<LanguageModel>> models_;
};

TEST_F(NetworkTest, the_greedy_path_is_the_recorded_one_for_any_prefill_chunk) {
  const std::vector<int32_t> prompt = recorded("common.safetensors", "p40.tokens");
  const std::vector<int32_t> path = recorded("reference-fp32.safetensors", "p40.decode.owner.tokens");
  for (const size_t chunk : {40, 7, 1}) {
    const auto session = open(Numerics::kFull, false);
    Tensor logits;
    for (size_t at = 0; at < prompt.size(); at += chunk) {
      logits = fed(*session, std::span(prompt).subspan(at, std::min(chunk, prompt.size() - at)));
    }
    for (const int32_t expected : path) {
      ASSERT_EQ(greedy(logits), expected) << "chunk " << chunk << ", position " << session->n_tokens();
      logits = fed(*session, {&expected, 1});
    }
  }
}

TEST_F(NetworkTest, drafts_equal_the_recorded_ones_after_prompt_and_decoding) {
  const std::vector<int32_t> prompt = recorded("common.safetensors", "p40.tokens");
  const std::vector<int32_t> drafts = recorded("reference-fp32.safetensors", "p40.draft.ids");  // [25, 6]: token, five guesses
  const auto session = open(Numerics::kFull, true);
  fed(*session, std::span(prompt).first(13));
  fed(*session, std::span(prompt).subspan(13));
  for (size_t row = 0; row < drafts.size() / 6; ++row) {
    const int32_t anchor = drafts[row * 6];
    const Result<std::vector<int32_t>> guesses = session->draft(anchor);
    ASSERT_TRUE(guesses.ok()) << guesses.status().message();
    EXPECT_EQ(*guesses, std::vector<int32_t>(drafts.begin() + static_cast<std::ptrdiff_t>(row * 6 + 1),
                                             drafts.begin() + static_cast<std::ptrdiff_t>(row * 6 + 6))) << "row " << row;
    // Feeding wrong guesses and taking them back must leave no trace, in the caches or in the drafter.
    std::vector<int32_t> rows = {anchor};
    for (int32_t i = 0; i < static_cast<int32_t>(row % 6); ++i) rows.push_back(100 + i);
    fed(*session, rows, true);
    ASSERT_TRUE(session->truncate(static_cast<int64_t>(prompt.size() + row) + 1).ok());
  }
}

TEST_F(NetworkTest, taken_back_rows_leave_the_logits_bit_equal) {
  for (const Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
    const std::vector<int32_t> prompt = recorded("common.safetensors", "p150.tokens");
    const auto plain = open(numerics, false);
    const auto rewound = open(numerics, false);
    fed(*plain, std::span(prompt).first(100));
    fed(*rewound, std::span(prompt).first(100));
    for (size_t at = 100; at < 130; ++at) {
      std::vector<int32_t> rows = {prompt[at]};
      for (int32_t i = 0; i < static_cast<int32_t>(at % 6); ++i) rows.push_back(200 + i);
      const Tensor many = fed(*rewound, rows, true);
      ASSERT_TRUE(rewound->truncate(static_cast<int64_t>(at) + 1).ok());
      const Tensor one = fed(*plain, std::span(prompt).subspan(at, 1));
      ASSERT_EQ(std::memcmp(one.data(), many.data(), static_cast<size_t>(one.size_bytes())), 0)
          << numerics_name(numerics) << ", position " << at;
    }
  }
}

TEST_F(NetworkTest, an_engine_drafts_without_changing_the_recorded_path) {
  const auto engine = load_engine(kModel, {.numerics = Numerics::kFull, .engram_dir = ""}, {.context = 512, .prefill_chunk = 16}, pool_);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  GenerationRequest request;
  request.prompt_ids = recorded("common.safetensors", "p40.tokens");
  request.sampling.temperature = 0;
  request.max_tokens = 24;
  for (const bool draft : {false, true}) {
    request.draft = draft;
    const Result<Generation> made = (*engine)->generate(request, {}, {});
    ASSERT_TRUE(made.ok()) << made.status().message();
    EXPECT_EQ(made->token_ids, recorded("reference-fp32.safetensors", "p40.decode.owner.tokens"));
    EXPECT_EQ(made->drafted > 0, draft);
  }
}

TEST_F(NetworkTest, a_folder_without_a_model_is_refused) {
  const auto engine = load_engine("/nonexistent", {}, {}, pool_);
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.error().code(), StatusCode::kNotFound) << engine.error().message();
}

}  // namespace
}  // namespace espalier
