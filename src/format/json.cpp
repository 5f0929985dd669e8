#include "format/json.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "base/file.h"
#include "format/json_events.h"

namespace espalier {
namespace {

constexpr size_t kMaxDepth = 64;

// Builds the value through SAX events so that duplicate keys and depth are seen before a tree exists.
class StrictBuilder : public nlohmann::json_sax<Json> {
 public:
  StrictBuilder(Json& root, std::string_view what, const JsonTable* table) : root_(root), what_(what), table_(table) {}

  bool null() override { return put(Json(nullptr)); }
  bool boolean(bool v) override { return put(Json(v)); }
  bool number_integer(number_integer_t v) override { return put(Json(v)); }
  bool number_unsigned(number_unsigned_t v) override { return put(Json(v)); }
  bool number_float(number_float_t v, const string_t& text) override {
    if (!std::isfinite(v)) return fail("number '" + text.substr(0, 40) + "' does not fit a double");
    return put(Json(v));
  }
  bool string(string_t& v) override {
    if (!in_table_) return put(Json(std::move(v)));
    table_->entry(key_, v);
    return true;
  }
  bool binary(binary_t&) override { return fail("binary values are not JSON"); }

  bool start_object(std::size_t) override {
    const bool is_table = table_ != nullptr && stack_.size() == 1 && root_.is_object() && key_ == table_->key;
    if (!open(Json::object())) return false;
    in_table_ = is_table;
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (in_table_) {
      key_.swap(name);
      return true;
    }
    if (!is_new_key(name)) return fail("key '" + name.substr(0, 80) + "' appears twice in one object");
    key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    return fail(json_syntax_error(position, e.what()));
  }

  const std::string& error() const { return error_; }

 private:
  bool fail(const std::string& message) {
    if (error_.empty()) error_ = std::string(what_) + ": " + message;
    return false;
  }

  // Small objects (a tensor of a header: three keys) are searched in place; only larger ones are worth a set.
  bool is_new_key(const std::string& name) {
    constexpr size_t kSmall = 8;
    const Json::object_t& object = stack_.back()->get_ref<const Json::object_t&>();
    std::unordered_set<std::string>& keys = keys_[stack_.size() - 1];
    if (object.size() < kSmall) {
      return std::none_of(object.begin(), object.end(), [&](const auto& item) { return item.first == name; });
    }
    if (object.size() == kSmall) {
      keys.clear();
      for (const auto& item : object) keys.insert(item.first);
    }
    return keys.insert(name).second;
  }

  Json* place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    // The key is new (checked in key()), so append without ordered_json's linear search. Its members are copied when it grows
    // (their keys are const), so it grows in large steps.
    auto& members = static_cast<Json::object_t::Container&>(parent.get_ref<Json::object_t&>());
    if (members.size() == members.capacity() && members.size() >= 16) members.reserve(8 * members.size());
    members.emplace_back(std::move(key_), std::move(value));
    return &members.back().second;
  }

  bool put(Json value) {
    if (in_table_) return fail_in_table(dump_json(value).substr(0, 120));
    place(std::move(value));
    return true;
  }

  bool fail_in_table(const std::string& found) {
    return fail(table_->item + " '" + key_.substr(0, 200) + "': expected " + table_->expected + ", found " + found);
  }

  bool open(Json value) {
    if (in_table_) return fail_in_table(value.is_array() ? "an array" : "an object");
    if (stack_.size() >= kMaxDepth) return fail("nested deeper than " + std::to_string(kMaxDepth) + " levels");
    stack_.push_back(place(std::move(value)));
    if (keys_.size() < stack_.size()) keys_.emplace_back();
    return true;
  }

  bool close() {
    in_table_ = false;
    stack_.pop_back();
    return true;
  }

  Json& root_;
  std::string_view what_;
  const JsonTable* table_;
  bool in_table_ = false;
  std::vector<Json*> stack_;
  std::vector<std::unordered_set<std::string>> keys_;  // by depth, of the object that is open there
  std::string key_;
  std::string error_;
};

Result<Json> parse_strictly(std::string_view text, std::string_view what, const JsonTable* table) {
  Json root;
  StrictBuilder builder(root, what, table);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return data_loss(builder.error().empty() ? std::string(what) + ": not valid JSON" : builder.error());
  }
  return root;
}

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view what) { return parse_strictly(text, what, nullptr); }

Result<Json> parse_json_with_table(std::string_view text, std::string_view what, const JsonTable& table) {
  return parse_strictly(text, what, &table);
}

std::string json_syntax_error(std::size_t position, std::string_view detail) {
  if (const size_t colon = detail.rfind(": "); colon != std::string_view::npos) detail = detail.substr(colon + 2);
  return "not valid JSON at byte " + std::to_string(position) + " (" + std::string(detail.substr(0, 120)) + ")";
}

Result<Json> read_json_file(const std::filesystem::path& path, uint64_t limit_bytes) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path, limit_bytes));
  return parse_json(text, "'" + path.string() + "'");
}

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace espalier
