#include "codec/hadamard.h"

#include "base/check.h"

namespace espalier::codec {
namespace {

constexpr int kSize = 128;

template <typename T>
void butterflies(T* v) {
  for (int h = 1; h < kSize; h *= 2) {
    for (int i = 0; i < kSize; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        const T a = v[j];
        const T b = v[j + h];
        v[j] = a + b;
        v[j + h] = a - b;
      }
    }
  }
}

template <typename T>
void along_rows(T* a, int64_t rows, int64_t cols, T scale) {
  CHECK(cols % kSize == 0) << "Hadamard over " << cols << " columns";
  for (int64_t i = 0; i < rows * cols; i += kSize) {
    butterflies(a + i);
    for (int j = 0; j < kSize; ++j) a[i + j] *= scale;
  }
}

}  // namespace

void hadamard128_sum(float* v) { butterflies(v); }
void hadamard128_sum(double* v) { butterflies(v); }

void hadamard_along_rows(float* a, int64_t rows, int64_t cols) { along_rows(a, rows, cols, kHadamardScale); }
void hadamard_along_rows(double* a, int64_t rows, int64_t cols) { along_rows(a, rows, cols, kHadamardScaleF64); }

void hadamard_along_columns(double* a, int64_t rows, int64_t cols) {
  CHECK(rows % kSize == 0) << "Hadamard over " << rows << " rows";
  for (int64_t block = 0; block < rows; block += kSize) {
    for (int h = 1; h < kSize; h *= 2) {  // the same butterflies, a whole row at a time
      for (int i = 0; i < kSize; i += 2 * h) {
        for (int r = i; r < i + h; ++r) {
          double* top = a + (block + r) * cols;
          double* bottom = top + h * cols;
          for (int64_t c = 0; c < cols; ++c) {
            const double x = top[c];
            const double y = bottom[c];
            top[c] = x + y;
            bottom[c] = x - y;
          }
        }
      }
    }
    for (int64_t i = block * cols; i < (block + kSize) * cols; ++i) a[i] *= kHadamardScaleF64;
  }
}

}  // namespace espalier::codec
