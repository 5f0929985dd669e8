#include "model/config.h"

#include <algorithm>

#include "base/file.h"

namespace espalier {
namespace {

bool contains(const std::vector<int>& list, int layer) {
  return std::find(list.begin(), list.end(), layer) != list.end();
}

int largest_not_above(const std::vector<int>& list, int layer) {
  int best = -1;
  for (int l : list) {
    if (l <= layer) best = std::max(best, l);
  }
  return best;
}

}  // namespace

bool Config::is_kv_source(int layer) const {
  return contains(kv_sources, layer);
}
bool Config::is_index_source(int layer) const {
  return contains(index_sources, layer);
}

int Config::kv_source_of(int layer) const {
  return layer >= n_layers || ratio(layer) == 0 ? -1 : largest_not_above(kv_sources, layer);
}

int Config::index_source_of(int layer) const {
  return layer >= n_layers || ratio(layer) == 0 ? -1 : largest_not_above(index_sources, layer);
}

bool Config::applies_candidates(int layer) const {
  return candidate_source >= 0 && layer > candidate_source && is_index_source(layer);
}

int Config::engram_slot(int layer) const {
  const auto it = std::find(engram.layers.begin(), engram.layers.end(), layer);
  return it == engram.layers.end() ? -1 : static_cast<int>(it - engram.layers.begin());
}

Result<Config> load_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path, 64u << 20));
  return parse_config(text, path);
}

}  // namespace espalier
