// The V4.1 network behind the engine's LanguageModel interface, and the one call that loads a model folder into an Engine.
//
// A session holds the sequence's caches and, when drafting, the drafter's rings. The drafter sees accepted positions only: the
// taps of a fed row wait until the next feed or draft, when it is known how many rows were kept. On a GPU the same, with everything in
// device memory; in exact products the results are the same.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/thread_pool.h"
#include "model/numerics.h"
#include "model/products.h"
#include "runtime/engine.h"
#include "runtime/session.h"

namespace espalier {

struct NetworkOptions {
  Numerics numerics = Numerics::kKvq;
  std::string engram_dir;  // another folder that holds the Engram shards; empty: none
  Products products = Products::kExact;
  std::optional<int> device = std::nullopt;  // a GPU's index; absent: the CPU
};

// Loads the weights of `dir`. The pool must outlive the model. Errors: as Model::load; with a device as cuda::DeviceModel::load.
Result<std::shared_ptr<LanguageModel>> load_network(const std::string& dir, const NetworkOptions& options, ThreadPool& pool);

// Loads weights and tokenizer.json of `dir` into an engine. Errors: as load_network, Tokenizer::open and Engine::create.
Result<std::unique_ptr<Engine>> load_engine(const std::string& dir, const NetworkOptions& network, const EngineOptions& options,
                                            ThreadPool& pool);

}  // namespace espalier
