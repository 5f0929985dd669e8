// module: model
// mutations: 1500
// Any bytes given as routing statistics, matrix errors or block slopes end in tables or a message; tables that are read
// are written and read back as the same tables. The first byte chooses the reader.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/check.h"
#include "model/block_slopes.h"
#include "model/routing_statistics.h"

namespace {

namespace fs = std::filesystem;

struct Place {
  Place() : path(fs::temp_directory_path() / ("espalier_tables_fuzz_" + std::to_string(::getpid()))) {
    config.n_layers = 2;
    config.n_experts = 3;
    config.n_active = 2;
  }
  ~Place() {
    std::error_code ec;
    fs::remove(path, ec);
  }
  fs::path path;
  espalier::Config config;
};

// Bytes, because a matrix error may be not-a-number.
bool is_same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Place place;
  if (size == 0) return 0;
  std::ofstream(place.path, std::ios::binary)
      .write(reinterpret_cast<const char*>(data) + 1, static_cast<std::streamsize>(size - 1));
  const espalier::Config& config = place.config;
  switch (data[0] % 3) {
    case 0: {
      const auto s = espalier::read_routing_statistics(place.path, config);
      if (!s.ok()) return 0;
      CHECK(espalier::write_routing_statistics(place.path, *s, config).ok());
      const auto again = espalier::read_routing_statistics(place.path, config);
      CHECK(again.ok()) << again.status().message();
      CHECK(again->domains == s->domains && is_same(again->share, s->share) &&
            is_same(again->reads_routed, s->reads_routed) && is_same(again->reads_served, s->reads_served));
      CHECK(again->counts.has_value() == s->counts.has_value());
      CHECK(!s->counts || (again->counts->tokens == s->counts->tokens && again->counts->energy == s->counts->energy));
      return 0;
    }
    case 1: {
      const auto e = espalier::read_matrix_errors(place.path, config);
      if (!e.ok()) return 0;
      CHECK(espalier::write_matrix_errors(place.path, *e, config).ok());
      const auto again = espalier::read_matrix_errors(place.path, config);
      CHECK(again.ok()) << again.status().message();
      CHECK(again->widths == e->widths && is_same(again->error, e->error));
      return 0;
    }
    default: {
      const auto b = espalier::read_block_slopes(place.path, config);
      if (!b.ok()) return 0;
      CHECK(espalier::write_block_slopes(place.path, *b, config).ok());
      const auto again = espalier::read_block_slopes(place.path, config);
      CHECK(again.ok()) << again.status().message();
      CHECK(again->domains == b->domains && again->domain == b->domain && is_same(again->positions, b->positions) &&
            is_same(again->slope, b->slope));
      return 0;
    }
  }
}
