#include "codec/exl3_tensor.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "codec/hadamard.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

Status wrong(std::string_view name, std::string_view part, const std::string& what) {
  return data_loss(std::string(name) + "." + std::string(part) + ": " + what +
                   "; the file is not a valid EXL3 tensor, fetch or quantize it again");
}

std::string found_text(const ConstView& view) {
  return shape_text(view.shape) + " " + std::string(dtype_name(view.dtype));
}

// Element i of a 16-bit view; a safetensors file may place data at an odd address.
uint16_t load_u16(const ConstView& view, int64_t i) {
  uint16_t value;
  std::memcpy(&value, static_cast<const uint8_t*>(view.data) + 2 * i, sizeof value);
  return value;
}

std::vector<uint16_t> copy_u16(const ConstView& view) {
  std::vector<uint16_t> out(static_cast<size_t>(view.size()));
  std::memcpy(out.data(), view.data, 2 * out.size());
  return out;
}

bool is_aligned(const std::optional<ConstView>& view) { return reinterpret_cast<uintptr_t>(view->data) % 2 == 0; }

Status check_vector(std::string_view name, std::string_view part, const std::optional<ConstView>& view, DType dtype,
                    int64_t size) {
  if (!view) return wrong(name, part, "missing");
  if (view->dtype != dtype || view->shape != Shape{size}) {
    return wrong(name, part,
                 "expected " + shape_text({size}) + " " + std::string(dtype_name(dtype)) + ", found " + found_text(*view));
  }
  return ok_status();
}

Status check_scale(std::string_view name, std::string_view part, const std::optional<ConstView>& view, int64_t size) {
  RETURN_IF_ERROR(check_vector(name, part, view, DType::kF16, size));
  for (int64_t i = 0; i < size; ++i) {
    if ((load_u16(*view, i) & 0x7C00u) == 0x7C00u) {
      return wrong(name, part, "element " + std::to_string(i) + " is NaN or infinite, expected a finite scale");
    }
  }
  return ok_status();
}

// The marker's value is informational, but another multiplier would mean another codebook.
Status check_marker(std::string_view name, std::string_view part, const ConstView& view, uint32_t multiplier) {
  if (view.dtype != DType::kI32 || !(view.shape.empty() || view.shape == Shape{1})) {
    return wrong(name, part, "expected a scalar I32, found " + found_text(view));
  }
  uint32_t value;
  std::memcpy(&value, view.data, sizeof value);
  if (value != multiplier) {
    return wrong(name, part, "expected the multiplier " + std::to_string(multiplier) + ", found " +
                                 std::to_string(value) + " (an experimental codebook that nothing here decodes)");
  }
  return ok_status();
}

Result<TrellisView> check_trellis(std::string_view name, const Exl3Parts& parts) {
  if (!parts.trellis) return wrong(name, "trellis", "missing");
  const ConstView& t = *parts.trellis;
  if (t.dtype != DType::kI16 || t.shape.size() != 3) {
    return wrong(name, "trellis", "expected [k/16, n/16, 16*K] I16, found " + found_text(t));
  }
  TrellisView view;
  view.words = static_cast<const uint16_t*>(t.data);
  for (int d = 0; d < 2; ++d) {
    if (t.shape[d] <= 0 || t.shape[d] % (kBlock / kTile) != 0 || t.shape[d] > (int64_t{1} << 32)) {
      return wrong(name, "trellis", "expected both tile counts to be positive multiples of 8 (dimensions in 128s), found " +
                                        shape_text(t.shape));
    }
  }
  view.k = t.shape[0] * kTile;
  view.n = t.shape[1] * kTile;
  const int64_t last = t.shape[2];
  if (last < 16 || last > 128 || last % 8 != 0 || !is_width(static_cast<int>(last / 8))) {
    return wrong(name, "trellis", "expected a last dimension of 16*K for K = 1..8 or 1.5, 2.5, 3.5, found " +
                                      shape_text(t.shape));
  }
  view.k2 = static_cast<int>(last / 8);
  if (parts.mul1 && parts.mcg) return wrong(name, "mul1", "both mul1 and mcg markers are present, expected at most one");
  view.codebook = parts.mul1 ? Codebook::kMul1 : parts.mcg ? Codebook::kMcg : Codebook::k3Inst;
  if (parts.mul1) RETURN_IF_ERROR(check_marker(name, "mul1", *parts.mul1, kMul1Multiplier));
  if (parts.mcg) RETURN_IF_ERROR(check_marker(name, "mcg", *parts.mcg, kMcgMultiplier));
  if (view.k2 % 2 != 0 && view.codebook != Codebook::kMul1) {
    return wrong(name, "trellis", "width " + width_text(view.k2) + " exists for mul1 only, found codebook " +
                                      std::string(codebook_name(view.codebook)));
  }
  return view;
}

// Old files keep only signs: bit i of word w is the sign bit of element 16*w + i.
std::vector<uint16_t> expand_signs(const ConstView& packed, int64_t size) {
  std::vector<uint16_t> out(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    out[static_cast<size_t>(i)] = ((load_u16(packed, i / 16) >> (i % 16)) & 1) != 0 ? 0xBC00 : 0x3C00;
  }
  return out;
}

Result<std::vector<uint16_t>> load_scale(std::string_view name, std::string_view part, const std::optional<ConstView>& f16,
                                         std::string_view old_part, const std::optional<ConstView>& packed, int64_t size) {
  if (!f16 && packed) {
    RETURN_IF_ERROR(check_vector(name, old_part, packed, DType::kI16, size / 16));
    return expand_signs(*packed, size);
  }
  RETURN_IF_ERROR(check_scale(name, part, f16, size));
  return copy_u16(*f16);
}

}  // namespace

