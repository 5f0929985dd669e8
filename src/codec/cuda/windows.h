// The device layout of a packed matrix, and how a lane takes its states out of it. Plain C++: the kernels and their tests on a
// CPU compile the same functions.
//
// A matrix is cut into blocks of 64 columns x 32 rows (4 x 2 tiles), ordered by column group, then by row pair ("pair" = two tile
// rows), so that a warp that walks down 64 columns streams contiguous memory. In a block, lane l owns 16 consecutive ring positions
// of each of the 4 n-tiles: with u = 2 (l/4) + l%2 and h = l/2 % 2, positions 16u .. 16u+15 of tile (2 pair + h, nt). That is two
// columns (l/4 and l/4 + 8) and eight rows: exactly the A operand of four mma.m16n8k32 when a state's 32-bit product counts as
// four bytes along k. A lane's 8*k2 own bits per n-tile are cut from the end into whole words and a rest of r = 8*k2 mod 32
// bits in front; a lane's k2 words of a block are: for each whole word, most significant first, the four n-tiles; then the
// four rests packed together. They are stored so that the warp reads them 16, 8 and 4 bytes a lane.
// The 16 - K bits before a lane's own bits are the end of its ring neighbour's: lane ring_neighbour(l).
#pragma once

#include <cstdint>

#include "codec/trellis.h"

#if defined(__CUDACC__)
#define ESPALIER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ESPALIER_HOST_DEVICE inline
#endif

#if defined(__CUDA_ARCH__)
#define ESPALIER_UNROLL _Pragma("unroll")
#else
#define ESPALIER_UNROLL
#endif

namespace espalier::codec::cuda {

inline constexpr int kGroupColumns = 64;  // columns of a block
inline constexpr int kPairRows = 32;      // rows of a block
inline constexpr int kGroupTiles = 4;     // n-tiles of a block
inline constexpr int kPositions = 16;     // ring positions a lane owns in a tile

constexpr int64_t block_words(int k2) { return int64_t{32} * k2; }  // 32-bit words of a block
constexpr int64_t layout_words(int64_t k, int64_t n, int k2) { return k / kPairRows * (n / kGroupColumns) * block_words(k2); }

constexpr int whole_words(int k2) { return k2 / 4; }
constexpr int rest_bits(int k2) { return 8 * (k2 % 4); }
// Words of a lane's bit string of one n-tile with its neighbour's 16 bits in front.
constexpr int string_words(int k2) { return (16 + 8 * k2 + 31) / 32; }
// Bits of the string behind the window of position i.
constexpr int bits_behind(int k2, int i) { return 8 * k2 - window_end(k2, i); }

ESPALIER_HOST_DEVICE int ring_neighbour(int lane) { return (lane & 1) != 0 ? lane - 1 : (lane - 3) & 31; }
ESPALIER_HOST_DEVICE int lane_unit(int lane) { return 2 * (lane / 4) + lane % 2; }
ESPALIER_HOST_DEVICE int lane_half(int lane) { return lane / 2 % 2; }

// Where word `w` of lane `lane` lies within its block (in words): vectors of 4, then of 2, then single words.
ESPALIER_HOST_DEVICE int word_place(int k2, int lane, int w) {
  const int quads = 4 * (k2 / 4), rest = k2 % 4;
  if (w < quads) return 128 * (w / 4) + 4 * lane + w % 4;
  if (rest >= 2 && w < quads + 2) return 32 * quads + 2 * lane + (w - quads);
  return 32 * (quads + (rest == 3 ? 2 : 0)) + lane;
}

// n <= 32 ring bits from bit b on (n > 0), cyclic, most significant first; tile: the 4*k2 words of a tile.
ESPALIER_HOST_DEVICE uint32_t ring_bits(const uint32_t* tile, int k2, int b, int n) {
  const int n_words = 4 * k2;
  const int word = b / 32 % n_words, shift = b % 32;
  const uint64_t two = (uint64_t{tile[word]} << 32) | tile[(word + 1) % n_words];
  return static_cast<uint32_t>((two << shift) >> (64 - n));
}

// Word `w` of lane `lane` of one block. tile(h, nt) gives the words of the block's tiles.
template <typename Tile>
ESPALIER_HOST_DEVICE uint32_t layout_word(int k2, int lane, int w, Tile tile) {
  const int own = 8 * k2 * lane_unit(lane), h = lane_half(lane);
  const int quads = 4 * whole_words(k2), rest = rest_bits(k2);
  if (w < quads) return ring_bits(tile(h, w % 4), k2, own + rest + 32 * (w / 4), 32);
  uint32_t out = 0;
  for (int bit = 32 * (w - quads), i = 0; i < 32; i += 8, bit += 8) {
    out = (out << 8) | ring_bits(tile(h, bit / rest), k2, own + bit % rest, 8);
  }
  return out;
}

namespace bits {

// The device's one-instruction forms, and what they mean.
ESPALIER_HOST_DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = (uint64_t{b} << 32) | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (8 * ((selector >> (4 * i)) & 7)) & 255u) << (8 * i);
  return out;
#endif
}

