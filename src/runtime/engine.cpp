#include "runtime/engine.h"

#include <algorithm>
#include <array>
#include <limits>
#include <chrono>
#include <string>
#include <utility>

#include "runtime/reply_stream.h"

namespace espalier {
namespace {

constexpr std::string_view kEndToken = "<｜end▁of▁sentence｜>";
// Added tokens that a chat reply may hold.
constexpr std::array<std::string_view, 4> kChatTokens = {kEndToken, "<think>", "</think>", "｜DSML｜"};

bool contains(std::span<const int32_t> ids, int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One reply in the making: takes chosen tokens, knows when to stop.
class Reply {
 public:
  // masked: ids that are never chosen.
  Reply(const GenerationRequest& request, const Tokenizer& tokenizer, int32_t end_token, std::span<const int32_t> masked,
        int64_t limit, const DeltaSink& on_delta)
      : request_(request),
        stream_(tokenizer, request.format, request.starts_in_reasoning, request.stop),
        end_token_(end_token),
        masked_(masked),
        limit_(limit),
        on_delta_(on_delta) {
    if (!request.ignore_eos) end_ids_.push_back(end_token);
    end_ids_.insert(end_ids_.end(), request.stop_token_ids.begin(), request.stop_token_ids.end());
  }

  // Chooses the next token from `logits` and takes it. The value is the token.
  Result<int32_t> choose(std::span<const float> logits) {
    const auto n = static_cast<int64_t>(out_.token_ids.size());
    row_.assign(logits.begin(), logits.end());
    mask(masked_);
    if (n < request_.min_tokens) mask(end_ids_);
    const int64_t position = static_cast<int64_t>(request_.prompt_ids.size()) + n;
    ASSIGN_OR_RETURN(const int32_t id, choose_token(row_, request_.sampling, position));
    take(id);
    return id;
  }

  bool done() const { return done_; }
  void cancel() { end(FinishReason::kCancelled); }
  Generation& out() { return out_; }

  void close() {
    if (out_.finish_reason != FinishReason::kCancelled) show(stream_.finish());
    out_.n_reasoning = stream_.n_reasoning();
    out_.stop_string = stream_.stop_string();
  }

 private:
  void mask(std::span<const int32_t> ids) {
    for (const int32_t id : ids) {
      if (id >= 0 && static_cast<size_t>(id) < row_.size()) row_[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
    }
  }

  void take(int32_t id) {
    if (contains(end_ids_, id)) {
      if (id != end_token_) out_.stop_token = id;
      return end(FinishReason::kStop);
    }
    out_.token_ids.push_back(id);
    show(stream_.push(id));
    if (stream_.stopped()) return end(FinishReason::kStop);
    if (static_cast<int64_t>(out_.token_ids.size()) >= limit_) end(FinishReason::kLength);
  }

  void show(const ReplyDelta& delta) {
    if (delta.empty()) return;
    out_.reasoning += delta.reasoning;
    out_.content += delta.content;
    if (on_delta_) on_delta_(delta);
  }

  void end(FinishReason reason) {
    done_ = true;
    out_.finish_reason = reason;
  }

  const GenerationRequest& request_;
  ReplyStream stream_;
  const int32_t end_token_;
  std::vector<int32_t> end_ids_;
  const std::span<const int32_t> masked_;
  std::vector<float> row_;
  const int64_t limit_;
  const DeltaSink& on_delta_;
  Generation out_;
  bool done_ = false;
};

// A row of logits, cut to the ids that the tokenizer knows: the model may have spare rows.
std::span<const float> row_of(const Tensor& logits, size_t row, int32_t n_ids) {
  const auto vocab = static_cast<size_t>(logits.dim(1));
  return logits.as<float>().subspan(row * vocab, static_cast<size_t>(n_ids));
}

// One draft round after `anchor`: checks the guesses in one forward pass and leaves `session` with exactly the accepted rows fed.
// Returns the next anchor.
Result<int32_t> draft_round(Session& session, int32_t anchor, int64_t room, int32_t n_ids,
                            std::span<const int32_t> placeholders, Reply& reply) {
  std::vector<int32_t> guesses;
  if (room > 0) {
    ASSIGN_OR_RETURN(guesses, session.draft(anchor));
  }
  // What cannot be fed cannot be right, nor can what follows it.
  const auto is_unusable = [&](int32_t id) { return id < 0 || id >= n_ids || contains(placeholders, id); };
  guesses.erase(std::find_if(guesses.begin(), guesses.end(), is_unusable), guesses.end());
  if (static_cast<int64_t>(guesses.size()) > room) guesses.resize(static_cast<size_t>(room));
  std::vector<int32_t> rows = {anchor};
  rows.insert(rows.end(), guesses.begin(), guesses.end());
  const int64_t start = session.n_tokens();
  ASSIGN_OR_RETURN(const Tensor logits, session.feed(rows, true));
  size_t n_right = 0;
  for (;; ++n_right) {
    ASSIGN_OR_RETURN(const int32_t id, reply.choose(row_of(logits, n_right, n_ids)));
    anchor = id;
    if (reply.done() || n_right == guesses.size() || id != guesses[n_right]) break;
  }
  reply.out().drafted += static_cast<int64_t>(guesses.size());
  reply.out().accepted += static_cast<int64_t>(n_right);
  RETURN_IF_ERROR(session.truncate(start + 1 + static_cast<int64_t>(n_right)));
  return anchor;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(std::shared_ptr<LanguageModel> model, std::shared_ptr<const Tokenizer> tokenizer,
                                               const EngineOptions& options) {
  std::unique_ptr<Engine> engine(new Engine());
  if (options.prefill_chunk < 1) return invalid_argument("engine: prefill chunk must be at least 1 token");
  if (options.context < 0 || options.context > model->max_context()) {
    return invalid_argument("engine: context must be 1 to " + std::to_string(model->max_context()) +
                            " tokens for this model, found " + std::to_string(options.context));
  }
  if (tokenizer->n_tokens() > model->vocab()) {
    return failed_precondition("engine: the tokenizer has " + std::to_string(tokenizer->n_tokens()) +
                               " ids, the model's vocabulary only " + std::to_string(model->vocab()) +
                               "; tokenizer.json belongs to another model");
  }
  const auto end_token = tokenizer->id_of(kEndToken);
  if (!end_token) {
    return failed_precondition("engine: tokenizer.json has no token '" + std::string(kEndToken) +
                               "'; expected a DeepSeek V4.1 tokenizer");
  }
  engine->context_ = options.context > 0 ? options.context : std::min(model->max_context(), kDefaultContext);
  engine->prefill_chunk_ = options.prefill_chunk;
  engine->end_token_ = *end_token;
  engine->placeholders_ = model->placeholder_ids();
  engine->chat_masked_ = engine->placeholders_;
  for (int32_t id = 0; id < tokenizer->n_tokens(); ++id) {
    const bool is_allowed = std::find(kChatTokens.begin(), kChatTokens.end(), tokenizer->id_to_token(id)) != kChatTokens.end();
    if (tokenizer->is_added(id) && !is_allowed) engine->chat_masked_.push_back(id);
  }
  engine->model_ = std::move(model);
  engine->tokenizer_ = std::move(tokenizer);
  return engine;
}

Result<Generation> Engine::generate(const GenerationRequest& request, const DeltaSink& on_delta,
                                    const CancelCheck& is_cancelled) {
  const std::span<const int32_t> prompt = request.prompt_ids;
  const auto n_prompt = static_cast<int64_t>(prompt.size());
  if (prompt.empty()) return invalid_argument("prompt: is empty; expected at least 1 token");
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] < 0 || prompt[i] >= model_->vocab()) {
      return invalid_argument("prompt: token " + std::to_string(i) + " is " + std::to_string(prompt[i]) + "; expected 0 to " +
                              std::to_string(model_->vocab() - 1));
    }
    if (contains(placeholders_, prompt[i])) {
      return invalid_argument("prompt: token " + std::to_string(i) + " is " + std::to_string(prompt[i]) +
                              ", the place of an image; only text is served");
    }
  }
  if (n_prompt >= context_) {
    return resource_exhausted("prompt: has " + std::to_string(n_prompt) + " tokens; the context holds " +
                              std::to_string(context_) + " for prompt and reply together");
  }
  const int64_t room = context_ - n_prompt;
  const int64_t limit = request.max_tokens > 0 ? std::min(request.max_tokens, room) : room;
  const int32_t n_ids = tokenizer_->n_tokens();
  const bool draft = request.draft && model_->can_draft();

  const std::vector<int32_t>& masked = request.format == ReplyFormat::kChat ? chat_masked_ : placeholders_;
  Reply reply(request, *tokenizer_, end_token_, masked, limit, on_delta);
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(std::unique_ptr<Session> session, model_->open_session(draft));
  Tensor logits;
  for (int64_t at = 0; at < n_prompt && !reply.done(); at += prefill_chunk_) {
    if (is_cancelled && is_cancelled()) {
      reply.cancel();
      break;
    }
    const int64_t n = std::min(prefill_chunk_, n_prompt - at);
    ASSIGN_OR_RETURN(logits, session->feed(prompt.subspan(static_cast<size_t>(at), static_cast<size_t>(n)), false));
  }
  const double prefill_seconds = seconds_since(start);

  const auto decode_start = std::chrono::steady_clock::now();
  int32_t anchor = 0;
  if (!reply.done()) {
    ASSIGN_OR_RETURN(anchor, reply.choose(row_of(logits, 0, n_ids)));
  }
  while (!reply.done()) {
    if (is_cancelled && is_cancelled()) {
      reply.cancel();
      break;
    }
    if (draft) {
      // A guess is worth checking only if the token chosen after it still fits.
      const int64_t remaining = limit - static_cast<int64_t>(reply.out().token_ids.size());
      ASSIGN_OR_RETURN(anchor, draft_round(*session, anchor, remaining - 1, n_ids, placeholders_, reply));
    } else {
      ASSIGN_OR_RETURN(logits, session->feed({&anchor, 1}, false));
      ASSIGN_OR_RETURN(anchor, reply.choose(row_of(logits, 0, n_ids)));
    }
  }
  const double decode_seconds = seconds_since(decode_start);

  reply.close();
  Generation out = std::move(reply.out());
  out.n_prompt = n_prompt;
  out.prefill_seconds = prefill_seconds;
  out.decode_seconds = decode_seconds;
  const auto n_timed = static_cast<double>(out.token_ids.size()) - 1;
  out.tokens_per_second = n_timed > 0 && decode_seconds > 0 ? n_timed / decode_seconds : 0;
  return out;
}

}  // namespace espalier
