// Status and Result<T>: how a function says that the outside world was wrong.
//
// Few codes, named for the caller's next step; the message answers what, where, expected, found, what to try.
// Context is added while unwinding: `return std::move(status).with_context("load: layer 7")`.
// Result<T> mirrors std::expected's member names so that it can be replaced by it later. Neither throws.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/check.h"  // CHECK: reading the value of a failed result is a programmer error

namespace espalier {

enum class StatusCode {
  kOk,
  kInvalidArgument,     // the caller's request is wrong: flags, request fields, shapes asked for
  kNotFound,            // a file, tensor, model or route does not exist
  kDataLoss,            // bytes from outside are not what their format demands
  kFailedPrecondition,  // inputs are valid but do not fit together (hash mismatch, wrong plan, existing output)
  kResourceExhausted,   // memory, disk, context length
  kUnavailable,         // device or peer not there
  kDeadlineExceeded,
  kCancelled,
  kUnimplemented,  // a valid request that this build or version does not serve
  kInternal,       // a bug of ours
};

// Lower-case name with underscores, for example "data_loss".
std::string_view status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // "context: message"; an ok status stays ok.
  Status with_context(std::string_view context) && {
    if (!ok()) message_ = std::string(context) + ": " + message_;
    return std::move(*this);
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status ok_status() { return Status(); }
inline Status invalid_argument(std::string m) { return {StatusCode::kInvalidArgument, std::move(m)}; }
inline Status not_found(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status data_loss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
inline Status failed_precondition(std::string m) { return {StatusCode::kFailedPrecondition, std::move(m)}; }
inline Status resource_exhausted(std::string m) { return {StatusCode::kResourceExhausted, std::move(m)}; }
inline Status unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
inline Status cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
inline Status unimplemented(std::string m) { return {StatusCode::kUnimplemented, std::move(m)}; }
inline Status internal_error(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

// A value or the status that explains its absence.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit by design
  Result(Status status) : v_(std::in_place_index<1>, std::move(status)) {  // NOLINT: implicit by design
    CHECK(!std::get<1>(v_).ok()) << "a Result needs a value or an error";
  }

  bool has_value() const { return v_.index() == 0; }
  bool ok() const { return has_value(); }
  explicit operator bool() const { return has_value(); }

  T& value() & {
    CHECK(has_value()) << error().message();
    return std::get<0>(v_);
  }
  const T& value() const& {
    CHECK(has_value()) << error().message();
    return std::get<0>(v_);
  }
  T&& value() && {
    CHECK(has_value()) << error().message();
    return std::get<0>(std::move(v_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Status& error() const& { return std::get<1>(v_); }
  Status&& error() && { return std::get<1>(std::move(v_)); }
  // Ok when there is a value.
  Status status() const { return has_value() ? Status() : error(); }

 private:
  std::variant<T, Status> v_;
};

}  // namespace espalier

#define ESPALIER_CONCAT_INNER(a, b) a##b
#define ESPALIER_CONCAT(a, b) ESPALIER_CONCAT_INNER(a, b)

// Returns the status of `expr` from the enclosing function unless it is ok.
#define RETURN_IF_ERROR(expr)                       \
  do {                                              \
    ::espalier::Status status_macro_ = (expr);      \
    if (!status_macro_.ok()) return status_macro_;  \
  } while (false)

// ASSIGN_OR_RETURN(auto x, f()): x = the value, or returns f's status.
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL(ESPALIER_CONCAT(result_macro_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)      \
  auto tmp = (expr);                               \
  if (!tmp.ok()) return std::move(tmp).error();    \
  lhs = std::move(tmp).value()
