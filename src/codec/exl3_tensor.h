// One EXL3 linear: W = diag(suh) * Hk * inner * Hn * diag(svh), y = x W, with W [k, n] = [in features, out features].
//
// Reading checks everything that bytes from outside can get wrong (shapes, dtypes, markers, finite scales) and names the
// tensor; nothing is guessed. The width comes from the trellis shape, the codebook from the marker tensors.
// Source: docs/formats/exl3.md.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/trellis.h"
#include "tensor/view.h"

namespace espalier::codec {

// A checked tensor that someone else owns (mapped file or Exl3Tensor). Cheap to copy.
struct Exl3View {
  TrellisView trellis;
  const uint16_t* suh = nullptr;  // [k]:f16 input sign and scale
  const uint16_t* svh = nullptr;  // [n]:f16 output sign and scale

  int64_t k() const { return trellis.k; }
  int64_t n() const { return trellis.n; }
};

struct Exl3Tensor {
  std::vector<uint16_t> trellis;  // [k/16, n/16, 8*k2]
  std::vector<uint16_t> suh;      // [k]:f16
  std::vector<uint16_t> svh;      // [n]:f16
  Codebook codebook = Codebook::kMul1;
  int k2 = 0;                     // width in half bits: 6 = 3 bits, 5 = 2.5 bits
  int64_t k = 0;
  int64_t n = 0;

  Exl3View view() const { return {{trellis.data(), k, n, k2, codebook}, suh.data(), svh.data()}; }
};

// The stored tensors of the linear P, as found in a file: P.trellis, P.suh, P.svh, P.mul1, P.mcg, and the old P.su, P.sv.
struct Exl3Parts {
  std::optional<ConstView> trellis, suh, svh, mul1, mcg, su, sv;
};

using TensorLookup = std::function<std::optional<ConstView>(const std::string& name)>;

// True when `find` has the trellis of `prefix` (the rest may still be wrong or missing).
bool is_exl3(const TensorLookup& find, std::string_view prefix);
Exl3Parts find_exl3_parts(const TensorLookup& find, std::string_view prefix);

// Checks the parts and looks at them in place; the parts' memory must outlive the view.
// Errors: data_loss naming `name`, the tensor, expected and found: missing parts, wrong dtype or shape, dimensions that are
// not multiples of 128, unknown width, unknown multiplier, both markers, half-bit width without mul1, non-finite scale (with
// its index); unimplemented for packed signs (su/sv) and data at an odd byte address, which load_exl3 reads.
Result<Exl3View> view_exl3(std::string_view name, const Exl3Parts& parts);
// The same checks, copied into an owning tensor; expands the old packed signs su/sv to +-1.
Result<Exl3Tensor> load_exl3(std::string_view name, const Exl3Parts& parts);

// weight [k, n]:f32 in the original basis. Computed in fp64 with fixed-order butterflies and rounded once.
// Threads: over 128-row blocks; the result does not depend on their number.
void decode_weight(const Exl3View& view, float* weight, ThreadPool& pool);

// The stored form: trellis I16 [k/16, n/16, 8*k2], suh/svh F16, and the marker (I32, shape []) unless 3inst. The views point
// into `tensor` (and static storage), which must outlive them.
struct NamedPart {
  std::string name;
  ConstView view;
};
std::vector<NamedPart> stored_parts(std::string_view prefix, const Exl3Tensor& tensor);

}  // namespace espalier::codec
