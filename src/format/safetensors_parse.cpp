// The header of a safetensors file, read as a stream of JSON events: a pack's headers are tens of megabytes, and a tree of them
// would cost more than everything that is done with it.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "format/json_events.h"
#include "format/safetensors.h"

namespace espalier {
namespace {

constexpr uint64_t kMaxHeaderBytes = uint64_t{1} << 30;
constexpr size_t kMaxDimensions = 16;
constexpr const char* kEntryKeys = "expected exactly the keys dtype, shape and data_offsets";

// Every event is right in one place only, so the reader is a position and refuses everything else.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(std::string file, uint64_t data_start, uint64_t data_size, SafetensorsHeader* header)
      : file_(std::move(file)), data_start_(data_start), data_size_(data_size), header_(header) {}

  const std::string& error() const { return error_; }

  bool null() override { return refuse(); }
  bool boolean(bool) override { return refuse(); }
  bool number_integer(number_integer_t) override { return refuse(); }
  bool number_float(number_float_t, const string_t&) override { return refuse(); }
  bool binary(binary_t&) override { return refuse(); }

  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::kShape) {
      if (n_dims_ == kMaxDimensions) return refuse_shape();
      dims_[n_dims_++] = value;
      return true;
    }
    if (at_ == At::kOffsets) {
      if (n_offsets_ == 2) return refuse_offsets();
      offsets_[n_offsets_++] = value;
      return true;
    }
    return refuse();
  }

  bool string(string_t& text) override {
    if (at_ == At::kMetadataValue) {
      header_->metadata.emplace(key_, text);
      at_ = At::kMetadata;
      return true;
    }
    if (at_ != At::kDtypeValue) return refuse();
    const auto known = dtype_from_name(text);
    if (!known) return fail(where() + ": unknown dtype '" + text.substr(0, 80) + "'");
    dtype_ = *known;
    at_ = At::kEntry;
    return true;
  }

  bool start_object(std::size_t) override {
    switch (at_) {
      case At::kStart:
        at_ = At::kRoot;
        return true;
      case At::kEntryValue:
        at_ = At::kEntry;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        n_dims_ = n_offsets_ = 0;
        return true;
      case At::kMetadataObject:
        at_ = At::kMetadata;
        return true;
      default:
        return refuse();
    }
  }

  bool end_object() override {
    if (at_ == At::kEntry) {
      at_ = At::kRoot;
      return finish_entry();
    }
    at_ = at_ == At::kMetadata ? At::kRoot : At::kDone;
    return true;
  }

  bool start_array(std::size_t) override {
    if (at_ == At::kShapeValue) {
      at_ = At::kShape;
      return true;
    }
    if (at_ == At::kOffsetsValue) {
      at_ = At::kOffsets;
      return true;
    }
    return refuse();
  }

  bool end_array() override {
    if (at_ == At::kOffsets && n_offsets_ != 2) return refuse_offsets();
    at_ = At::kEntry;
    return true;
  }

  bool key(string_t& name) override {
    if (at_ == At::kRoot) {
      if (name == "__metadata__") {
        if (has_metadata_) return twice(name);
        has_metadata_ = true;
        at_ = At::kMetadataObject;
        return true;
      }
      if (name.empty()) return fail(file_ + ": a tensor has an empty name");
      name_.swap(name);
      at_ = At::kEntryValue;
      return true;
    }
    if (at_ == At::kMetadata) {
      if (header_->metadata.count(name) != 0) return twice(name);
      key_.swap(name);
      at_ = At::kMetadataValue;
      return true;
    }
    bool* met = name == "dtype" ? &has_dtype_ : name == "shape" ? &has_shape_ : name == "data_offsets" ? &has_offsets_ : nullptr;
    if (met == nullptr) return fail(where() + ": " + kEntryKeys);
    if (*met) return twice(name);
    *met = true;
    at_ = met == &has_dtype_ ? At::kDtypeValue : met == &has_shape_ ? At::kShapeValue : At::kOffsetsValue;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    return fail(file_ + ": header: " + json_syntax_error(position, e.what()));
  }

 private:
  enum class At {
    kStart, kRoot, kDone,
    kMetadataObject, kMetadata, kMetadataValue,
    kEntryValue, kEntry, kDtypeValue, kShapeValue, kShape, kOffsetsValue, kOffsets,
  };

  std::string where() const { return file_ + ": tensor '" + name_ + "'"; }

  bool fail(const std::string& message) {
    if (error_.empty()) error_ = message;
    return false;
  }
  bool twice(const std::string& key) {
    return fail(file_ + ": header: key '" + key.substr(0, 80) + "' appears twice in one object");
  }
  bool refuse_shape() {
    return fail(where() + ": shape is not an array of at most " + std::to_string(kMaxDimensions) + " dimensions");
  }
  bool refuse_offsets() { return fail(where() + ": data_offsets is not a pair"); }

  // A value that does not belong where it stands.
  bool refuse() {
    switch (at_) {
      case At::kMetadataObject:
        return fail(file_ + ": __metadata__ is not an object");
      case At::kMetadataValue:
        return fail(file_ + ": __metadata__ '" + key_ + "' is not a string");
      case At::kEntryValue:
        return fail(where() + ": expected an object with dtype, shape and data_offsets");
      case At::kDtypeValue:
        return fail(where() + ": dtype is not a string");
      case At::kShapeValue:
        return refuse_shape();
      case At::kOffsetsValue:
        return refuse_offsets();
      case At::kShape:
        return fail(where() + ": shape: expected a non-negative integer");
      case At::kOffsets:
        return fail(where() + ": data_offsets: expected a non-negative integer");
      default:
        return fail(file_ + ": header is not an object");
    }
  }

  bool finish_entry() {
    if (!has_dtype_ || !has_shape_ || !has_offsets_) return fail(where() + ": " + kEntryKeys);
    uint64_t bytes = static_cast<uint64_t>(dtype_size_bytes(dtype_));
    bool overflow = false;
    Shape shape(n_dims_);
    for (size_t i = 0; i < n_dims_; ++i) {
      const auto product = checked_mul(bytes, dims_[i]);
      overflow = overflow || !product || dims_[i] > static_cast<uint64_t>(INT64_MAX);
      bytes = product.value_or(0);
      shape[i] = static_cast<int64_t>(dims_[i]);
    }
    if (overflow) return fail(where() + ": shape " + shape_text(shape) + " does not fit 64 bits");
    const auto [begin, end] = offsets_;
    if (begin > end || end > data_size_) {
      return fail(where() + ": data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
                  "] do not lie in the " + std::to_string(data_size_) +
                  " data bytes of the file; it is truncated or damaged, fetch it again");
    }
    if (end - begin != bytes) {
      return fail(where() + ": " + std::string(dtype_name(dtype_)) + " " + shape_text(shape) + " needs " +
                  std::to_string(bytes) + " bytes, data_offsets hold " + std::to_string(end - begin));
    }
    header_->entries.push_back({name_, dtype_, std::move(shape), data_start_ + begin, data_start_ + end});
    return true;
  }

  const std::string file_;
  const uint64_t data_start_, data_size_;
  SafetensorsHeader* header_;
  At at_ = At::kStart;
  std::string name_, key_, error_;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  DType dtype_ = DType::kF32;
  std::array<uint64_t, kMaxDimensions> dims_{};
  std::array<uint64_t, 2> offsets_{};
  size_t n_dims_ = 0, n_offsets_ = 0;
};

