#include "codec/quantizer.h"

namespace espalier::codec {

QuantizeOptions quantize_preset(Preset preset) {
  QuantizeOptions options;
  if (preset == Preset::kBest) {
    options.n_cuts = 4;
    options.refit_rounds = 2;
  }
  return options;
}

std::string_view preset_name(Preset preset) {
  return preset == Preset::kFast ? "fast" : "best";
}

std::optional<Preset> preset_from_name(std::string_view name) {
  for (Preset preset : {Preset::kFast, Preset::kBest}) {
    if (name == preset_name(preset)) return preset;
  }
  return std::nullopt;
}

}  // namespace espalier::codec
