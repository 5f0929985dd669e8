// `espalier exl3 decode` and `espalier exl3 encode`: one matrix out of, or into, the packed format.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "apps/espalier/quantizer_flags.h"
#include "codec/quantizer.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "tensor/float_formats.h"

namespace espalier::app {
namespace {

struct DecodeOptions {
  std::string in, name, out;
};

struct EncodeOptions {
  std::string in, weight, hessian, calib, name, out;
  QuantizerFlags quantizer;
  double bits = 3;
  double damping = 0.025;
};

// A two-dimensional f32, f16 or bf16 tensor as floats. `rows` or `columns` < 0: any.
Result<std::vector<float>> read_matrix(const SafetensorsFile& file, const std::string& name, int64_t rows, int64_t columns,
                                       Shape& shape) {
  ASSIGN_OR_RETURN(const ConstView view, file.get(name));
  const bool is_known = view.dtype == DType::kF32 || view.dtype == DType::kF16 || view.dtype == DType::kBF16;
  if (view.shape.size() != 2 || !is_known || (rows >= 0 && view.shape[0] != rows) ||
      (columns >= 0 && view.shape[1] != columns)) {
    const auto wanted = [](int64_t d) { return d >= 0 ? std::to_string(d) : std::string("any"); };
    return data_loss(file.path().string() + ": " + name + ": expected [" + wanted(rows) + ", " + wanted(columns) +
                     "] F32, F16 or BF16, found " + shape_text(view.shape) + " " + std::string(dtype_name(view.dtype)));
  }
  shape = view.shape;
  std::vector<float> out(static_cast<size_t>(view.size()));
  const uint8_t* bytes = static_cast<const uint8_t*>(view.data);
  if (view.dtype == DType::kF32) {
    std::memcpy(out.data(), bytes, out.size() * sizeof(float));
    return out;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof bits);
    out[i] = view.dtype == DType::kF16 ? decode_f16(bits) : decode_bf16(bits);
  }
  return out;
}

// X^T X / rows of calibration inputs, in fp64, rows in order.
std::vector<double> gram(const std::vector<float>& x, int64_t rows, int64_t k, ThreadPool& pool) {
  std::vector<double> h(static_cast<size_t>(k * k));
  pool.parallel_for(k, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double* row = h.data() + i * k;
      for (int64_t r = 0; r < rows; ++r) {
        const double factor = x[static_cast<size_t>(r * k + i)];
        for (int64_t j = 0; j < k; ++j) row[j] += factor * double{x[static_cast<size_t>(r * k + j)]};
      }
      for (int64_t j = 0; j < k; ++j) row[j] /= static_cast<double>(rows);
    }
  });
  return h;
}

Result<codec::Exl3Tensor> load_tensor(const SafetensorsFile& file, const std::string& name) {
  const codec::TensorLookup find = [&file](const std::string& tensor) -> std::optional<ConstView> {
    const TensorEntry* entry = file.find(tensor);
    if (entry == nullptr) return std::nullopt;
    return file.view(*entry);
  };
  if (!codec::is_exl3(find, name)) {
    return not_found(file.path().string() + ": no EXL3 tensor '" + name + "' (expected '" + name +
                     ".trellis'); 'espalier inspect' lists what a model folder holds");
  }
  Result<codec::Exl3Tensor> tensor = codec::load_exl3(name, codec::find_exl3_parts(find, name));
  if (!tensor.ok()) return std::move(tensor).error().with_context(file.path().string());
  return tensor;
}

Result<int> decode(const DecodeOptions& options, CommandContext& context) {
  RETURN_IF_ERROR(check_output(options.out, {options.in}));
  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(options.in));
  ASSIGN_OR_RETURN(const codec::Exl3Tensor tensor, load_tensor(file, options.name));
  std::vector<uint16_t> inner(static_cast<size_t>(tensor.k * tensor.n));
  std::vector<float> weight(inner.size());
  codec::decode_inner_f16(tensor.view().trellis, inner.data());
  codec::decode_weight(tensor.view(), weight.data(), context.pool);
  const Shape shape{tensor.k, tensor.n};
  RETURN_IF_ERROR(write_safetensors(options.out, {{"inner", {inner.data(), DType::kF16, shape}},
                                                  {"weight", {weight.data(), DType::kF32, shape}}}));
  if (context.common.json) {
    print_json(dump_json({{"name", options.name},
                          {"shape", shape},
                          {"bits", tensor.k2 / 2.0},
                          {"codebook", std::string(codec::codebook_name(tensor.codebook))},
                          {"out", options.out}}));
  } else {
    std::printf("%s %s: %s bits, %s -> %s\n", options.name.c_str(), shape_text(shape).c_str(),
                codec::width_text(tensor.k2).c_str(), std::string(codec::codebook_name(tensor.codebook)).c_str(),
                options.out.c_str());
  }
  return 0;
}

