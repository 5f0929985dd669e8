// The engine: prompt in chunks, then one token at a time, with or without drafts, into text.
//
// The result depends on (prompt, parameters, seed) only: not on prefill_chunk, not on drafting, not on the number of threads.
// A draft round feeds the last chosen token and the guesses together, chooses from each row exactly as without drafts, and
// takes back the rows after the first wrong guess. Placeholders of images are never chosen, and in chats no added token but
// the end token, <think>, </think> and the tool sentinel. Source: docs/api.md, "Generation"; DSpark: model/drafter.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "runtime/generation.h"
#include "runtime/session.h"
#include "text/tokenizer.h"

namespace espalier {

struct EngineOptions {
  int64_t context = 0;         // 0: the model's, at most kDefaultContext
  int64_t prefill_chunk = 256;  // prompt tokens between looks at the cancel flag
};

inline constexpr int64_t kDefaultContext = 32768;

class Engine : public TextGenerator {
 public:
  // Errors: invalid_argument when options.context or prefill_chunk is out of range, or the tokenizer has more ids than the
  // model has rows, or lacks the end token.
  static Result<std::unique_ptr<Engine>> create(std::shared_ptr<LanguageModel> model, std::shared_ptr<const Tokenizer> tokenizer,
                                                const EngineOptions& options);

  const Tokenizer& tokenizer() const override { return *tokenizer_; }
  int64_t context() const override { return context_; }
  bool can_draft() const { return model_->can_draft(); }

  Result<Generation> generate(const GenerationRequest& request, const DeltaSink& on_delta,
                              const CancelCheck& is_cancelled) override;

 private:
  Engine() = default;
  std::shared_ptr<LanguageModel> model_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  int64_t context_ = 0;
  int64_t prefill_chunk_ = 0;
  int32_t end_token_ = 0;
  std::vector<int32_t> placeholders_;  // never fed, never chosen
  std::vector<int32_t> chat_masked_;   // never chosen in chats; contains placeholders_
};

}  // namespace espalier
