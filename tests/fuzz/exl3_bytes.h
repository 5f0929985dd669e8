// The stored tensors of an EXL3 linear, made of a fuzz input.
//
// Input: byte 0 last dimension / 8, byte 1 which parts exist, bytes 2 and 3 tile counts / 8, byte 4 dtype (and, with
// its top bit, scales that are always finite); the rest fills the tensors, round and round.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "codec/exl3_tensor.h"

namespace espalier::fuzz {

inline constexpr size_t kLeastLinearBytes = 16;

struct LinearBytes {
  std::vector<uint8_t> trellis, suh, svh;
  int32_t marker = 0;
  codec::Exl3Parts parts;  // points into the others
};

// False when the input is too short or asks for too much.
inline bool make_linear(const uint8_t* data, size_t size, LinearBytes* out) {
  if (size < kLeastLinearBytes) return false;
  const int64_t last = 8 * static_cast<int64_t>(data[0]);
  const int64_t kt = data[2] % 3 * 8 + (data[2] >> 7);
  const int64_t nt = data[3] % 3 * 8 + (data[3] >> 7);
  const DType dtype = (data[4] & 15) == 0 ? DType::kF16 : DType::kI16;
  if (kt * nt * last > (1 << 20)) return false;
  const auto fill = [&](std::vector<uint8_t>& bytes, int64_t n, size_t offset) {
    bytes.resize(static_cast<size_t>(n));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = data[5 + (i + offset) % (size - 5)];
  };
  fill(out->trellis, 2 * kt * nt * last, 0);
  fill(out->suh, 32 * kt, 3);
  fill(out->svh, 32 * nt, 5);
  if ((data[4] & 128) != 0) {
    for (std::vector<uint8_t>* scales : {&out->suh, &out->svh}) {
      for (size_t i = 1; i < scales->size(); i += 2) (*scales)[i] &= 0xBF;
    }
  }
  std::memcpy(&out->marker, data + 5, sizeof out->marker);
  if ((data[1] & 64) != 0) out->marker = static_cast<int32_t>(codec::kMul1Multiplier);

  codec::Exl3Parts& parts = out->parts;
  parts.trellis = ConstView{out->trellis.data(), dtype, {kt, nt, last}};
  if ((data[1] & 1) == 0) parts.suh = ConstView{out->suh.data(), DType::kF16, {kt * 16}};
  if ((data[1] & 2) == 0) parts.svh = ConstView{out->svh.data(), DType::kF16, {nt * 16}};
  if ((data[1] & 4) != 0) parts.mul1 = ConstView{&out->marker, DType::kI32, {}};
  if ((data[1] & 8) != 0) parts.mcg = ConstView{&out->marker, DType::kI32, {}};
  if ((data[1] & 16) != 0) parts.su = ConstView{out->suh.data(), DType::kI16, {kt}};
  if ((data[1] & 32) != 0) parts.sv = ConstView{out->svh.data(), DType::kI16, {nt}};
  return true;
}

}  // namespace espalier::fuzz