Status check_names(const SafetensorsHeader& header, const std::string& file) {
  std::vector<std::string_view> names;
  names.reserve(header.entries.size());
  for (const TensorEntry& e : header.entries) names.push_back(e.name);
  if (!std::is_sorted(names.begin(), names.end())) std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return ok_status();
  return data_loss(file + ": header: key '" + std::string(twice->substr(0, 80)) + "' appears twice in one object");
}

// The data must be covered exactly: no gap, no overlap, nothing left at the end.
Status check_coverage(const SafetensorsHeader& header, uint64_t data_start, uint64_t file_size, const std::string& file) {
  uint64_t at = data_start;
  for (const TensorEntry& e : header.entries) {
    if (e.begin != at) {
      return data_loss(file + ": tensor '" + e.name + "' starts at byte " + std::to_string(e.begin) + ", expected " +
                       std::to_string(at) + (e.begin < at ? " (overlaps its predecessor)" : " (gap before it)"));
    }
    at = e.end;
  }
  if (at != file_size) {
    return data_loss(file + ": " + std::to_string(file_size) + " bytes on disk, the header describes " +
                     std::to_string(at) + "; the file is padded or damaged");
  }
  return ok_status();
}

bool is_before(const TensorEntry& a, const TensorEntry& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; }

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::span<const uint8_t> file_start, uint64_t file_size,
                                                   std::string_view what) {
  const std::string file = "'" + std::string(what) + "'";
  if (file_size < 8 || file_start.size() < 8) {
    return data_loss(file + ": " + std::to_string(file_size) + " bytes, a safetensors file has at least 8");
  }
  uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) header_size = header_size << 8 | file_start[static_cast<size_t>(i)];
  if (header_size > kMaxHeaderBytes || header_size > file_size - 8 || header_size > file_start.size() - 8) {
    return data_loss(file + ": header of " + std::to_string(header_size) + " bytes does not fit the file of " +
                     std::to_string(file_size) + " bytes; it is truncated or not a safetensors file");
  }
  const uint64_t data_start = 8 + header_size;
  const std::string_view text(reinterpret_cast<const char*>(file_start.data()) + 8, header_size);
  if (text.empty() || text.front() != '{') return data_loss(file + ": header does not start with '{'");

  SafetensorsHeader header;
  HeaderReader reader(file, data_start, file_size - data_start, &header);
  if (!Json::sax_parse(text.data(), text.data() + text.size(), &reader)) return data_loss(reader.error());
  RETURN_IF_ERROR(check_names(header, file));
  if (!std::is_sorted(header.entries.begin(), header.entries.end(), is_before)) {
    std::stable_sort(header.entries.begin(), header.entries.end(), is_before);
  }
  RETURN_IF_ERROR(check_coverage(header, data_start, file_size, file));
  return header;
}

}  // namespace espalier
