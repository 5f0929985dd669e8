#include "tensor/view.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace espalier {

int64_t n_elements(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

std::string shape_text(const Shape& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

Tensor::Tensor(DType dtype, Shape shape) : dtype_(dtype), shape_(std::move(shape)) {
  const size_t bytes = static_cast<size_t>(size_bytes());
  const size_t padded = (bytes + 127) / 64 * 64;  // room for one vector read past the end
  void* p = std::aligned_alloc(64, padded);
  if (p == nullptr) throw std::bad_alloc();
  std::memset(p, 0, padded);
  data_.reset(p);
}

Tensor::Tensor(const Tensor& other) : dtype_(other.dtype_), shape_(other.shape_) {
  if (other.empty()) return;
  *this = Tensor(other.dtype_, other.shape_);
  std::memcpy(data(), other.data(), static_cast<size_t>(size_bytes()));
}

Tensor& Tensor::operator=(const Tensor& other) {
  if (this != &other) *this = Tensor(other);
  return *this;
}

void Tensor::Free::operator()(void* p) const { std::free(p); }

}  // namespace espalier
