// The tiny checkpoint of tests/golden/model and calibration rows for it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/rng.h"
#include "model/dataset.h"
#include "model/forward.h"
#include "model/weights.h"

namespace espalier::test {

inline std::string tiny_dir() {
  return std::string(ESPALIER_SOURCE_DIR) + "/tests/golden/model/tiny-a";
}

// Rows of the given lengths with ids below the chat and image tokens; domains alternate between "a" and "b".
inline std::vector<DatasetRow> random_token_rows(const std::vector<int>& lengths, const std::string& name) {
  std::vector<DatasetRow> rows;
  for (size_t r = 0; r < lengths.size(); ++r) {
    const CounterRng rng(11, name + std::to_string(r));
    DatasetRow row;
    row.id = name + "-" + std::to_string(r);
    row.domain = r % 2 == 0 ? "a" : "b";
    row.mode = "raw";
    row.source = "counter";
    row.licence = "CC0-1.0";
    for (int t = 0; t < lengths[r]; ++t) {
      row.ids.push_back(t == 0 ? 0 : 3 + static_cast<int32_t>(rng.bits(static_cast<uint64_t>(t)) % 480));
      row.role_mask.push_back(3);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

inline const WeightLoader& tiny_loader() {
  static const WeightLoader loader = [] {
    Result<WeightLoader> r = WeightLoader::open(tiny_dir());
    EXPECT_TRUE(r.ok()) << r.status().message();
    return std::move(r).value();
  }();
  return loader;
}

inline CallContext tiny_context(ThreadPool& pool, Numerics numerics = Numerics::kKvq) {
  const WeightLoader& loader = tiny_loader();
  return CallContext{loader.config(), loader.engram_hashes(), loader.engram_token_map(), numerics, pool, nullptr};
}

}  // namespace espalier::test
