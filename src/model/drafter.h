// DSpark drafter: proposes block_size tokens from the backbone's taps in one pass over n_stages blocks.
//
// Per sequence: seed() with the taps of every accepted position (prompt and generated), then draft() after position p
// with the sampled token t_{p+1}. A block's rows attend to the stage's ring (positions up to p, from main_x) and to
// each other, not causally. Rings only ever hold accepted positions, so a rejected draft needs no repair here. Source:
// model.md section 8.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/forward.h"

namespace espalier {

class DrafterState {
 public:
  explicit DrafterState(const Config& config);
  // Positions seeded so far are 0 .. n_tokens() - 1 (a restored prefix may lack early rows; see first_position).
  int64_t n_tokens() const { return n_tokens_; }
  void reset(int64_t first_position = 0);

  // --- for the forward pass ---
  std::vector<WindowRing> rings;  // [n_stages]
  void advance(int64_t n) { n_tokens_ += n; }
  int64_t first_position() const { return first_position_; }

 private:
  int64_t n_tokens_ = 0;
  int64_t first_position_ = 0;
};

struct DraftResult {
  std::vector<int32_t> ids;  // [block_size] greedy drafts d_1 … ; d_j is the guess for position p + 1 + j
  Tensor logits;             // [block_size, V] with the Markov term of the greedy path
  Tensor confidence;         // [block_size] raw scalars
};

// A draft call in flight, for code that walks stages itself.
struct DraftStream {
  std::vector<int32_t> ids;  // [block_size] t_{p+1}, noise, …
  int64_t start = 0;         // position of row 0 = p + 1
  Tensor h;                  // [block_size, HC, D]
  Tensor pre;                // [block_size, HC]
};

// main_x [n_rows, D] of taps [n_rows, n_taps*D]: RMSNorm(main_proj * taps).
void draft_main_x(const CallContext& context, const DrafterGlobals& globals, const float* taps, int64_t n_rows,
                  float* main_x);
// Writes the context keys of main_x [n_rows, D] at positions start… into the ring of one stage.
void seed_stage(const CallContext& context, const BlockWeights& stage_weights, int stage, const float* main_x,
                int64_t n_rows, int64_t start, WindowRing& ring);
void begin_draft(const CallContext& context, const GlobalWeights& globals, int32_t token, int64_t position,
                 DraftStream* stream);
// The ring must hold positions up to position - 1 (first_position on).
void run_draft_stage(const CallContext& context, const BlockWeights& stage_weights, int stage, const WindowRing& ring,
                     int64_t first_position, DraftStream& stream);
DraftResult finish_draft(const CallContext& context, const GlobalWeights& globals, const DrafterGlobals& drafter,
                         const DraftStream& stream);

// Whole steps over a loaded model. seed: taps [n_rows, n_taps*D] of the next n_rows accepted positions.
Status seed_drafter(const Model& model, DrafterState& state, const Tensor& taps, int64_t n_rows, Numerics numerics,
                    ThreadPool& pool, LayerObserver* observer = nullptr);
// Drafts after position state.n_tokens() - 1 given `token` = t_{p+1}.
// Errors: failed_precondition without drafter or before any position was seeded; invalid_argument for an id out of
// range.
Result<DraftResult> draft(const Model& model, const DrafterState& state, int32_t token, Numerics numerics,
                          ThreadPool& pool, LayerObserver* observer = nullptr);

}  // namespace espalier
