#include "model/routing_statistics.h"

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "base/hash.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "model/pack_plan.h"

namespace espalier {
namespace {

// A measured frequency is a ratio of counts kept in fp32.
constexpr double kRounding = 1e-3;
constexpr char kDrafterPrefix[] = "drafter_";
constexpr double kMostTokens = 1e15;  // exact in fp64
constexpr double kMostEnergy = 1e300;

template <typename T>
constexpr DType kTypeOf = DType::kF32;
template <>
constexpr DType kTypeOf<double> = DType::kF64;
template <>
constexpr DType kTypeOf<int64_t> = DType::kI64;

class Arrays {
 public:
  Arrays(const SafetensorsFile& file, const std::string& kind)
      : file_(file), where_(kind + " '" + file.path().string() + "'") {}

  const std::string& where() const { return where_; }

  Status schema(const char* expected) const {
    const auto it = file_.metadata().find("schema");
    const std::string found = it == file_.metadata().end() ? "" : it->second;
    return found == expected ? ok_status()
                             : data_loss(where_ + ": expected schema " + expected + ", found '" + found + "'");
  }

  // A metadata entry that is a JSON list.
  Result<Json> list(const char* key) const {
    const auto it = file_.metadata().find(key);
    if (it == file_.metadata().end()) return data_loss(where_ + ": metadata '" + key + "' is missing");
    ASSIGN_OR_RETURN(Json value, parse_json(it->second, where_ + ": metadata '" + key + "'"));
    if (!value.is_array() || value.empty())
      return data_loss(where_ + ": metadata '" + key + "': expected a list, not empty");
    return value;
  }

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }

  template <typename T>
  Status take(const std::string& name, const Shape& shape, bool is_required, std::vector<T>& out) const {
    const TensorEntry* entry = file_.find(name);
    if (entry == nullptr) return is_required ? data_loss(where_ + ": array '" + name + "' is missing") : ok_status();
    if (entry->dtype != kTypeOf<T> || entry->shape != shape) {
      return data_loss(where_ + ": array '" + name + "': expected " + std::string(dtype_name(kTypeOf<T>)) + " " +
                       shape_text(shape) + ", found " + std::string(dtype_name(entry->dtype)) + " " +
                       shape_text(entry->shape));
    }
    out.resize(static_cast<size_t>(entry->size_bytes() / sizeof(T)));
    if (!out.empty()) std::memcpy(out.data(), file_.view(*entry).data, out.size() * sizeof(T));
    return ok_status();
  }

  template <typename T>
  Status range(const std::string& name, const std::vector<T>& values, double high, bool may_be_missing) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<double>(values[i]);
      if (may_be_missing && std::isnan(value)) continue;
      if (!(value >= 0) || !(value <= high)) {
        char text[96];
        std::snprintf(text, sizeof text, ": expected 0 to %g, found %g at index %zu", high, value, i);
        return data_loss(where_ + ": array '" + name + "'" + text);
      }
    }
    return ok_status();
  }

 private:
  const SafetensorsFile& file_;
  std::string where_;
};

Status check_reads(const Arrays& arrays, const char* name, const std::vector<float>& reads, const Config& config) {
  RETURN_IF_ERROR(arrays.range(name, reads, 1 + kRounding, false));
  const auto n_experts = static_cast<size_t>(config.n_experts);
  for (size_t begin = 0; begin < reads.size(); begin += n_experts) {
    double sum = 0;
    for (size_t e = 0; e < n_experts; ++e) sum += static_cast<double>(reads[begin + e]);
    if (sum > static_cast<double>(config.n_active) * (1 + kRounding)) {
      return data_loss(arrays.where() + ": array '" + name + "': layer " + std::to_string(begin / n_experts) +
                       ": expected at most " + std::to_string(config.n_active) + " reads per token, found " +
                       std::to_string(sum));
    }
  }
  return ok_status();
}

// One entry per array of RoutingCounts: its name, its values, whether it has an axis of experts, and the largest value.
template <typename Counts, typename Visit>
Status for_each_array(Counts& c, const Visit& visit) {
  RETURN_IF_ERROR(visit("tokens", c.tokens, true, kMostTokens));
  RETURN_IF_ERROR(visit("weight", c.weight, true, kMostEnergy));
  RETURN_IF_ERROR(visit("weight_square", c.weight_square, true, kMostEnergy));
  RETURN_IF_ERROR(visit("energy", c.energy, true, kMostEnergy));
  RETURN_IF_ERROR(visit("positions", c.positions, false, kMostTokens));
  return visit("output_energy", c.output_energy, false, kMostEnergy);
}

Result<std::optional<RoutingCounts>> read_counts(const Arrays& arrays, const std::string& prefix, int64_t n_blocks,
                                                 int64_t n_experts, int64_t n_domains) {
  std::optional<RoutingCounts> out;
  if (!arrays.has(prefix + "tokens")) return out;
  out.emplace();
  RETURN_IF_ERROR(for_each_array(*out, [&](const char* name, auto& values, bool by_expert, double high) {
    const Shape shape = by_expert ? Shape{n_blocks, n_experts, n_domains} : Shape{n_blocks, n_domains};
    RETURN_IF_ERROR(arrays.take(prefix + name, shape, true, values));
    return arrays.range(prefix + name, values, high, false);
  }));
  return out;
}

