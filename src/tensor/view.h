// Shapes, views and owning host buffers. Views are contiguous, row-major (last dimension fastest) and do not own.
// They print as `name[dim, dim]:dtype` in messages. 64-bit sizes throughout.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "tensor/dtype.h"

namespace espalier {

using Shape = std::vector<int64_t>;

// Product of the dimensions; 1 for a scalar. Callers validate outside shapes first (format/ does).
int64_t n_elements(const Shape& shape);
// "[4, 5120]"
std::string shape_text(const Shape& shape);

template <typename T>
struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::kF32; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::kF64; };
template <> struct DTypeOf<int8_t> { static constexpr DType value = DType::kI8; };
template <> struct DTypeOf<uint8_t> { static constexpr DType value = DType::kU8; };
template <> struct DTypeOf<int16_t> { static constexpr DType value = DType::kI16; };
template <> struct DTypeOf<uint16_t> { static constexpr DType value = DType::kU16; };
template <> struct DTypeOf<int32_t> { static constexpr DType value = DType::kI32; };
template <> struct DTypeOf<int64_t> { static constexpr DType value = DType::kI64; };

// A typed or untyped look at elements owned by someone else.
struct ConstView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;

  int64_t size() const { return n_elements(shape); }
  int64_t size_bytes() const { return size() * dtype_size_bytes(dtype); }
  std::span<const uint8_t> bytes() const {
    return {static_cast<const uint8_t*>(data), static_cast<size_t>(size_bytes())};
  }
  // T must match the dtype's width: float for kF32, uint16_t for any 16-bit type, uint8_t for any 8-bit type, …
  template <typename T>
  std::span<const T> as() const {
    CHECK(sizeof(T) == static_cast<size_t>(dtype_size_bytes(dtype))) << "view of " << dtype_name(dtype);
    return {static_cast<const T*>(data), static_cast<size_t>(size())};
  }
};

// Owning, zero-initialised, 64-byte aligned host tensor. Movable, copyable (deep).
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape);
  Tensor(const Tensor& other);
  Tensor& operator=(const Tensor& other);
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;

  template <typename T>
  static Tensor from(Shape shape, std::span<const T> values);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t dim(size_t i) const { return shape_.at(i); }
  int64_t size() const { return n_elements(shape_); }
  int64_t size_bytes() const { return size() * dtype_size_bytes(dtype_); }
  bool empty() const { return data_ == nullptr; }

  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  template <typename T>
  std::span<T> as() {
    CHECK(sizeof(T) == static_cast<size_t>(dtype_size_bytes(dtype_))) << "tensor of " << dtype_name(dtype_);
    return {static_cast<T*>(data()), static_cast<size_t>(size())};
  }
  template <typename T>
  std::span<const T> as() const {
    CHECK(sizeof(T) == static_cast<size_t>(dtype_size_bytes(dtype_))) << "tensor of " << dtype_name(dtype_);
    return {static_cast<const T*>(data()), static_cast<size_t>(size())};
  }
  float* f32() { return as<float>().data(); }
  const float* f32() const { return as<float>().data(); }
  ConstView view() const { return {data(), dtype_, shape_}; }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  DType dtype_ = DType::kF32;
  Shape shape_;
  std::unique_ptr<void, Free> data_;
};

template <typename T>
Tensor Tensor::from(Shape shape, std::span<const T> values) {
  Tensor t(DTypeOf<T>::value, std::move(shape));
  CHECK(t.size() == static_cast<int64_t>(values.size())) << "value count does not fit the shape";
  std::span<T> out = t.as<T>();
  for (size_t i = 0; i < values.size(); ++i) out[i] = values[i];
  return t;
}

}  // namespace espalier
