#include "model/linear.h"

#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "codec/exl3_tensor.h"
#include "codec/int8_matmul.h"
#include "codec/matmul.h"
#include "ops/matmul.h"
#include "tensor/float_formats.h"

namespace espalier {
namespace {

// A stored matrix, row by row.
struct Source : StoredMatrix {
  std::string name;

  void row(int64_t o, float* w) const;
};

const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (int i = 0; i < 256; ++i) t[static_cast<size_t>(i)] = decode_e4m3(static_cast<uint8_t>(i));
    return t;
  }();
  return table;
}

template <typename T>
T load(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

void Source::row(int64_t o, float* w) const {
  switch (form) {
    case LinearForm::kFp8: {
      const std::array<float, 256>& table = e4m3_table();
      const uint8_t* codes = weight + o * in;
      const uint8_t* scales = scale + (row_begin + o) / block_rows * scale_cols;
      for (int64_t b = 0; b < scale_cols; ++b) {
        const float s = decode_e8m0(scales[b]);
        const int64_t end = std::min(in, (b + 1) * block_cols);
        for (int64_t i = b * block_cols; i < end; ++i) w[i] = table[codes[i]] * s;
      }
      return;
    }
    case LinearForm::kMxfp4: {
      static constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
      const uint8_t* codes = weight + o * (in / 2);
      const uint8_t* scales = scale + o * scale_cols;
      for (int64_t i = 0; i < in; i += 2) {
        const float s = decode_e8m0(scales[i / 32]);
        w[i] = kValues[codes[i / 2] & 15] * s;
        w[i + 1] = kValues[codes[i / 2] >> 4] * s;
      }
      return;
    }
    default:
      break;
  }
  const int64_t size = dtype_size_bytes(dtype);
  const uint8_t* p = weight + o * in * size;
  for (int64_t i = 0; i < in; ++i) {
    if (dtype == DType::kF32) {
      w[i] = load<float>(p + i * 4);
    } else {
      const uint16_t bits = load<uint16_t>(p + i * 2);
      w[i] = dtype == DType::kBF16 ? decode_bf16(bits) : decode_f16(bits);
    }
  }
}

// Refuses NaN and infinity, naming the element.
Status check_finite(const Source& source) {
  std::vector<float> w(static_cast<size_t>(source.in));
  for (int64_t o = 0; o < source.out; ++o) {
    source.row(o, w.data());
    for (int64_t i = 0; i < source.in; ++i) {
      if (!std::isfinite(w[static_cast<size_t>(i)])) {
        return data_loss("tensor '" + source.name + "': element [" + std::to_string(source.row_begin + o) + ", " +
                         std::to_string(i) + "]" + (source.scale != nullptr ? " (code times scale)" : "") +
                         ": expected a finite number, found " +
                         (std::isnan(w[static_cast<size_t>(i)]) ? "NaN" : "infinity") +
                         "; the file is damaged, download it again");
      }
    }
  }
  return ok_status();
}

codec::Int8Mode int8_mode(Products products) {
  return products == Products::kInt8 ? codec::Int8Mode::kPlain : codec::Int8Mode::kResidual;
}

}  // namespace

struct Linear::Impl {
  LinearForm form = LinearForm::kF32;
  int64_t in = 0;
  int64_t out = 0;
  int64_t stored_bits = 0;
  WeightResidency residency = WeightResidency::kUnpacked;
  Products products = Products::kExact;
  ops::PackedMatrix packed;                // kUnpacked; for EXL3 the trellis values
  std::optional<Source> source;            // native forms; its memory is read only where it is kStored
  std::optional<codec::Exl3Tensor> owned;  // EXL3 made from an owning tensor
  codec::Exl3View exl3;                    // EXL3

  ops::PackedMatrix unpack_source() const {
    return ops::pack_rows(in, out, [&](int64_t o, float* w) { source->row(o, w); });
  }

  static Result<std::unique_ptr<Impl>> from_source(Source source, int64_t stored_bits, WeightResidency residency) {
    RETURN_IF_ERROR(check_finite(source));
    auto impl = std::make_unique<Impl>();
    impl->form = source.form;
    impl->in = source.in;
    impl->out = source.out;
    impl->stored_bits = stored_bits;
    impl->residency = residency;
    impl->source = std::move(source);
    if (residency == WeightResidency::kUnpacked) impl->packed = impl->unpack_source();
    return impl;
  }

  void finish_exl3(WeightResidency wanted, Products wanted_products) {
    form = LinearForm::kExl3;
    in = exl3.k();
    out = exl3.n();
    stored_bits = 16 * (codec::trellis_words(in, out, exl3.trellis.k2) + in + out);
    residency = wanted;
    if (codec::has_int8_matmul(exl3)) products = wanted_products;
    if (wanted == WeightResidency::kUnpacked && products == Products::kExact) {
      std::vector<float> inner(static_cast<size_t>(in * out));
      codec::decode_inner(exl3.trellis, inner.data());
      packed = ops::pack_kn(inner.data(), in, out);
    }
  }
};

