"""Configuration and parameter list of the V4.1 network (model.md sections 1.2 and 2.3 to 2.4).

`Config.from_json` reads the released nested layout; `parameters(cfg)` lists every text tensor with shape,
stored format and initialisation.  Routed experts of a layer are one stacked tensor here
(`...ffn.experts.w1` [E, d_ff, d_model]); all other names are the released ones.
"""
import json
import math
from dataclasses import dataclass, field


@dataclass
class Config:
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: dict
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: list
    kv_source_layer_ids: list
    index_source_layer_ids: list
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: list
    engram_num_embeddings: list
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: list
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    text: dict = field(default_factory=dict, repr=False)

    @staticmethod
    def from_json(path):
        with open(path) as handle:
            root = json.load(handle)
        return Config.from_text(root["text_config"])

    @staticmethod
    def from_text(text):
        names = [n for n in Config.__dataclass_fields__ if n != "text"]
        missing = [n for n in names if n not in text]
        if missing:
            raise ValueError(f"text_config lacks {', '.join(missing)}")
        return Config(**{n: text[n] for n in names}, text=dict(text))

    def owner(self, layer, sources):
        """Largest source id <= layer."""
        return max(s for s in sources if s <= layer)

    def engram_columns(self):
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def rope_frequencies(self, compressed):
        """The qk_rope_head_dim/2 angular frequencies of section 3.5 as Python floats."""
        n = self.qk_rope_head_dim
        base = self.compress_rope_theta if compressed else self.rope_theta
        plain = [base ** (-2 * i / n) for i in range(n // 2)]
        if not compressed:
            return plain
        s = self.rope_scaling

        def corr(turns):
            return n * math.log(s["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(base))

        low = max(math.floor(corr(s["beta_fast"])), 0)
        high = min(math.ceil(corr(s["beta_slow"])), n - 1)
        width = (high - low) or 0.001
        out = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / width, 0.0), 1.0)
            out.append(f / s["factor"] * ramp + f * (1 - ramp))
        return out


@dataclass
class Parameter:
    """shape; stored: fp8 | mxfp4 | rows | bf16 | f32; init: ('normal', std) | ('const', value) | name of a rule."""
    shape: tuple
    stored: str
    init: tuple


def _block(cfg, p, n_experts, out_gain):
    d, f, h, hd = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_attention_heads, cfg.head_dim
    hc = cfg.hc_mult
    group_in = h * hd // cfg.o_groups
    o_in = cfg.o_groups * cfg.o_lora_rank

    def linear(out, inner, stored="fp8", gain=1.0):
        return Parameter((out, inner), stored, ("normal", gain * inner ** -0.5))

    def norm(n):
        return Parameter((n,), "bf16", ("const", 1.0))

    out = {
        f"{p}.attn_norm.weight": norm(d), f"{p}.ffn_norm.weight": norm(d),
        f"{p}.attn.attn_sink": Parameter((h,), "f32", ("const", 0.0)),
        f"{p}.attn.wq_a.weight": linear(cfg.q_lora_rank, d), f"{p}.attn.q_norm.weight": norm(cfg.q_lora_rank),
        f"{p}.attn.wq_b.weight": linear(h * hd, cfg.q_lora_rank), f"{p}.attn.wkv.weight": linear(hd, d),
        f"{p}.attn.kv_norm.weight": norm(hd),
        f"{p}.attn.wo_a.weight": linear(o_in, group_in), f"{p}.attn.wo_b.weight": linear(d, o_in, gain=out_gain),
        f"{p}.ffn.gate.weight": linear(n_experts, d, "bf16"),
        f"{p}.ffn.gate.bias": Parameter((n_experts,), "f32", ("const", 0.0)),
        f"{p}.ffn.shared_experts.w1.weight": linear(f, d), f"{p}.ffn.shared_experts.w3.weight": linear(f, d),
        f"{p}.ffn.shared_experts.w2.weight": linear(d, f, gain=out_gain),
        f"{p}.ffn.experts.w1": Parameter((n_experts, f, d), "mxfp4", ("normal", d ** -0.5)),
        f"{p}.ffn.experts.w3": Parameter((n_experts, f, d), "mxfp4", ("normal", d ** -0.5)),
        f"{p}.ffn.experts.w2": Parameter((n_experts, d, f), "mxfp4", ("normal", out_gain * f ** -0.5)),
    }
    for sub in ("attn", "ffn"):
        out[f"{p}.hc_{sub}_fn"] = Parameter(((2 + hc) * hc, hc * d), "f32", ("normal", (hc * d) ** -0.5))
        out[f"{p}.hc_{sub}_base"] = Parameter(((2 + hc) * hc,), "f32", ("hc_base",))
        out[f"{p}.hc_{sub}_scale"] = Parameter((3,), "f32", ("const", 0.05))
    return out


def parameters(cfg):
    """Ordered dict of every text and drafter parameter."""
    d, hd, v = cfg.hidden_size, cfg.head_dim, cfg.vocab_size
    n_layers = cfg.num_hidden_layers
    gain = (2 * n_layers) ** -0.5
    out = {"embed.weight": Parameter((v, d), "bf16", ("normal", 0.5))}
    for layer in range(n_layers):
        p = f"layers.{layer}"
        out.update(_block(cfg, p, cfg.n_routed_experts, gain))
        if layer in cfg.kv_source_layer_ids:
            out[f"{p}.attn.compressor.wkv.weight"] = Parameter((hd, d), "bf16", ("normal", d ** -0.5))
            if cfg.compress_ratios[layer] > 1:
                out[f"{p}.attn.compressor.wgate.weight"] = Parameter((hd, d), "bf16", ("normal", 0.3 * d ** -0.5))
            out[f"{p}.attn.compressor.norm.weight"] = Parameter((hd,), "bf16", ("const", 1.0))
            out[f"{p}.attn.indexer.wk.weight"] = Parameter((cfg.index_head_dim, hd), "bf16", ("normal", hd ** -0.5))
            out[f"{p}.attn.indexer.k_norm.weight"] = Parameter((cfg.index_head_dim,), "bf16", ("const", 1.0))
        if layer in cfg.index_source_layer_ids:
            width = cfg.index_n_heads * cfg.index_head_dim
            out[f"{p}.attn.indexer.wq_b.weight"] = Parameter((width, cfg.q_lora_rank), "fp8",
                                                             ("normal", cfg.q_lora_rank ** -0.5))
            out[f"{p}.attn.indexer.weights_proj.weight"] = Parameter((cfg.index_n_heads, d), "bf16",
                                                                     ("normal", d ** -0.5))
        if layer in cfg.engram_layer_ids:
            rows = cfg.engram_num_embeddings[cfg.engram_layer_ids.index(layer)]
            inner = cfg.engram_columns() * cfg.engram_head_dim
            out[f"{p}.engram.embed.weight"] = Parameter((rows, cfg.engram_head_dim), "rows", ("normal", 0.5))
            out[f"{p}.engram.wkv.weight"] = Parameter(((cfg.hc_mult + 1) * d, inner), "fp8",
                                                      ("normal", inner ** -0.5))
            out[f"{p}.engram.q_weight"] = Parameter((cfg.hc_mult, d), "bf16", ("const", 1.0))
            out[f"{p}.engram.k_weight"] = Parameter((cfg.hc_mult, d), "bf16", ("const", 1.0))
    out["norm.weight"] = Parameter((d,), "bf16", ("const", 1.0))
    out["head.weight"] = Parameter((v, d), "bf16", ("normal", 0.5 * d ** -0.5))
    n = cfg.num_nextn_predict_layers
    for k in range(n):
        out.update(_block(cfg, f"mtp.{k}", cfg.dspark_n_routed_experts, (2 * n) ** -0.5))
    if n:
        taps = len(cfg.dspark_target_layer_ids) * d
        last = f"mtp.{n - 1}"
        out["mtp.0.main_proj.weight"] = Parameter((d, taps), "fp8", ("normal", taps ** -0.5))
        out["mtp.0.main_norm.weight"] = Parameter((d,), "bf16", ("const", 1.0))
        out[f"{last}.norm.weight"] = Parameter((d,), "bf16", ("const", 1.0))
        rank = cfg.dspark_markov_rank
        out[f"{last}.markov_head.embed.weight"] = Parameter((v, rank), "bf16", ("normal", 0.1))
        out[f"{last}.markov_head.head.weight"] = Parameter((v, rank), "bf16", ("normal", 0.1 * rank ** -0.5))
        out[f"{last}.confidence_head.proj.weight"] = Parameter((1, d + rank), "bf16", ("const", 0.0))
    return out
