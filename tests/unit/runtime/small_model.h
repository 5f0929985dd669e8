// A small model for tests of the engine: its logits are any function of the whole history, so that feeding, taking back and
// drafting can be checked exactly. Also the golden tokenizer, whose byte tokens make any text out of ids.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "runtime/session.h"
#include "text/tokenizer.h"

namespace espalier {

inline int32_t largest(const std::vector<float>& row) {
  return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

using Rule = std::function<std::vector<float>(std::span<const int32_t> history)>;
using Guesser = std::function<std::vector<int32_t>(std::span<const int32_t> history_and_anchor)>;

struct FeedCounts {
  int64_t n_feeds = 0;
  int64_t max_rows = 0;
};

class SmallSession : public Session {
 public:
  SmallSession(Rule rule, Guesser guesser, FeedCounts* counts)
      : rule_(std::move(rule)), guesser_(std::move(guesser)), counts_(counts) {}

  int64_t n_tokens() const override { return static_cast<int64_t>(history_.size()); }

  Result<Tensor> feed(std::span<const int32_t> ids, bool all_logits) override {
    ++counts_->n_feeds;
    counts_->max_rows = std::max(counts_->max_rows, static_cast<int64_t>(ids.size()));
    std::vector<float> rows;
    int64_t n_rows = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      history_.push_back(ids[i]);
      if (!all_logits && i + 1 < ids.size()) continue;
      const std::vector<float> row = rule_(history_);
      rows.insert(rows.end(), row.begin(), row.end());
      ++n_rows;
    }
    const auto n_columns = static_cast<int64_t>(rows.size()) / n_rows;
    return Tensor::from<float>({n_rows, n_columns}, rows);
  }

  Status truncate(int64_t n_tokens) override {
    if (n_tokens > this->n_tokens()) return invalid_argument("truncate past the end");
    history_.resize(static_cast<size_t>(n_tokens));
    return ok_status();
  }

  Result<std::vector<int32_t>> draft(int32_t anchor) override {
    std::vector<int32_t> known = history_;
    known.push_back(anchor);
    return guesser_ ? guesser_(known) : std::vector<int32_t>();
  }

 private:
  Rule rule_;
  Guesser guesser_;
  FeedCounts* counts_;
  std::vector<int32_t> history_;
};

class SmallModel : public LanguageModel {
 public:
  SmallModel(int64_t vocab, Rule rule, Guesser guesser = nullptr)
      : vocab_(vocab), rule_(std::move(rule)), guesser_(std::move(guesser)) {}

  int64_t vocab() const override { return vocab_; }
  int64_t max_context() const override { return 4096; }
  std::vector<int32_t> placeholder_ids() const override { return placeholders; }
  bool can_draft() const override { return guesser_ != nullptr; }
  Result<std::unique_ptr<Session>> open_session(bool) override {
    return std::unique_ptr<Session>(std::make_unique<SmallSession>(rule_, guesser_, &counts));
  }

  FeedCounts counts;
  std::vector<int32_t> placeholders;

 private:
  int64_t vocab_;
  Rule rule_;
  Guesser guesser_;
};

inline std::shared_ptr<const Tokenizer> golden_tokenizer() {
  static const std::shared_ptr<const Tokenizer> tokenizer = [] {
    Result<Tokenizer> opened = Tokenizer::open(ESPALIER_SOURCE_DIR "/tests/golden/model/tiny-a/tokenizer.json");
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return std::make_shared<const Tokenizer>(std::move(*opened));
  }();
  return tokenizer;
}

// One id per byte of `text`.
inline std::vector<int32_t> byte_ids(std::string_view text) {
  const auto tokenizer = golden_tokenizer();
  std::vector<int32_t> ids;
  for (const char c : text) {
    int32_t found = -1;
    for (int32_t id = 0; id < tokenizer->n_tokens() && found < 0; ++id) {
      if (!tokenizer->is_added(id) && tokenizer->token_bytes(id) == std::string_view(&c, 1)) found = id;
    }
    EXPECT_GE(found, 0) << "no token for byte " << static_cast<int>(static_cast<unsigned char>(c));
    ids.push_back(found);
  }
  return ids;
}

// A rule that says `script` after a prompt of `n_prompt` tokens, then the end token (id 1) for ever.
inline Rule script_rule(int64_t vocab, size_t n_prompt, std::vector<int32_t> script) {
  return [=](std::span<const int32_t> history) {
    std::vector<float> row(static_cast<size_t>(vocab), 0.0f);
    const size_t step = history.size() - n_prompt;
    row[step < script.size() ? static_cast<size_t>(script[step]) : 1] = 20.0f;
    return row;
  };
}

// A rule whose row is a pure function of the last three tokens: varied, never the end token unless `with_end`.
inline Rule hash_rule(int64_t vocab, bool with_end = false) {
  return [=](std::span<const int32_t> history) {
    uint64_t key = 0;
    for (size_t i = 0; i < 3 && i < history.size(); ++i) {
      key = key * 1000003 + static_cast<uint64_t>(history[history.size() - 1 - i]) + 1;
    }
    const CounterRng rng(key, "hash rule");
    std::vector<float> row;
    for (int64_t id = 0; id < vocab; ++id) row.push_back(static_cast<float>(rng.uniform(static_cast<uint64_t>(id)) * 6));
    if (!with_end) row[1] = -10.0f;
    return row;
  };
}

}  // namespace espalier
