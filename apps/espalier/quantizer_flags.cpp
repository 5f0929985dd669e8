#include "apps/espalier/quantizer_flags.h"

#include <CLI/CLI.hpp>
#include <cmath>

namespace espalier::app {

void add_quantizer_flags(CLI::App* app, QuantizerFlags* flags) {
  app->add_option("--preset", flags->preset, "Effort: fast or best; the flags below override it")
      ->check(CLI::IsMember({"fast", "best"}))
      ->capture_default_str();
  app->add_option("--codebook", flags->codebook, "mul1, mcg or 3inst")
      ->check(CLI::IsMember({"mul1", "mcg", "3inst"}))
      ->capture_default_str();
  app->add_option("--row-exponents", flags->row_exponents,
                  "A B: input scales ~ row rms^A * Hessian^-B; default 0.75 0.125")
      ->expected(2)
      ->check(CLI::Range(-2.0, 2.0));
  app->add_option("--column-exponent", flags->column_exponent,
                  "Output scales ~ column rms^C; default 0.75, with --one-sided 0.5")
      ->check(CLI::Range(0.0, 2.0));
  app->add_flag("--no-blocks", flags->no_blocks, "Do not bring every 128 rows and columns to one rms");
  app->add_flag("--one-sided", flags->one_sided, "Error feedback along the inputs only");
  app->add_option("--spread-tiles", flags->spread_tiles, "Search the spread on so many sample tiles; 0: from the table")
      ->check(CLI::Range(0, 4096));
  app->add_option("--cuts", flags->n_cuts, "Places to close each ring at: 1, 2 or 4")->check(CLI::IsMember({1, 2, 4}));
  app->add_option("--descent-sweeps", flags->descent_sweeps,
                  "Sweeps of coordinate descent after error feedback; each costs two searches per tile")
      ->check(CLI::Range(0, 100));
  app->add_option("--refit-rounds", flags->refit_rounds, "Rounds of scale refit after the search")
      ->check(CLI::Range(0, 100));
  app->add_option("--draws", flags->n_draws, "Draws of signs; the one with the least error is kept")
      ->check(CLI::Range(1, 1000));
}

Result<codec::QuantizeOptions> quantizer_options(const QuantizerFlags& flags) {
  const std::optional<codec::Preset> preset = codec::preset_from_name(flags.preset);
  if (!preset) return invalid_argument("--preset: expected fast or best, found '" + flags.preset + "'");
  const std::optional<codec::Codebook> codebook = codec::codebook_from_name(flags.codebook);
  if (!codebook) return invalid_argument("--codebook: expected mul1, mcg or 3inst, found '" + flags.codebook + "'");
  codec::QuantizeOptions options = codec::quantize_preset(*preset);
  options.codebook = *codebook;
  if (flags.row_exponents.size() == 2) {
    options.scale_rule.row_weight = flags.row_exponents[0];
    options.scale_rule.row_hessian = flags.row_exponents[1];
  }
  options.scale_rule.column_weight = flags.column_exponent.value_or(options.scale_rule.column_weight);
  for (const double e :
       {options.scale_rule.row_weight, options.scale_rule.row_hessian, options.scale_rule.column_weight}) {
    if (std::isnan(e)) return invalid_argument("--row-exponents, --column-exponent: expected numbers, found NaN");
  }
  options.scale_rule.normalise_blocks = !flags.no_blocks;
  options.two_sided = !flags.one_sided;
  options.spread_tiles = flags.spread_tiles.value_or(options.spread_tiles);
  options.n_cuts = flags.n_cuts.value_or(options.n_cuts);
  options.descent_sweeps = flags.descent_sweeps.value_or(options.descent_sweeps);
  options.refit_rounds = flags.refit_rounds.value_or(options.refit_rounds);
  options.n_draws = flags.n_draws.value_or(options.n_draws);
  return options;
}

}  // namespace espalier::app