// Bits s .. s+31 of high:low, 0 <= s < 32.
ESPALIER_HOST_DEVICE uint32_t funnel(uint32_t low, uint32_t high, int s) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, s);
#else
  return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> s);
#endif
}

// x << n. On a device as a multiplication, which runs beside shifts instead of queueing with them; written so that the compiler does
// not turn it and the right shift after it into a shift and a mask.
ESPALIER_HOST_DEVICE uint32_t shift_left(uint32_t x, int n) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(1u << n));
  return out;
#else
  return x << n;
#endif
}

}  // namespace bits

// The last word of n-tile nt's own bits; its low half is what the ring's next lane needs.
template <int k2>
ESPALIER_HOST_DEVICE uint32_t last_word(const uint32_t (&w)[k2], int nt);

// Two n-tiles' ends for one exchange: that of n-tile 2*half in the low half, of 2*half + 1 in the high half.
template <int k2>
ESPALIER_HOST_DEVICE uint32_t pack_ends(const uint32_t (&w)[k2], int half);

// The bit string of n-tile nt, last word first. The neighbour's 16 bits are the low half of `end`, or with `in_high` its high half.
template <int k2>
ESPALIER_HOST_DEVICE void bit_string(const uint32_t (&w)[k2], uint32_t end, bool in_high, int nt, uint32_t (&s)[string_words(k2)]);

// The state of position i of a bit string. All branches are on constants once i is.
template <int k2>
ESPALIER_HOST_DEVICE uint32_t window(const uint32_t (&s)[string_words(k2)], int i);

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

// The r-bit rest of n-tile nt out of the packed rests.
template <int k2>
ESPALIER_HOST_DEVICE uint32_t rest_of(const uint32_t (&w)[k2], int nt) {
  constexpr int r = rest_bits(k2), first = 4 * whole_words(k2);
  if constexpr (r == 0) {
    return 0;
  } else {
    const int bit = r * nt, word = first + bit / 32, behind = 32 - bit % 32 - r;  // behind < 0: continues in the next word
    if (behind >= 0) return w[word] >> behind & ((1u << r) - 1u);
    return bits::funnel(w[word + 1 < k2 ? word + 1 : word], w[word], 32 + behind) & ((1u << r) - 1u);
  }
}

// The largest number of bits behind a window among those that straddle the end of string word q: they share one shifted word.
template <int k2>
constexpr int straddle_top(int q) {
  for (int i = 0; i < kPositions; ++i) {
    const int d = bits_behind(k2, i);
    if (d / 32 == q && d % 32 > 16) return d;
  }
  return 32 * q + 16;
}

}  // namespace detail

