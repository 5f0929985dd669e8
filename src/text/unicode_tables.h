// Where the Unicode tables of the reference tokenizer (PyPI `tokenizers`) differ from those of PCRE2 and utf8proc.
//
// Token ids and Engram classes must equal the reference's for every code point, whatever Unicode version the system's
// libraries know. The tables are measured through the package; generator and versions:
// tests/oracle/text_unicode_tables.py. All tables are sorted by code point.
#pragma once

#include <cstdint>
#include <span>

namespace espalier::unicode {

struct Substitute {
  uint32_t first;
  uint32_t last;
  uint32_t stand_in;  // same UTF-8 length as the range, and the category that the reference gives to it
};

struct CodePointRange {
  uint32_t first;
  uint32_t last;
};

struct CodePointPair {
  uint32_t from;
  uint32_t to;
};

// Code points that a split pattern must see as another one (Unicode 16 categories on a Unicode 14 engine; U+180E is no
// space).
std::span<const Substitute> substitutes();
// Dropped by the StripAccents normaliser: general category M of Unicode 9.
std::span<const CodePointRange> combining_marks();
// Code points that normalisation forms of Unicode 9 leave alone and later ones change.
std::span<const CodePointRange> inert_in_normalization();
// Lower case where it differs from utf8proc's simple mapping (U+0130 apart: it becomes two code points).
std::span<const CodePointPair> lower_case();

// The row that holds `c`, or null.
template <typename Range>
const Range* find_range(std::span<const Range> rows, uint32_t c) {
  size_t low = 0, high = rows.size();
  while (low < high) {
    const size_t mid = (low + high) / 2;
    if (rows[mid].last < c) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  return low < rows.size() && rows[low].first <= c ? &rows[low] : nullptr;
}

}  // namespace espalier::unicode