Result<int> encode(const EncodeOptions& options, CommandContext& context) {
  RETURN_IF_ERROR(check_output(options.out, {options.in}));
  if (options.name.empty()) return invalid_argument("--name: is empty; expected the linear's name");
  ASSIGN_OR_RETURN(codec::QuantizeOptions quantize, quantizer_options(options.quantizer));
  ASSIGN_OR_RETURN(quantize.k2, codec::width_from_bits(options.bits));
  quantize.seed = context.common.seed;
  quantize.name = options.name;
  quantize.damping = options.damping;

  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(options.in));
  Shape shape;
  ASSIGN_OR_RETURN(const std::vector<float> weight, read_matrix(file, options.weight, -1, -1, shape));
  const int64_t k = shape[0];
  const int64_t n = shape[1];
  std::vector<double> hessian;
  Shape ignored;
  if (!options.hessian.empty()) {
    ASSIGN_OR_RETURN(const std::vector<float> h, read_matrix(file, options.hessian, k, k, ignored));
    hessian.assign(h.begin(), h.end());
  } else if (!options.calib.empty()) {
    ASSIGN_OR_RETURN(const std::vector<float> x, read_matrix(file, options.calib, -1, k, ignored));
    if (ignored[0] == 0) return data_loss(options.in + ": " + options.calib + ": expected calibration rows, found none");
    hessian = gram(x, ignored[0], k, context.pool);
  }

  const auto start = std::chrono::steady_clock::now();
  Result<codec::QuantizedMatrix> result = codec::quantize_matrix(
      weight.data(), k, n, hessian.empty() ? nullptr : hessian.data(), quantize, context.pool);
  if (!result.ok()) return std::move(result).error().with_context(options.in);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::vector<NamedView> parts;
  for (const codec::NamedPart& part : codec::stored_parts(options.name, result->tensor)) parts.push_back({part.name, part.view});
  RETURN_IF_ERROR(write_safetensors(options.out, parts));

  const std::string hessian_use(codec::hessian_use_name(result->hessian));
  Json fallbacks = Json::array();
  for (const codec::Fallback& f : result->fallbacks) {
    fallbacks.push_back({{"reason", f.reason}});
    if (f.count > 0) fallbacks.back()["count"] = f.count;
    if (f.first >= 0) fallbacks.back()["first_index"] = f.first;
  }
  if (context.common.json) {
    print_json(dump_json({{"name", options.name},
                          {"shape", shape},
                          {"bits", options.bits},
                          {"codebook", options.quantizer.codebook},
                          {"preset", options.quantizer.preset},
                          {"true_error", result->true_error},
                          {"relative_mse", result->relative_mse},
                          {"seconds", seconds},
                          {"hessian", hessian_use},
                          {"damping", result->damping},
                          {"fallbacks", fallbacks},
                          {"seed", quantize.seed},
                          {"out", options.out}}));
  } else {
    std::printf("%s %s: %s bits, %s, Hessian %s: true error %.6g, relative mse %.6g, %.2f s -> %s\n", options.name.c_str(),
                shape_text(shape).c_str(), codec::width_text(quantize.k2).c_str(), options.quantizer.codebook.c_str(),
                hessian_use.c_str(), result->true_error, result->relative_mse, seconds, options.out.c_str());
    for (const codec::Fallback& f : result->fallbacks) std::printf("  %s\n", codec::fallback_text(f).c_str());
  }
  return 0;
}

}  // namespace

void add_exl3(CommandTable& table) {
  CLI::App* group = table.add_group("exl3", "Decode or encode one matrix");
  auto decode_options = std::make_shared<DecodeOptions>();
  CLI::App* app = table.add_to(group, "decode", "Write the decoded values and the reconstructed weight of one matrix",
                               [decode_options](CommandContext& context) { return decode(*decode_options, context); });
  app->add_option("in", decode_options->in, "safetensors file")->required();
  app->add_option("--name", decode_options->name, "the matrix P, stored as P.trellis, P.suh, P.svh")->required();
  app->add_option("--out", decode_options->out, "safetensors file to write: inner f16, weight f32, both [in, out]")->required();

  auto encode_options = std::make_shared<EncodeOptions>();
  app = table.add_to(group, "encode", "Quantize one matrix",
                     [encode_options](CommandContext& context) { return encode(*encode_options, context); });
  app->add_option("in", encode_options->in, "safetensors file")->required();
  app->add_option("--weight", encode_options->weight, "tensor [in, out], f32, f16 or bf16")->required();
  CLI::Option* hessian = app->add_option("--hessian", encode_options->hessian, "tensor [in, in], any positive scale");
  app->add_option("--calib", encode_options->calib, "calibration inputs [rows, in] instead of a Hessian")->excludes(hessian);
  app->add_option("--bits", encode_options->bits, "1 to 8; with mul1 also 1.5, 2.5, 3.5")->required();
  app->add_option("--name", encode_options->name, "name of the matrix in the output")->required();
  app->add_option("--out", encode_options->out, "safetensors file to write")->required();
  app->add_option("--damping", encode_options->damping, "added to the diagonal, in units of its mean")->capture_default_str();
  add_quantizer_flags(app, &encode_options->quantizer);
}

}  // namespace espalier::app
