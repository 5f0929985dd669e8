// The subset of regular expressions that Oniguruma (Ruby syntax) and PCRE2 read alike.
#include <algorithm>
#include <array>

#include "text/split_pattern.h"

namespace espalier {
namespace {

constexpr std::string_view kPlainEscapes = "sSdDrntf";
constexpr std::array<std::string_view, 37> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co", "Cn", "Cs"};

bool is_alnum(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

class Checker {
 public:
  explicit Checker(std::string_view regex) : regex_(regex) {}

  Status run() {
    while (at_ < regex_.size()) {
      const char c = regex_[at_];
      if (c == '\\') {
        RETURN_IF_ERROR(escape());
      } else if (c == '[') {
        RETURN_IF_ERROR(character_class());
      } else if (c == '(') {
        RETURN_IF_ERROR(group());
      } else if (c == '{') {
        RETURN_IF_ERROR(repeat());
      } else if (c == '^' || c == '$') {
        return refuse("the anchor '" + std::string(1, c) + "'");
      } else {
        ++at_;
      }
    }
    return ok_status();
  }

 private:
  Status refuse(const std::string& what) const {
    return unimplemented(
        "split pattern: " + what + " at byte " + std::to_string(at_) +
        " is not supported; expected general categories, \\s, \\d, classes, groups, look-around and quantifiers");
  }

  Status escape() {
    if (at_ + 1 >= regex_.size()) return data_loss("split pattern: ends in a backslash");
    const char c = regex_[at_ + 1];
    if (c == 'p' || c == 'P') {
      const size_t close = regex_.find('}', at_);
      if (regex_.substr(at_ + 2, 1) != "{" || close == std::string_view::npos)
        return refuse("a property without braces");
      std::string_view name = regex_.substr(at_ + 3, close - at_ - 3);
      if (name.substr(0, 1) == "^") name.remove_prefix(1);
      if (std::find(kCategories.begin(), kCategories.end(), name) == kCategories.end()) {
        return refuse("the property '" + std::string(name.substr(0, 40)) + "'");
      }
      at_ = close + 1;
      return ok_status();
    }
    if (is_alnum(c) && kPlainEscapes.find(c) == std::string_view::npos)
      return refuse(std::string("the escape '\\") + c + "'");
    if (static_cast<unsigned char>(c) >= 0x80) return refuse("an escape of a character beyond ASCII");
    at_ += 2;
    return ok_status();
  }

  Status character_class() {
    const size_t start = at_++;
    if (at_ < regex_.size() && regex_[at_] == '^') ++at_;
    if (at_ < regex_.size() && regex_[at_] == ']') return refuse("a class that starts with ']'");
    while (at_ < regex_.size() && regex_[at_] != ']') {
      if (regex_[at_] == '[') return refuse("a class within a class");
      if (regex_.substr(at_, 2) == "&&") return refuse("an intersection of classes");
      if (regex_[at_] == '\\') {
        RETURN_IF_ERROR(escape());
      } else {
        ++at_;
      }
    }
    if (at_ >= regex_.size())
      return data_loss("split pattern: the class at byte " + std::to_string(start) + " is not closed");
    ++at_;
    return ok_status();
  }

  Status group() {
    if (regex_.substr(at_, 2) == "(*") return refuse("a verb");
    if (regex_.substr(at_, 2) != "(?") {
      ++at_;
      return ok_status();
    }
    for (const std::string_view known : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (regex_.substr(at_, known.size()) == known) {
        at_ += known.size();
        return ok_status();
      }
    }
    return refuse("the group '" + std::string(regex_.substr(at_, 4)) + "'");
  }

  // {n}, {n,}, {n,m}; "{,m}" and a possessive "}+" mean different things to the two engines.
  Status repeat() {
    size_t i = at_ + 1;
    const size_t digits = i;
    while (i < regex_.size() && regex_[i] >= '0' && regex_[i] <= '9') ++i;
    const bool has_minimum = i > digits;
    if (i < regex_.size() && regex_[i] == ',') ++i;
    while (i < regex_.size() && regex_[i] >= '0' && regex_[i] <= '9') ++i;
    if (!has_minimum || i >= regex_.size() || regex_[i] != '}') return refuse("a brace that is no {n,m}");
    if (i + 1 < regex_.size() && regex_[i + 1] == '+') return refuse("'{n,m}+'");
    at_ = i + 1;
    return ok_status();
  }

  std::string_view regex_;
  size_t at_ = 0;
};

}  // namespace

Status check_split_syntax(std::string_view regex) {
  return Checker(regex).run();
}

}  // namespace espalier
