#include "base/log.h"

#include <atomic>

namespace espalier {
namespace {
std::atomic<LogSink*> g_sink{nullptr};
}

void set_log_sink(LogSink* sink) { g_sink.store(sink, std::memory_order_release); }

void log(LogLevel level, std::string_view message) {
  if (LogSink* sink = g_sink.load(std::memory_order_acquire)) sink->write(level, message);
}

}  // namespace espalier
