#include "apps/espalier/encode_flags.h"

#include <CLI/CLI.hpp>
#include <cmath>

namespace espalier::app {

void add_encode_flags(CLI::App* app, EncodeFlags* flags) {
  app->add_option("--dense-bits", flags->dense_bits,
                  "Width of attention, shared experts, compressor, indexer, Engram projection");
  app->add_option("--head-bits", flags->head_bits, "Width of the head");
  app->add_option("--drafter-bits", flags->drafter_bits, "Width of every matrix of the drafter");
  add_quantizer_flags(app, &flags->quantizer);
  app->add_flag("--shared-scales", flags->shared_scales, "One input scale for w1 and w3 of an expert");
  app->add_option("--output-metrics", flags->output_metrics,
                  "Weigh outputs of routed experts by what the model makes of them; none: all alike")
      ->check(CLI::IsMember({"model", "none"}));
  app->add_option("--numerics", flags->numerics, "Numerics of the calibration forward")
      ->check(CLI::IsMember({"full", "kvq"}));
  app->add_option("--damping", flags->damping, "Added to a Hessian's diagonal, in units of its mean; default: by the tokens behind it")
      ->check(CLI::Range(0.0, 1.0));
  app->add_option("--routing-exponent", flags->routing_exponent, "p: a routed token weighs g^p in its expert's Hessian")
      ->check(CLI::Range(0.0, 4.0));
  app->add_option("--prior", flags->prior_w13,
                  "Tokens that the layer-wide prior of w1 and w3 weighs; default d_model / 4")
      ->check(CLI::Range(0.0, 1e9));
  app->add_option("--prior-w2", flags->prior_w2, "The same for w2; default d_ff / 4")
      ->check(CLI::Range(0.0, 1e9));
  app->add_option("--prior-sample", flags->prior_sample, "Tokens that every expert runs for w2's prior")
      ->check(CLI::PositiveNumber);
  app->add_option("--w2-input", flags->w2_input, "w1 and w3 in front of w2's Hessian: quantized or native")
      ->check(CLI::IsMember({"quantized", "native"}));
  app->add_option("--draft-stride", flags->draft_stride, "One draft call per so many calibration positions")
      ->check(CLI::PositiveNumber);
  app->add_option("--stream", flags->stream,
                  "Layers that the calibration rows run through: as just encoded, or native (then no matrix depends on other widths)")
      ->check(CLI::IsMember({"quantized", "native"}));
}

Status take_encode_flags(const EncodeFlags& flags, const CommonOptions& common, QuantizeOptions* options) {
  QuantizeOptions& q = *options;
  q.dense_bits = flags.dense_bits;
  q.head_bits = flags.head_bits;
  q.drafter_bits = flags.drafter_bits;
  q.numerics = *numerics_from_name(flags.numerics);
  q.draft_stride = flags.draft_stride;
  ASSIGN_OR_RETURN(q.encode.codec, quantizer_options(flags.quantizer));
  q.encode.preset = *codec::preset_from_name(flags.quantizer.preset);
  q.encode.codec.seed = common.seed;
  q.encode.shared_scales = flags.shared_scales;
  q.encode.output_metrics = flags.output_metrics == "model";
  for (const double x : {flags.damping, flags.prior_w13, flags.prior_w2, flags.routing_exponent}) {
    if (std::isnan(x)) return invalid_argument("--damping, --prior, --prior-w2, --routing-exponent: expected numbers, found NaN");
  }
  if (flags.damping >= 0) q.encode.damping = flags.damping;
  q.encode.routing_exponent = flags.routing_exponent;
  if (flags.prior_w13 >= 0) q.encode.prior_w13 = flags.prior_w13;
  if (flags.prior_w2 >= 0) q.encode.prior_w2 = flags.prior_w2;
  q.encode.prior_sample = flags.prior_sample;
  q.encode.w2_input = flags.w2_input == "native" ? W2Input::kNative : W2Input::kQuantized;
  q.stream = flags.stream == "native" ? StreamFrom::kNative : StreamFrom::kQuantized;
  return ok_status();
}

}  // namespace espalier::app