bool is_exl3(const TensorLookup& find, std::string_view prefix) { return find(std::string(prefix) + ".trellis").has_value(); }

Exl3Parts find_exl3_parts(const TensorLookup& find, std::string_view prefix) {
  const std::string p(prefix);
  Exl3Parts parts;
  parts.trellis = find(p + ".trellis");
  parts.suh = find(p + ".suh");
  parts.svh = find(p + ".svh");
  parts.mul1 = find(p + ".mul1");
  parts.mcg = find(p + ".mcg");
  parts.su = find(p + ".su");
  parts.sv = find(p + ".sv");
  return parts;
}

Result<Exl3View> view_exl3(std::string_view name, const Exl3Parts& parts) {
  ASSIGN_OR_RETURN(const TrellisView trellis, check_trellis(name, parts));
  if ((!parts.suh && parts.su) || (!parts.svh && parts.sv)) {
    return unimplemented(std::string(name) + ": packed signs (su, sv) have no scales to look at in place; load the tensor");
  }
  RETURN_IF_ERROR(check_scale(name, "suh", parts.suh, trellis.k));
  RETURN_IF_ERROR(check_scale(name, "svh", parts.svh, trellis.n));
  if (!is_aligned(parts.trellis) || !is_aligned(parts.suh) || !is_aligned(parts.svh)) {
    return unimplemented(std::string(name) + ": the file places a tensor at an odd byte; load the tensor instead of viewing it");
  }
  return Exl3View{trellis, static_cast<const uint16_t*>(parts.suh->data), static_cast<const uint16_t*>(parts.svh->data)};
}

Result<Exl3Tensor> load_exl3(std::string_view name, const Exl3Parts& parts) {
  ASSIGN_OR_RETURN(const TrellisView view, check_trellis(name, parts));
  Exl3Tensor tensor;
  ASSIGN_OR_RETURN(tensor.suh, load_scale(name, "suh", parts.suh, "su", parts.su, view.k));
  ASSIGN_OR_RETURN(tensor.svh, load_scale(name, "svh", parts.svh, "sv", parts.sv, view.n));
  tensor.trellis = copy_u16(*parts.trellis);
  tensor.codebook = view.codebook;
  tensor.k2 = view.k2;
  tensor.k = view.k;
  tensor.n = view.n;
  return tensor;
}

void decode_weight(const Exl3View& view, float* weight, ThreadPool& pool) {
  const int64_t k = view.k();
  const int64_t n = view.n();
  const float* table = codebook_table_f32(view.trellis.codebook);
  const uint8_t* to_row_major = ring_to_row_major();
  pool.parallel_for(k / kBlock, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> block(static_cast<size_t>(kBlock) * kBlock);
    uint16_t states[kTileSize];
    for (int64_t kb = begin; kb < end; ++kb) {
      for (int64_t nb = 0; nb < n / kBlock; ++nb) {
        for (int t = 0; t < 64; ++t) {
          const int rt = t / 8;
          const int ct = t % 8;
          unpack_tile(view.trellis.tile(kb * 8 + rt, nb * 8 + ct), view.trellis.k2, states);
          for (int p = 0; p < kTileSize; ++p) {
            const int e = to_row_major[p];
            block[static_cast<size_t>((rt * kTile + e / kTile) * kBlock + ct * kTile + e % kTile)] = table[states[p]];
          }
        }
        for (int r = 0; r < kBlock; ++r) hadamard128_sum(block.data() + r * kBlock);
        hadamard_along_columns(block.data(), kBlock, kBlock);
        for (int r = 0; r < kBlock; ++r) {
          const int64_t row = kb * kBlock + r;
          const double su = decode_f16(view.suh[row]);
          for (int c = 0; c < kBlock; ++c) {
            const int64_t column = nb * kBlock + c;
            // The column pass was normalised; the row pass still lacks its 1/sqrt(128).
            const double value = block[static_cast<size_t>(r * kBlock + c)] * kHadamardScaleF64;
            weight[row * n + column] = static_cast<float>(value * su * decode_f16(view.svh[column]));
          }
        }
      }
    }
  });
}

std::vector<NamedPart> stored_parts(std::string_view prefix, const Exl3Tensor& tensor) {
  static const int32_t kMul1Bits = std::bit_cast<int32_t>(kMul1Multiplier);
  static const int32_t kMcgBits = std::bit_cast<int32_t>(kMcgMultiplier);
  CHECK(static_cast<int64_t>(tensor.trellis.size()) == trellis_words(tensor.k, tensor.n, tensor.k2)) << prefix;
  const std::string p(prefix);
  std::vector<NamedPart> parts;
  parts.push_back({p + ".suh", {tensor.suh.data(), DType::kF16, {tensor.k}}});
  parts.push_back({p + ".svh", {tensor.svh.data(), DType::kF16, {tensor.n}}});
  parts.push_back({p + ".trellis",
                   {tensor.trellis.data(), DType::kI16, {tensor.k / kTile, tensor.n / kTile, tile_words(tensor.k2)}}});
  if (tensor.codebook == Codebook::kMul1) parts.push_back({p + ".mul1", {&kMul1Bits, DType::kI32, {}}});
  if (tensor.codebook == Codebook::kMcg) parts.push_back({p + ".mcg", {&kMcgBits, DType::kI32, {}}});
  return parts;
}

}  // namespace espalier::codec