Linear::Linear() = default;
Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;
Linear::Linear(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<Linear> Linear::from_fp8(const std::string& name, const ConstView& weight, const ConstView& scale,
                                int64_t block_rows, int64_t block_cols, int64_t row_begin, int64_t out,
                                WeightResidency residency) {
  CHECK(weight.shape.size() == 2 && scale.shape.size() == 2 && row_begin + out <= weight.shape[0]) << name;
  Source s;
  s.form = LinearForm::kFp8;
  s.name = name;
  s.in = weight.shape[1];
  s.out = out;
  s.row_begin = row_begin;
  s.block_rows = block_rows;
  s.block_cols = block_cols;
  s.scale_cols = scale.shape[1];
  s.weight = static_cast<const uint8_t*>(weight.data) + row_begin * s.in;
  s.scale = static_cast<const uint8_t*>(scale.data);
  const int64_t bits = 8 * (out * s.in + (out + block_rows - 1) / block_rows * s.scale_cols);
  ASSIGN_OR_RETURN(auto impl, Impl::from_source(std::move(s), bits, residency));
  return Linear(std::move(impl));
}

Result<Linear> Linear::from_mxfp4(const std::string& name, const ConstView& weight, const ConstView& scale,
                                  WeightResidency residency) {
  CHECK(weight.shape.size() == 2 && scale.shape.size() == 2) << name;
  Source s;
  s.form = LinearForm::kMxfp4;
  s.name = name;
  s.in = weight.shape[1] * 2;
  s.out = weight.shape[0];
  s.scale_cols = scale.shape[1];
  s.weight = static_cast<const uint8_t*>(weight.data);
  s.scale = static_cast<const uint8_t*>(scale.data);
  const int64_t bits = 4 * s.out * s.in + 8 * s.out * s.scale_cols;
  ASSIGN_OR_RETURN(auto impl, Impl::from_source(std::move(s), bits, residency));
  return Linear(std::move(impl));
}

Result<Linear> Linear::from_dense(const std::string& name, const ConstView& weight, int64_t row_begin, int64_t out,
                                  WeightResidency residency) {
  CHECK(weight.shape.size() == 2 && row_begin + out <= weight.shape[0]) << name;
  CHECK(weight.dtype == DType::kF32 || weight.dtype == DType::kBF16 || weight.dtype == DType::kF16) << name;
  Source s;
  s.form = weight.dtype == DType::kF32 ? LinearForm::kF32 : LinearForm::kBf16;
  s.name = name;
  s.dtype = weight.dtype;
  s.in = weight.shape[1];
  s.out = out;
  s.row_begin = row_begin;
  s.weight = static_cast<const uint8_t*>(weight.data) + row_begin * s.in * dtype_size_bytes(weight.dtype);
  const int64_t bits = 8 * dtype_size_bytes(weight.dtype) * out * s.in;
  ASSIGN_OR_RETURN(auto impl, Impl::from_source(std::move(s), bits, residency));
  return Linear(std::move(impl));
}

Linear Linear::from_kn(const float* w, int64_t in, int64_t out) {
  auto impl = std::make_unique<Impl>();
  impl->in = in;
  impl->out = out;
  impl->stored_bits = 32 * in * out;
  impl->packed = ops::pack_kn(w, in, out);
  return Linear(std::move(impl));
}

Linear Linear::from_exl3(codec::Exl3Tensor tensor, WeightResidency residency, Products products) {
  auto impl = std::make_unique<Impl>();
  impl->owned = std::move(tensor);
  impl->exl3 = impl->owned->view();
  impl->finish_exl3(residency, products);
  return Linear(std::move(impl));
}

Linear Linear::from_exl3(const codec::Exl3View& view, WeightResidency residency, Products products) {
  auto impl = std::make_unique<Impl>();
  impl->exl3 = view;
  impl->finish_exl3(residency, products);
  return Linear(std::move(impl));
}

int64_t Linear::in() const {
  return impl_->in;
}
int64_t Linear::out() const {
  return impl_->out;
}
LinearForm Linear::form() const {
  return impl_->form;
}
int64_t Linear::stored_bits() const {
  return impl_->stored_bits;
}
Products Linear::products() const {
  return impl_->products;
}
const codec::Exl3View* Linear::exl3() const {
  return impl_->form == LinearForm::kExl3 ? &impl_->exl3 : nullptr;
}

const StoredMatrix* Linear::stored() const {
  return impl_->source ? &*impl_->source : nullptr;
}

void Linear::apply(ThreadPool& pool, const float* x, int64_t n_rows, float* y) const {
  CHECK(impl_ != nullptr) << "apply on an empty Linear";
  if (n_rows == 0) return;
  const Impl& m = *impl_;
  if (m.form == LinearForm::kExl3) {
    if (m.products != Products::kExact) {
      return codec::int8_matmul(pool, m.exl3, x, n_rows, y, int8_mode(m.products));
    }
    if (m.packed.empty()) return codec::exl3_matmul(pool, m.exl3, x, n_rows, y);
    std::vector<float> rotated(static_cast<size_t>(n_rows * m.in));
    codec::rotate_input(m.exl3, x, n_rows, rotated.data());
    ops::matmul(pool, {rotated.data(), n_rows, &m.packed, y});
    return codec::rotate_output(m.exl3, y, n_rows, y);
  }
  if (!m.packed.empty()) return ops::matmul(pool, {x, n_rows, &m.packed, y});
  const ops::PackedMatrix packed = m.unpack_source();
  ops::matmul(pool, {x, n_rows, &packed, y});
}

void Linear::apply_all(ThreadPool& pool, std::span<const Job> jobs) {
  for (Products products : {Products::kInt8, Products::kInt8Residual}) {
    std::vector<codec::Int8Job> list;
    for (const Job& job : jobs) {
      if (job.linear->products() == products) list.push_back({*job.linear->exl3(), job.x, job.n_rows, job.y});
    }
    if (!list.empty()) codec::int8_matmul(pool, list, int8_mode(products));
  }
  for (const Job& job : jobs) {
    if (job.linear->products() == Products::kExact) job.linear->apply(pool, job.x, job.n_rows, job.y);
  }
}

void Linear::weight_kn(ThreadPool& pool, float* w) const {
  const Impl& m = *impl_;
  if (m.form == LinearForm::kExl3) return codec::decode_weight(m.exl3, w, pool);
  ops::unpack_kn(m.packed.empty() ? m.unpack_source() : m.packed, w);
}

}  // namespace espalier
