#include "runtime/engine.h"

#include <gtest/gtest.h>

#include "tests/unit/runtime/small_model.h"

namespace espalier {
namespace {

constexpr int64_t kVocab = 512;

std::unique_ptr<Engine> engine_of(std::shared_ptr<LanguageModel> model, EngineOptions options = {}) {
  auto engine = Engine::create(std::move(model), golden_tokenizer(), options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

Generation must(Result<Generation> made) {
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? std::move(*made) : Generation{};
}

GenerationRequest request_of(std::vector<int32_t> prompt, int64_t max_tokens) {
  GenerationRequest request;
  request.prompt_ids = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0;
  return request;
}

// Right guesses with every third one spoiled.
Guesser spoiled_guesser(const Rule& rule) {
  return [rule](std::span<const int32_t> known) {
    std::vector<int32_t> history(known.begin(), known.end());
    std::vector<int32_t> guesses;
    for (int i = 0; i < 5; ++i) {
      int32_t id = largest(rule(history));
      if ((history.size() + static_cast<size_t>(id)) % 3 == 0) id = (id + 1) % 500;
      guesses.push_back(id);
      history.push_back(id);
    }
    return guesses;
  };
}

TEST(Engine, says_what_the_model_says_until_the_end_token) {
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, script_rule(kVocab, 3, byte_ids("hello"))));
  std::string streamed;
  const Generation made = must(engine->generate(request_of({0, 5, 6}, 100), [&](const ReplyDelta& d) { streamed += d.content; }, {}));
  EXPECT_EQ(made.content, "hello");
  EXPECT_EQ(streamed, "hello");
  EXPECT_EQ(made.token_ids, byte_ids("hello"));
  EXPECT_EQ(made.finish_reason, FinishReason::kStop);
  EXPECT_EQ(made.n_prompt, 3);
}

TEST(Engine, stops_at_max_tokens_and_at_the_end_of_the_context_with_length) {
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, hash_rule(kVocab)), {.context = 40});
  EXPECT_EQ(must(engine->generate(request_of({0, 5, 6}, 7), {}, {})).token_ids.size(), 7u);
  const Generation full = must(engine->generate(request_of({0, 5, 6}, 0), {}, {}));
  EXPECT_EQ(full.token_ids.size(), 37u);
  EXPECT_EQ(full.finish_reason, FinishReason::kLength);
}

TEST(Engine, the_reply_does_not_depend_on_the_prefill_chunk) {
  std::vector<int32_t> prompt = {0};
  for (int32_t i = 0; i < 60; ++i) prompt.push_back(3 + i * 7 % 400);
  std::vector<int32_t> expected;
  for (const int64_t chunk : {1, 3, 16, 61, 256}) {
    const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, hash_rule(kVocab)), {.prefill_chunk = chunk});
    const Generation made = must(engine->generate(request_of(prompt, 30), {}, {}));
    if (expected.empty()) expected = made.token_ids;
    EXPECT_EQ(made.token_ids, expected) << "chunk " << chunk;
    EXPECT_EQ(made.token_ids.size(), 30u);
  }
}

TEST(Engine, drafting_changes_no_token_greedy_or_sampled) {
  const Rule rule = hash_rule(kVocab, true);
  int64_t n_accepted = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const auto model = std::make_shared<SmallModel>(kVocab, rule, spoiled_guesser(rule));
    const auto engine = engine_of(model, {.context = 90});
    GenerationRequest request = request_of({0, 5, static_cast<int32_t>(10 + seed)}, seed % 2 == 0 ? 50 : 0);
    request.sampling.temperature = seed % 4 < 2 ? 0 : 0.3;
    request.sampling.seed = seed;
    const Generation plain = must(engine->generate(request, {}, {}));
    request.draft = true;
    std::string streamed;
    const Generation drafted = must(engine->generate(request, [&](const ReplyDelta& d) { streamed += d.content; }, {}));
    EXPECT_EQ(drafted.token_ids, plain.token_ids) << "seed " << seed;
    EXPECT_EQ(drafted.content, plain.content);
    EXPECT_EQ(streamed, plain.content);
    EXPECT_EQ(drafted.finish_reason, plain.finish_reason);
    EXPECT_LE(drafted.accepted, drafted.drafted);
    n_accepted += drafted.accepted;
    EXPECT_EQ(plain.drafted, 0);
  }
  EXPECT_GT(n_accepted, 100);
}

