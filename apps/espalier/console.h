// What the program shows on stderr: log lines and progress. A terminal gets a bar with rate and ETA that redraws in place; a
// pipe gets a plain line every few seconds. Ctrl-C asks the running command to stop cleanly; a second one ends the process.
#pragma once

#include <memory>

#include "apps/espalier/command.h"
#include "base/log.h"

namespace espalier::app {

class ConsoleProgress : public Progress {
 public:
  ~ConsoleProgress() override = default;
  // Ends the current line; harmless when nothing was shown.
  virtual void finish() = 0;
};

std::unique_ptr<ConsoleProgress> make_console_progress(const CommonOptions& common);

// Installs a log sink on stderr at the chosen level for the life of the returned object.
std::unique_ptr<LogSink> install_console_log(const CommonOptions& common);

}  // namespace espalier::app