template <int k2>
ESPALIER_HOST_DEVICE uint32_t last_word(const uint32_t (&w)[k2], int nt) {
  if constexpr (whole_words(k2) > 0) {
    return w[4 * (whole_words(k2) - 1) + nt];
  } else {
    return detail::rest_of<k2>(w, nt);
  }
}

template <int k2>
ESPALIER_HOST_DEVICE uint32_t pack_ends(const uint32_t (&w)[k2], int half) {
  return bits::permute(last_word<k2>(w, 2 * half), last_word<k2>(w, 2 * half + 1), 0x5410);
}

template <int k2>
ESPALIER_HOST_DEVICE void bit_string(const uint32_t (&w)[k2], uint32_t end, bool in_high, int nt, uint32_t (&s)[string_words(k2)]) {
  constexpr int n = whole_words(k2), r = rest_bits(k2);
  ESPALIER_UNROLL
  for (int j = 0; j < n; ++j) s[n - 1 - j] = w[4 * j + nt];
  if constexpr (r == 16) {
    // Both the rest and the end are halves of a word: one byte permutation.
    s[n] = bits::permute(end, w[4 * n + nt / 2], (in_high ? 0x3200u : 0x1000u) | (nt % 2 == 0 ? 0x76u : 0x54u));
  } else {
    const uint32_t bits = in_high ? end >> 16 : end & 0xFFFFu;
    if constexpr (r == 0) s[n] = bits;
    if constexpr (r == 8) s[n] = (bits << 8) | detail::rest_of<k2>(w, nt);
    if constexpr (r == 24) {
      s[n] = (bits << 24) | detail::rest_of<k2>(w, nt);
      s[n + 1] = bits >> 8;
    }
  }
}

template <int k2>
ESPALIER_HOST_DEVICE uint32_t window(const uint32_t (&s)[string_words(k2)], int i) {
  const int d = bits_behind(k2, i), q = d / 32, o = d % 32;
  constexpr int top = string_words(k2) - 1;
  if constexpr (k2 % 4 == 0) {
    // Offsets that agree modulo 8 share a shifted word; then a window is a byte permutation, a mask or a shift.
    const int c = o % 8, byte = o / 8;
    const uint32_t f = c == 0 ? s[q] : bits::funnel(s[q], s[q + 1 <= top ? q + 1 : top], c);
    if (byte == 0) return f & 0xFFFFu;
    if (byte == 1) return bits::permute(f, 0, 0x4421);
    if (byte == 2) return f >> 16;
    const uint32_t g = q + 1 >= top ? s[top] >> c : c == 0 ? s[q + 1] : bits::funnel(s[q + 1], s[q + 2 <= top ? q + 2 : top], c);
    if (q + 1 >= top) return bits::permute(f, g, 0x6643);  // the top word's upper half is zero
    return bits::permute(f, g, 0x6543) & 0xFFFFu;
  } else {
    if (o == 0) return s[q] & 0xFFFFu;
    if (o == 16) return s[q] >> 16;
    if (o == 8) return bits::permute(s[q], 0, 0x4421);
    const bool on_multiplier = i % 5 != 4;  // measured: a few of the shifts are better left where they are
    if (o < 16) return (on_multiplier ? bits::shift_left(s[q], 16 - o) : s[q] << (16 - o)) >> 16;
    const int base = detail::straddle_top<k2>(q) - 16;  // the first of them comes to the top of the shifted word
    const uint32_t f = bits::funnel(s[q], s[q + 1 <= top ? q + 1 : top], base - 32 * q);
    const int rel = d - base;
    if (rel == 16) return f >> 16;
    if (rel == 8) return bits::permute(f, 0, 0x4421);
    if (rel == 0) return f & 0xFFFFu;
    return (on_multiplier ? bits::shift_left(f, 16 - rel) : f << (16 - rel)) >> 16;
  }
}

}  // namespace espalier::codec::cuda