TEST(Engine, right_guesses_save_forward_passes) {
  const Rule rule = hash_rule(kVocab);
  const auto model = std::make_shared<SmallModel>(kVocab, rule, [rule](std::span<const int32_t> known) {
    std::vector<int32_t> history(known.begin(), known.end());
    for (int i = 0; i < 5; ++i) history.push_back(largest(rule(history)));
    return std::vector<int32_t>(history.end() - 5, history.end());
  });
  GenerationRequest request = request_of({0, 5, 6}, 61);
  request.draft = true;
  const Generation made = must(engine_of(model)->generate(request, {}, {}));
  EXPECT_EQ(made.drafted, 50);
  EXPECT_EQ(made.accepted, 50);
  EXPECT_EQ(model->counts.n_feeds, 1 + 10);  // the prompt, then ten rounds of six tokens
}

TEST(Engine, a_stop_string_cuts_the_text_and_names_itself) {
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, script_rule(kVocab, 1, byte_ids("one two three"))));
  GenerationRequest request = request_of({0}, 100);
  request.stop = {"o t", "three"};
  std::string streamed;
  const Generation made = must(engine->generate(request, [&](const ReplyDelta& d) { streamed += d.content; }, {}));
  EXPECT_EQ(made.content, "one tw");
  EXPECT_EQ(streamed, "one tw");
  EXPECT_EQ(made.stop_string, "o t");
  EXPECT_EQ(made.finish_reason, FinishReason::kStop);
  EXPECT_EQ(made.token_ids.size(), 9u) << "tokens past the match are not counted";
}

TEST(Engine, a_stop_id_ends_the_reply_and_ignore_eos_does_not) {
  const auto ids = byte_ids("abc");
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, script_rule(kVocab, 1, ids)));
  GenerationRequest request = request_of({0}, 10);
  request.stop_token_ids = {ids[1]};
  const Generation made = must(engine->generate(request, {}, {}));
  EXPECT_EQ(made.content, "a");
  EXPECT_EQ(made.stop_token, ids[1]);
  request.stop_token_ids = {};
  request.ignore_eos = true;
  EXPECT_EQ(must(engine->generate(request, {}, {})).token_ids.size(), 10u);
}

TEST(Engine, min_tokens_keeps_the_end_token_away) {
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, script_rule(kVocab, 1, {})));
  GenerationRequest request = request_of({0}, 10);
  EXPECT_EQ(must(engine->generate(request, {}, {})).token_ids.size(), 0u);
  request.min_tokens = 4;
  EXPECT_EQ(must(engine->generate(request, {}, {})).token_ids.size(), 4u);
}

