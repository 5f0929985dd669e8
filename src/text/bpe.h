// Byte-pair merging of one piece of text: the pair of lowest rank first, the leftmost among equals.
//
// Short pieces scan for the best pair; long ones keep a heap over a linked list, so that a run of a million equal
// characters costs O(n log n). Both give the same ids as the reference's heap.
// Source: Sennrich et al. 2016; order of merges as in the Hugging Face `tokenizers` BPE model.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace espalier {

struct Merge {
  int32_t left;
  int32_t right;
  int32_t result;
};

class BytePairMerger {
 public:
  // byte_ids: the token of each single byte. merges: by rank, no pair twice.
  BytePairMerger(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges);

  // Appends the ids of `piece` to `out`. Size below 2^32 bytes.
  void merge(std::string_view piece, std::vector<int32_t>& out) const;

 private:
  struct Slot {
    uint64_t pair = kEmpty;
    uint32_t rank = 0;
    int32_t result = 0;
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};

  const Slot* find(int32_t left, int32_t right) const;
  void merge_short(std::string_view piece, std::vector<int32_t>& out) const;
  void merge_long(std::string_view piece, std::vector<int32_t>& out) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Slot> slots_;  // open addressing; the size is a power of two
  uint32_t shift_ = 0;
};

}  // namespace espalier
