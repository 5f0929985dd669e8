// Engram: which table rows a token reads (n-gram hashes of compressed token ids) and how a row is read.
//
// Exact integer arithmetic: primes by an ascending search, multipliers from numpy's PCG64, hashes in 64 bits, never
// through a double. Tables stay memory-mapped; only the rows a token needs are touched. Source: model.md section 7.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "tensor/view.h"

namespace espalier {

// Hash constants of one Engram layer. column = (n - 2) * n_heads + head.
struct EngramHash {
  std::vector<int64_t> primes;       // [n_columns]
  std::vector<int64_t> offsets;      // [n_columns] first row of the column's part of the table
  std::vector<int64_t> multipliers;  // [max_ngram], index = look-back distance
  int64_t n_rows = 0;                // sum of the primes
};

// One entry per config.engram.layers. Errors: data_loss when a sum of primes differs from config.engram.n_rows.
Result<std::vector<EngramHash>> make_engram_hashes(const Config& config);

inline constexpr int32_t kEngramDead = -1;  // history entry of an image-span position

// rows[column] for position p. `history` holds the compressed ids of positions 0..p; `pad_class` is the class of the
// pad token.
void engram_rows(const EngramHash& hash, std::span<const int32_t> history, int64_t p, int32_t pad_class,
                 int64_t n_heads, int64_t* rows);

// A table of e4m3 rows with one e8m0 scale per 32 columns.
struct EngramTable {
  ConstView codes;   // [n_rows, head_dim]:F8_E4M3
  ConstView scales;  // [n_rows, head_dim/32]:F8_E8M0
  std::string name;  // for messages
};

// out[head_dim] = the row's values (exact in fp32 and in bf16). Errors: data_loss for a NaN code or scale, naming table
// and row.
Status read_engram_row(const EngramTable& table, int64_t row, float* out);

}  // namespace espalier