TEST(Engine, cancelling_ends_within_a_token_or_a_chunk) {
  const auto model = std::make_shared<SmallModel>(kVocab, hash_rule(kVocab));
  const auto engine = engine_of(model, {.prefill_chunk = 4});
  int n_deltas = 0;
  const Generation made = must(engine->generate(request_of({0, 5, 6}, 1000), [&](const ReplyDelta&) { ++n_deltas; },
                                                [&] { return n_deltas >= 5; }));
  EXPECT_EQ(made.finish_reason, FinishReason::kCancelled);
  EXPECT_LE(made.token_ids.size(), 30u);
  model->counts = {};
  const std::vector<int32_t> long_prompt(1000, 7);
  const Generation none = must(engine->generate(request_of(long_prompt, 5), {}, [&] { return model->counts.n_feeds >= 3; }));
  EXPECT_EQ(none.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(model->counts.n_feeds, 3);
}

TEST(Engine, bad_prompts_are_refused_with_the_reason) {
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, hash_rule(kVocab)), {.context = 16});
  const auto code = [&](std::vector<int32_t> prompt) { return engine->generate(request_of(std::move(prompt), 1), {}, {}).status(); };
  EXPECT_EQ(code({}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({0, 512}).code(), StatusCode::kInvalidArgument);
  EXPECT_NE(code({0, -3}).message().find("token 1 is -3"), std::string::npos);
  EXPECT_EQ(code(std::vector<int32_t>(16, 5)).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(code(std::vector<int32_t>(15, 5)).ok());
}

TEST(Engine, ids_that_the_tokenizer_does_not_know_are_never_chosen) {
  const int64_t wide = 600;  // spare rows behind the tokenizer's 512 ids
  const Rule rule = [&](std::span<const int32_t>) {
    std::vector<float> row(static_cast<size_t>(wide), 0.0f);
    row[550] = 50.0f;
    row[40] = 1.0f;
    return row;
  };
  const Generation made = must(engine_of(std::make_shared<SmallModel>(wide, rule))->generate(request_of({0}, 3), {}, {}));
  EXPECT_EQ(made.token_ids, std::vector<int32_t>(3, 40));
}

TEST(Engine, placeholders_are_refused_in_prompts_never_chosen_and_never_fed_as_guesses) {
  const Rule rule = [](std::span<const int32_t> history) {
    std::vector<float> row(kVocab, 0.0f);
    row[511] = 50.0f;
    row[40 + history.size() % 2] = 1.0f;
    return row;
  };
  const auto model = std::make_shared<SmallModel>(kVocab, rule, [](std::span<const int32_t>) { return std::vector<int32_t>{511, 40}; });
  model->placeholders = {511};
  const auto engine = engine_of(model);
  GenerationRequest request = request_of({0}, 4);
  request.draft = true;
  EXPECT_EQ(must(engine->generate(request, {}, {})).token_ids, (std::vector<int32_t>{41, 40, 41, 40}));
  EXPECT_EQ(model->counts.max_rows, 1) << "the placeholder was fed";
  EXPECT_EQ(engine->generate(request_of({0, 511}, 1), {}, {}).status().code(), StatusCode::kInvalidArgument);
}

TEST(Engine, chats_never_hold_role_tokens_but_raw_replies_may) {
  const int32_t user = *golden_tokenizer()->id_of("<｜User｜>");
  const int32_t close = *golden_tokenizer()->id_of("</think>");
  const auto engine = engine_of(std::make_shared<SmallModel>(kVocab, script_rule(kVocab, 1, {user, close, user})));
  GenerationRequest request = request_of({0}, 3);
  EXPECT_EQ(must(engine->generate(request, {}, {})).token_ids, (std::vector<int32_t>{user, close, user}));
  request.format = ReplyFormat::kChat;
  request.ignore_eos = true;
  const std::vector<int32_t> ids = must(engine->generate(request, {}, {})).token_ids;
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_NE(ids[0], user);
  EXPECT_EQ(ids[1], close);
  EXPECT_NE(ids[2], user);
}

TEST(Engine, options_that_do_not_fit_the_model_are_refused) {
  const auto model = std::make_shared<SmallModel>(kVocab, hash_rule(kVocab));
  EXPECT_FALSE(Engine::create(model, golden_tokenizer(), {.context = 5000}).ok());
  EXPECT_FALSE(Engine::create(model, golden_tokenizer(), {.prefill_chunk = 0}).ok());
  EXPECT_FALSE(Engine::create(std::make_shared<SmallModel>(100, hash_rule(100)), golden_tokenizer(), {}).ok());
}

}  // namespace
}  // namespace espalier