void add_counts(const RoutingCounts& counts, const std::string& prefix, int64_t n_blocks, int64_t n_experts,
                int64_t n_domains, std::vector<NamedView>& tensors) {
  const Status status = for_each_array(counts, [&](const char* name, const auto& values, bool by_expert, double) {
    using T = typename std::decay_t<decltype(values)>::value_type;
    const Shape shape = by_expert ? Shape{n_blocks, n_experts, n_domains} : Shape{n_blocks, n_domains};
    tensors.push_back({prefix + name, {values.data(), kTypeOf<T>, shape}});
    return ok_status();
  });
  CHECK(status.ok());
}

std::map<std::string, std::string> with_schema(std::map<std::string, std::string> metadata, const char* schema) {
  metadata["schema"] = schema;
  return metadata;
}

}  // namespace

Result<RoutingStatistics> read_routing_statistics(const std::filesystem::path& path, const Config& config) {
  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
  const Arrays arrays(file, "routing statistics");
  RETURN_IF_ERROR(arrays.schema(kRoutingSchema));
  RoutingStatistics out;
  ASSIGN_OR_RETURN(const Json domains, arrays.list("domains"));
  std::set<std::string> names;
  for (const Json& name : domains) {
    if (!name.is_string() || !names.insert(name.get<std::string>()).second) {
      return data_loss(arrays.where() + ": metadata 'domains': expected names, each once, found " +
                       dump_json(name).substr(0, 60));
    }
    out.domains.push_back(name.get<std::string>());
  }
  const Shape experts = {config.n_layers, config.n_experts};
  RETURN_IF_ERROR(arrays.take("share", {config.n_layers, config.n_experts, static_cast<int64_t>(out.domains.size())},
                              true, out.share));
  RETURN_IF_ERROR(arrays.take("reads_routed", experts, true, out.reads_routed));
  RETURN_IF_ERROR(arrays.take("reads_served", experts, false, out.reads_served));
  RETURN_IF_ERROR(arrays.range("share", out.share, 1e6, false));
  RETURN_IF_ERROR(check_reads(arrays, "reads_routed", out.reads_routed, config));
  RETURN_IF_ERROR(check_reads(arrays, "reads_served", out.reads_served, config));
  const auto n_domains = static_cast<int64_t>(out.domains.size());
  ASSIGN_OR_RETURN(out.counts, read_counts(arrays, "", config.n_layers, config.n_experts, n_domains));
  ASSIGN_OR_RETURN(out.drafter_counts, read_counts(arrays, kDrafterPrefix, config.drafter.n_stages,
                                                   config.drafter.n_experts, n_domains));
  out.metadata = file.metadata();
  ASSIGN_OR_RETURN(out.sha256, sha256_file_hex(path));
  return out;
}

Result<MatrixErrors> read_matrix_errors(const std::filesystem::path& path, const Config& config) {
  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
  const Arrays arrays(file, "matrix errors");
  RETURN_IF_ERROR(arrays.schema(kErrorsSchema));
  MatrixErrors out;
  ASSIGN_OR_RETURN(const Json widths, arrays.list("widths"));
  for (const Json& k2 : widths) {
    const bool is_width = k2.is_number_unsigned() && k2.get<uint64_t>() <= 16 && width_char(k2.get<int>()) != '?' &&
                          k2.get<int>() != kNativeWidth;
    if (!is_width || (!out.widths.empty() && k2.get<int>() <= out.widths.back())) {
      return data_loss(arrays.where() + ": metadata 'widths': expected ascending widths in half bits, found " +
                       dump_json(k2).substr(0, 60));
    }
    out.widths.push_back(k2.get<int>());
  }
  RETURN_IF_ERROR(arrays.take("error", {config.n_layers, config.n_experts, 3, static_cast<int64_t>(out.widths.size())},
                              true, out.error));
  RETURN_IF_ERROR(arrays.range("error", out.error, 1e6, true));
  out.metadata = file.metadata();
  ASSIGN_OR_RETURN(out.sha256, sha256_file_hex(path));
  return out;
}

Status write_routing_statistics(const std::filesystem::path& path, const RoutingStatistics& s, const Config& config) {
  auto metadata = with_schema(s.metadata, kRoutingSchema);
  metadata["domains"] = dump_json(Json(s.domains));
  const Shape experts = {config.n_layers, config.n_experts};
  const auto n_domains = static_cast<int64_t>(s.domains.size());
  std::vector<NamedView> tensors;  // eight-byte types first: every array is aligned
  if (s.counts) add_counts(*s.counts, "", config.n_layers, config.n_experts, n_domains, tensors);
  if (s.drafter_counts) {
    add_counts(*s.drafter_counts, kDrafterPrefix, config.drafter.n_stages, config.drafter.n_experts, n_domains,
               tensors);
  }
  tensors.push_back({"share", {s.share.data(), DType::kF32, {config.n_layers, config.n_experts, n_domains}}});
  tensors.push_back({"reads_routed", {s.reads_routed.data(), DType::kF32, experts}});
  if (!s.reads_served.empty()) tensors.push_back({"reads_served", {s.reads_served.data(), DType::kF32, experts}});
  return write_safetensors(path, tensors, metadata);
}

Status write_matrix_errors(const std::filesystem::path& path, const MatrixErrors& e, const Config& config) {
  auto metadata = with_schema(e.metadata, kErrorsSchema);
  metadata["widths"] = dump_json(Json(e.widths));
  return write_safetensors(
      path,
      {{"error",
        {e.error.data(), DType::kF32, {config.n_layers, config.n_experts, 3, static_cast<int64_t>(e.widths.size())}}}},
      metadata);
}

}  // namespace espalier
