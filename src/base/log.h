// Where the library's messages go: a sink that the program provides. The library itself never prints.
// Threads: log() may be called from any thread; a sink must be thread-safe. The default sink drops everything.
#pragma once

#include <string_view>

namespace espalier {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

class LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void write(LogLevel level, std::string_view message) = 0;
};

// Installs `sink` for the process (nullptr: drop). The caller keeps ownership and must outlive all logging.
void set_log_sink(LogSink* sink);
void log(LogLevel level, std::string_view message);

}  // namespace espalier
