#include "codec/viterbi_cost.h"
#include "codec/viterbi_steps_impl.h"

namespace espalier::codec {
namespace {

struct U16x1 {
  using T = uint16_t;
  using C = int16_t;
  using V = uint16_t;
  static constexpr int kLanes = 1;
  static V load(const T* p) { return *p; }
  static void store(T* p, V v) { *p = v; }
  static C load_code(const C* p) { return *p; }
  static V broadcast(T x) { return x; }
  static C splat_code(C x) { return x; }
  static V add(V a, V b) { return saturating_add(a, b); }
  static V subtract(V a, V b) { return static_cast<V>(a - b); }
  static V min(V a, V b) { return b < a ? b : a; }
  static V min_elsewhere(V a, V b) { return min(a, b); }
  template <CostRule kRule>
  static V error(C code, C w) {
    return integer_error(kRule, code, w);
  }
  template <int kInBits>
  static void order(const V* results, V* ordered) {
    for (int i = 0; i < 1 << kInBits; ++i) ordered[i] = results[i];
  }
};

struct F32x1 {
  using T = float;
  using C = float;
  using V = float;
  static constexpr int kLanes = 1;
  static V load(const T* p) { return *p; }
  static void store(T* p, V v) { *p = v; }
  static C load_code(const C* p) { return *p; }
  static V broadcast(T x) { return x; }
  static C splat_code(C x) { return x; }
  static V add(V a, V b) { return a + b; }
  static V min(V a, V b) { return b < a ? b : a; }
  static V min_elsewhere(V a, V b) { return min(a, b); }
  template <CostRule kRule>
  static V error(C code, C w) {
    return float_error(code, w);
  }
  template <int kInBits>
  static void order(const V* results, V* ordered) {
    for (int i = 0; i < 1 << kInBits; ++i) ordered[i] = results[i];
  }
};

}  // namespace

const StepKernels& step_kernels_reference() {
  static const StepKernels kernels = make_step_kernels<U16x1, F32x1>();
  return kernels;
}

}  // namespace espalier::codec
