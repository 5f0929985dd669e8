#include "stages/quantize/quantize.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "codec/viterbi.h"

namespace espalier {
namespace {

bool is_routed(const MatrixSpec& spec) {
  return spec.expert >= 0;
}

bool is_kept(const QuantizeOptions& options, const MatrixSpec& spec) {
  const auto& kept = options.keep_native;
  return !kept.empty() && std::find(kept.begin(), kept.end(), projection_name(spec)) != kept.end();
}

Status check_width(const char* option, double bits, codec::Codebook codebook) {
  const Result<int> k2 = codec::width_from_bits(bits);
  char found[32];
  std::snprintf(found, sizeof found, "%g", bits);
  if (!k2.ok()) {
    return invalid_argument(std::string(option) + ": expected 1 to 8 bits, or 1.5, 2.5, 3.5, found " + found);
  }
  if (codec::is_searchable_width(*k2, codebook)) return ok_status();
  return invalid_argument(std::string(option) + ": " + found + " bits need the codebook mul1, found " +
                          std::string(codec::codebook_name(codebook)) + "; use --codebook mul1 or a whole number");
}

}  // namespace

Status check_independent(const QuantizeOptions& options) {
  if (options.stream == StreamFrom::kNative && options.encode.w2_input == W2Input::kNative && !options.encode.shared_scales) {
    return ok_status();
  }
  return invalid_argument(
      "--library: expected --stream native, --w2-input native and no --shared-scales: otherwise a matrix depends on the widths of others");
}

Status check_options(const QuantizeOptions& options) {
  const codec::Codebook codebook = options.encode.codec.codebook;
  if (!options.plan || options.bits != 0) RETURN_IF_ERROR(check_width("--bits", options.bits, codebook));
  if (options.dense_bits) RETURN_IF_ERROR(check_width("--dense-bits", *options.dense_bits, codebook));
  if (options.head_bits) RETURN_IF_ERROR(check_width("--head-bits", *options.head_bits, codebook));
  if (options.drafter_bits) RETURN_IF_ERROR(check_width("--drafter-bits", *options.drafter_bits, codebook));
  if (options.library != nullptr) RETURN_IF_ERROR(check_independent(options));
  if (options.draft_stride < 1)
    return invalid_argument("--draft-stride: expected at least 1, found " + std::to_string(options.draft_stride));
  return ok_status();
}

std::vector<MatrixSpec> quantized_matrices(const QuantizeOptions& options, const Config& config,
                                           std::vector<NativeMatrix>* native) {
  std::vector<MatrixSpec> out;
  for (MatrixSpec& spec : all_matrices(config)) {
    if (!spec.is_quantizable) {
      native->push_back({spec.stem, "dimensions " + std::to_string(spec.in) + " x " + std::to_string(spec.out) +
                                        " are not both multiples of 128"});
    } else if (is_kept(options, spec)) {
      native->push_back({spec.stem, projection_name(spec) + " stays native by choice (--keep-native, or the layout)"});
    } else if (width_of(options, spec, config.n_layers) == kNativeWidth) {
      native->push_back({spec.stem, "native by the plan"});
    } else {
      out.push_back(std::move(spec));
    }
  }
  return out;
}

Status check_widths(const QuantizeOptions& options, const Config& config) {
  std::set<std::string> projections;
  std::map<std::string, bool> whole;  // wo_a, or an expert -> its first matrix is native
  for (const MatrixSpec& spec : all_matrices(config)) {
    projections.insert(projection_name(spec));
    if (!spec.is_quantizable) continue;
    const int k2 = width_of(options, spec, config.n_layers);
    if (k2 < 0) {
      return failed_precondition("the plan gives no width for '" + spec.stem + "'; add it, or give --bits for what it leaves out");
    }
    if (k2 != kNativeWidth && !codec::is_searchable_width(k2, options.encode.codec.codebook)) {
      return failed_precondition("'" + spec.stem + "': width " + width_text_of(k2) + " does not exist for codebook " +
                                 std::string(codec::codebook_name(options.encode.codec.codebook)));
    }
    if (spec.kind != MatrixKind::kWoA && !is_routed(spec)) continue;
    const std::string group = is_routed(spec) ? spec.stem.substr(0, spec.stem.rfind('.')) : module_stem(spec);
    const auto [it, is_first] = whole.emplace(group, k2 == kNativeWidth);
    if (!is_first && it->second != (k2 == kNativeWidth)) {
      return failed_precondition("'" + group + "': expected all of its matrices native or none");
    }
  }
  for (const std::string& name : options.keep_native) {
    if (projections.count(name) == 0) {
      return invalid_argument("--keep-native: expected a projection such as attn.wkv, found '" + name + "'");
    }
  }
  return ok_status();
}

int width_of(const QuantizeOptions& options, const MatrixSpec& spec, int n_layers) {
  if (is_kept(options, spec)) return kNativeWidth;
  if (options.plan) {
    if (const std::optional<int> k2 = options.plan->width_of(spec, n_layers)) return *k2;
    if (options.bits == 0) return -1;
  }
  double bits = options.bits;
  if (spec.kind == MatrixKind::kHead)
    bits = options.head_bits.value_or(bits);
  else if (spec.kind == MatrixKind::kMainProj || spec.block >= n_layers)
    bits = options.drafter_bits.value_or(bits);
  else if (!is_routed(spec))
    bits = options.dense_bits.value_or(bits);
  return static_cast<int>(2 * bits);
}

}  // namespace espalier
