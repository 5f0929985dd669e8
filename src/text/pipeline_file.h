// The steps around the BPE model in a tokenizer.json: normalizer, pre-tokenizer, post-processor, decoder.
#pragma once

#include <string>

#include "base/status.h"
#include "format/json.h"
#include "text/tokenizer_file.h"

namespace espalier {

// Fills file.splits and file.template_*; file.ids must be complete. `root` is the document's object.
// Errors: data_loss, unimplemented.
Status read_pipeline(const Json& root, const std::string& name, TokenizerFile& file);

}  // namespace espalier
