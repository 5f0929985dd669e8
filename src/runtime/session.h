// The network as the engine sees it: a model that opens sequences, and a sequence that is fed token ids and answers with logits.
//
// Weights are immutable behind LanguageModel; all state lives in a Session. A token's logits do not depend on how many rows
// were fed together, so chunked prefill, single-token decode and draft verification agree. Implemented by runtime/network.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "tensor/view.h"

namespace espalier {

class Session {
 public:
  virtual ~Session() = default;

  // Tokens fed so far.
  virtual int64_t n_tokens() const = 0;

  // Feeds ids at positions n_tokens()…; returns logits [rows, vocab]:f32 of every fed id, or of the last one only.
  // ids must not be empty and must lie in [0, vocab) (the engine checks). After an error the session must not be used.
  virtual Result<Tensor> feed(std::span<const int32_t> ids, bool all_logits) = 0;

  // Forgets the tokens from position `n_tokens` on: rejected guesses. At most the rows of the last feed can be taken back.
  virtual Status truncate(int64_t n_tokens) = 0;

  // Guesses the ids that follow `anchor`, which comes at position n_tokens() and has not been fed. May be empty.
  virtual Result<std::vector<int32_t>> draft(int32_t anchor) {
    (void)anchor;
    return std::vector<int32_t>();
  }
};

class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  virtual int64_t vocab() const = 0;
  // Longest sequence the model was made for.
  virtual int64_t max_context() const = 0;
  // Ids that stand for something else than text (image placeholders): they can neither be fed nor chosen.
  virtual std::vector<int32_t> placeholder_ids() const { return {}; }
  virtual bool can_draft() const { return false; }
  // Threads: sessions of one model may be used from one thread at a time.
  virtual Result<std::unique_ptr<Session>> open_session(bool with_drafter) = 0;
};

}  // namespace espalier
