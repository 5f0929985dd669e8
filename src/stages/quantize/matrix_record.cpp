#include "stages/quantize/matrix_record.h"

#include <nlohmann/json.hpp>

namespace espalier {

Json record_json(const MatrixRecord& r) {
  Json j = {{"name", r.stem},
            {"in", r.in},
            {"out", r.out},
            {"k2", r.k2},
            {"tokens", r.tokens},
            {"dropped_tokens", r.dropped_tokens},
            {"effective_tokens", r.effective_tokens},
            {"weight_sum", r.weight_sum},
            {"diagonal", {r.diagonal_mean, r.diagonal_min, r.diagonal_max}},
            {"prior_fraction", r.prior_fraction},
            {"hessian", r.hessian},
            {"damping", r.damping},
            {"errors", {r.true_error, r.relative_mse, r.weighted_error}},
            {"sha256", r.sha256},
            {"fallbacks", Json::array()}};
  for (const codec::Fallback& f : r.fallbacks) j["fallbacks"].push_back({f.reason, f.count, f.first});
  return j;
}

MatrixRecord record_of(const Json& j) {
  MatrixRecord r;
  r.stem = j.at("name").get<std::string>();
  r.in = j.at("in").get<int64_t>();
  r.out = j.at("out").get<int64_t>();
  r.k2 = j.at("k2").get<int>();
  r.tokens = j.at("tokens").get<int64_t>();
  r.dropped_tokens = j.at("dropped_tokens").get<int64_t>();
  r.effective_tokens = j.at("effective_tokens").get<double>();
  r.weight_sum = j.at("weight_sum").get<double>();
  r.diagonal_mean = j.at("diagonal").at(0).get<double>();
  r.diagonal_min = j.at("diagonal").at(1).get<double>();
  r.diagonal_max = j.at("diagonal").at(2).get<double>();
  r.prior_fraction = j.at("prior_fraction").get<double>();
  r.hessian = j.at("hessian").get<std::string>();
  r.damping = j.at("damping").get<double>();
  r.true_error = j.at("errors").at(0).get<double>();
  r.relative_mse = j.at("errors").at(1).get<double>();
  r.weighted_error = j.at("errors").at(2).get<double>();
  r.sha256 = j.at("sha256").get<std::string>();
  for (const Json& f : j.at("fallbacks")) {
    r.fallbacks.push_back({f.at(0).get<std::string>(), f.at(1).get<int64_t>(), f.at(2).get<int64_t>()});
  }
  return r;
}

}  // namespace espalier
