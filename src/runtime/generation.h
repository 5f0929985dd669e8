// A request for text and its outcome, and the interface of whatever answers it. The server and the command line know only this.
//
// Text flows out twice: as deltas while tokens are made, and whole in the Generation; joined deltas equal the whole.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "runtime/sampler.h"

namespace espalier {

class Tokenizer;

// How the reply's tokens become text.
enum class ReplyFormat {
  kRaw,   // everything is content (raw completions)
  kChat,  // reasoning ends at the </think> token; outer newlines of reasoning and leading ones of content are dropped
};

struct GenerationRequest {
  std::vector<int32_t> prompt_ids;
  int64_t max_tokens = 0;  // <= 0: as many as the context holds; more than fit are cut to what fits
  int64_t min_tokens = 0;  // end tokens are not chosen before this many
  SamplingParams sampling;
  std::vector<std::string> stop;         // searched in content only
  std::vector<int32_t> stop_token_ids;   // beside the end-of-sentence token
  bool ignore_eos = false;
  ReplyFormat format = ReplyFormat::kRaw;
  bool starts_in_reasoning = false;  // kChat: the prompt ends inside <think>
  bool draft = false;                // speculative drafting; same tokens, fewer forward passes
};

enum class FinishReason { kStop, kLength, kCancelled };

// "stop", "length", "cancelled"
std::string_view finish_reason_name(FinishReason reason);

struct ReplyDelta {
  std::string reasoning = {};
  std::string content = {};
  bool empty() const { return reasoning.empty() && content.empty(); }
};

struct Generation {
  std::string reasoning = {};
  std::string content = {};
  std::vector<int32_t> token_ids = {};  // every chosen token except the end token
  FinishReason finish_reason = FinishReason::kStop;
  std::string stop_string = {};  // the stop string that ended the reply, or empty
  int32_t stop_token = -1;  // the id from stop_token_ids that ended the reply, or -1
  int64_t n_prompt = 0;
  int64_t n_reasoning = 0;  // of token_ids, those before the end of reasoning
  double prefill_seconds = 0;
  double decode_seconds = 0;
  double tokens_per_second = 0;  // tokens after the first, by decode_seconds
  int64_t drafted = 0;           // guessed tokens that were checked
  int64_t accepted = 0;          // guessed tokens that were right
};

// Called on the generating thread, once per token that made text visible (and once at the end for text held back).
using DeltaSink = std::function<void(const ReplyDelta&)>;

// Asked before every chunk of the prompt and every token; true ends the reply with kCancelled.
using CancelCheck = std::function<bool()>;

class TextGenerator {
 public:
  virtual ~TextGenerator() = default;

  virtual const Tokenizer& tokenizer() const = 0;
  // Most tokens of prompt and reply together.
  virtual int64_t context() const = 0;

  // Makes a reply. on_delta and is_cancelled may be empty.
  // Errors: invalid_argument (empty prompt, id out of range), resource_exhausted (prompt fills the context), internal.
  // Threads: one call at a time.
  virtual Result<Generation> generate(const GenerationRequest& request, const DeltaSink& on_delta,
                                      const CancelCheck& is_cancelled) = 0;
};

}  // namespace espalier
