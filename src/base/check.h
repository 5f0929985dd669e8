// CHECK(cond) << why: a programmer error stops the process with file, line and the streamed reason.
// DCHECK: the same in debug builds only. Neither is reachable from outside bytes: those become a Status.
#pragma once

#include <sstream>

namespace espalier::detail {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct CheckVoidify {  // gives both branches of the ternary in CHECK the type void
  void operator&(std::ostream&) {}
};

}  // namespace espalier::detail

#define CHECK(cond)           \
  (__builtin_expect(!!(cond), 1)) ? (void)0 : ::espalier::detail::CheckVoidify() & \
      ::espalier::detail::CheckFailure(__FILE__, __LINE__, #cond).stream()

#ifdef NDEBUG
#define DCHECK(cond) CHECK(true || (cond))
#else
#define DCHECK(cond) CHECK(cond)
#endif
