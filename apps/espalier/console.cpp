#include "apps/espalier/console.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <string>

namespace espalier::app {
namespace {

std::atomic<bool> g_interrupted{false};

void on_interrupt(int) {
  if (g_interrupted.exchange(true)) ::_exit(130);
}

std::string duration_text(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  char buffer[32];
  if (s >= 3600) std::snprintf(buffer, sizeof buffer, "%ldh%02ldm", static_cast<long>(s / 3600), static_cast<long>(s / 60 % 60));
  else std::snprintf(buffer, sizeof buffer, "%ld:%02ld", static_cast<long>(s / 60), static_cast<long>(s % 60));
  return buffer;
}

class Bar : public ConsoleProgress {
 public:
  Bar(bool quiet, bool terminal) : quiet_(quiet), terminal_(terminal) {
    struct sigaction action {};
    action.sa_handler = on_interrupt;
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
  }

  void begin(std::string_view phase, int64_t total_units) override {
    std::lock_guard lock(mutex_);
    end_line();
    phase_ = phase;
    total_ = total_units;
    done_ = 0;
    start_ = Clock::now();
    shown_ = start_ - std::chrono::hours(1);
    draw(false);
  }

  void advance(int64_t units, std::string_view detail) override {
    std::lock_guard lock(mutex_);
    done_ += units;
    if (!detail.empty()) detail_ = detail;
    draw(done_ >= total_ && total_ > 0);
  }

  bool is_cancelled() const override { return g_interrupted.load(std::memory_order_relaxed); }

  void finish() override {
    std::lock_guard lock(mutex_);
    end_line();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void end_line() {
    if (line_open_) std::fputc('\n', stderr);
    line_open_ = false;
  }

  void draw(bool last) {
    if (quiet_) return;
    const auto now = Clock::now();
    const auto interval = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(5000);
    if (!last && now - shown_ < interval) return;
    shown_ = now;
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
    std::string text = phase_ + ": " + std::to_string(done_) + "/" + std::to_string(total_);
    char buffer[96];
    if (total_ > 0) {
      const double share = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
      std::snprintf(buffer, sizeof buffer, " (%.0f%%, %.3g/s, ", share * 100, rate);
      text += buffer;
      text += last ? "took " + duration_text(elapsed) + ")"
                   : "ETA " + (rate > 0 ? duration_text(static_cast<double>(total_ - done_) / rate) : std::string("-")) + ")";
      if (terminal_) {
        const auto filled = static_cast<size_t>(share * 24);
        text = "[" + std::string(filled, '#') + std::string(24 - filled, '.') + "] " + text;
      }
    }
    if (!detail_.empty()) text += " " + detail_;
    if (terminal_) {
      std::fprintf(stderr, "\r\033[K%s", text.c_str());
      line_open_ = true;
      if (last) end_line();
    } else {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    std::fflush(stderr);
  }

  const bool quiet_;
  const bool terminal_;
  std::mutex mutex_;
  std::string phase_;
  std::string detail_;
  int64_t total_ = 0;
  int64_t done_ = 0;
  Clock::time_point start_;
  Clock::time_point shown_;
  bool line_open_ = false;
};

class StderrLog : public LogSink {
 public:
  explicit StderrLog(const std::string& level)
      : logger_("espalier", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()) {
    logger_.set_pattern("%H:%M:%S %^%l%$ %v");
    logger_.set_level(spdlog::level::from_str(level));
    set_log_sink(this);
  }
  ~StderrLog() override { set_log_sink(nullptr); }

  void write(LogLevel level, std::string_view message) override {
    static constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                            spdlog::level::warn, spdlog::level::err};
    logger_.log(kLevels[static_cast<int>(level)], "{}", message);
  }

 private:
  spdlog::logger logger_;
};

}  // namespace

std::unique_ptr<ConsoleProgress> make_console_progress(const CommonOptions& common) {
  return std::make_unique<Bar>(common.quiet, ::isatty(STDERR_FILENO) == 1);
}

std::unique_ptr<LogSink> install_console_log(const CommonOptions& common) {
  return std::make_unique<StderrLog>(common.log_level);
}

}  // namespace espalier::app
