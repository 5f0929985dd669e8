"""The V4.1 text network in PyTorch: whole sequences from position 0, any batch (model.md sections 4 to 7).

One code path serves training (bf16 products, float32 statistics, compiled pieces) and exact inference
(float32 throughout).  Weights come in as a flat dict of float32 master parameters; `effective` turns
them into the tensors the forward uses: cast, optionally rounded to the stored formats with a
straight-through gradient, experts of a layer joined into two matrices.  The drafter is in drafter.py.
"""
import torch
import torch.nn.functional as F

import model_kernels
import model_ops as ops
import native
from model_config import parameters


def initialise(cfg, seed, device="cpu"):
    """Fresh float32 parameters; the same seed gives the same values on any device."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, spec in parameters(cfg).items():
        rule = spec.init[0]
        if rule == "normal":
            value = torch.randn(spec.shape, generator=generator) * spec.init[1]
        elif rule == "const":
            value = torch.full(spec.shape, float(spec.init[1]))
        else:  # hc_base: pre leans on one stream, post near 1, comb near the identity
            c = cfg.hc_mult
            parts = name.split(".")
            turn = (2 * int(parts[1]) + (parts[-1] == "hc_ffn_base")) % c
            pre = torch.full((c,), -1.5)
            pre[turn] = 1.0
            post = 0.5 * torch.randn(c, generator=generator)
            value = torch.cat([pre, post, (4.0 * torch.eye(c)).flatten()])
        out[name] = value.to(device)
    return out


def rounded(value, stored):
    """float32 values on the stored format's grid."""
    if stored == "fp8":
        return native.round_fp8_block(value)
    if stored == "mxfp4":
        return native.round_mxfp4(value)
    if stored == "rows":
        return native.round_fp8_rows(value)
    return native.round_bf16(value) if stored == "bf16" else value


_KEEP_FLOAT = ("hc_", "attn_sink", "gate.weight", "gate.bias", "norm.weight", "q_weight", "k_weight")


def effective(cfg, params, dtype=torch.float32, quantised=False, drafter=False):
    """Tensors for the forward pass; differentiable with respect to `params`."""
    specs, out = parameters(cfg), {}
    for name, value in params.items():
        if name.startswith("mtp.") != drafter:
            continue
        if quantised and specs[name].stored != "f32":
            with torch.no_grad():
                grid = rounded(value, specs[name].stored)
            value = native.straight_through(value, grid)
        keep = any(part in name for part in _KEEP_FLOAT)
        out[name] = value if keep else value.to(dtype)
    prefixes = ([f"mtp.{k}" for k in range(cfg.num_nextn_predict_layers)] if drafter
                else [f"layers.{k}" for k in range(cfg.num_hidden_layers)])
    for p in prefixes:
        shared = [out.pop(f"{p}.ffn.shared_experts.{w}.weight") for w in ("w1", "w2", "w3")]
        w1, w2, w3 = (out.pop(f"{p}.ffn.experts.{w}") for w in ("w1", "w2", "w3"))
        out[f"{p}.ffn.w13"] = torch.cat([w1.flatten(0, 1), shared[0], w3.flatten(0, 1), shared[2]])
        out[f"{p}.ffn.w2"] = torch.cat([w2.transpose(0, 1).flatten(1), shared[1]], 1)
    return out


class Network:
    """Forward passes for one configuration; holds tables only, no weights."""

    def __init__(self, cfg, hasher, device="cpu"):
        self.cfg, self.hasher, self.device = cfg, hasher, torch.device(device)
        self._rope = {}

    def rope(self, length, compressed):
        key = (length, compressed)
        if key not in self._rope:
            f = torch.tensor(self.cfg.rope_frequencies(compressed), dtype=torch.float32, device=self.device)
            angle = torch.arange(length, dtype=torch.float32, device=self.device)[:, None] * f
            self._rope[key] = (torch.cos(angle), torch.sin(angle))
        return self._rope[key]

    def sublayers(self, w, p, h, pre, attend, top_k, record=None):
        """One block: attention (callable x -> y) and MoE with their stream mixing; returns (h, pre, routing)."""
        cfg = self.cfg
        x, a_pre, post, comb = ops.hc_in(h, pre, w[f"{p}.hc_attn_fn"], w[f"{p}.hc_attn_scale"],
                                         w[f"{p}.hc_attn_base"], w[f"{p}.attn_norm.weight"], cfg.hc_eps,
                                         cfg.rms_norm_eps)
        comb = model_kernels.sinkhorn(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps)
        y = attend(x)
        if record is not None:
            record[f"attn.{p}.in"], record[f"attn.{p}.out"] = x, y
        h = ops.hc_out(y, h, post, comb)
        x, f_pre, post, comb = ops.hc_in(h, a_pre, w[f"{p}.hc_ffn_fn"], w[f"{p}.hc_ffn_scale"],
                                         w[f"{p}.hc_ffn_base"], w[f"{p}.ffn_norm.weight"], cfg.hc_eps,
                                         cfg.rms_norm_eps)
        comb = model_kernels.sinkhorn(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps)
        flat = x.flatten(0, 1)
        gates, scores, chosen = ops.router(flat, w[f"{p}.ffn.gate.weight"], w[f"{p}.ffn.gate.bias"], top_k,
                                           cfg.routed_scaling_factor)
        y = ops.experts(flat, w[f"{p}.ffn.w13"], w[f"{p}.ffn.w2"], gates, cfg.swiglu_limit).view_as(x)
        if record is not None:
            record[f"ffn.{p}.in"], record[f"ffn.{p}.out"] = x, y
            record[f"router.{p}"] = (gates, scores)
        h = ops.hc_out(y, h, post, comb)
        return h, f_pre, chosen

    def forward(self, w, tokens, dense=False, kvq=False, train_index=False, record=None, skip=()):
        """tokens int64 [B,S] -> dict with hidden [B,S,D] (after the final norm), taps, loads, index_loss.

        dense: every visible compressed entry is attended (warm-up); kvq: KV and index roundings of the
        released caches; record: dict that receives intermediates; skip: mechanisms switched off for ablations.
        """
        cfg, device = self.cfg, tokens.device
        length = tokens.shape[1]
        padded = -(-length // cfg.sliding_window) * cfg.sliding_window
        tokens = F.pad(tokens, (0, padded - length), value=cfg.engram_pad_token_id)
        wmask = ops.window_mask(padded, cfg.sliding_window, device)
        rows = self.hasher.rows(tokens)
        h = F.embedding(tokens, w["embed.weight"])[:, :, None].expand(-1, -1, cfg.hc_mult, -1).contiguous()
        pre = torch.zeros(*tokens.shape, cfg.hc_mult, device=device)
        pre[..., 0] = 1.0
        slots = {"ratio": 0}
        taps, loads, index_losses = [], [], []
        for layer in range(cfg.num_hidden_layers):
            p = f"layers.{layer}"
            if layer in cfg.engram_layer_ids and "engram" not in skip:
                ids = rows[cfg.engram_layer_ids.index(layer)]
                e = F.embedding(ids, w[f"{p}.engram.embed.weight"]).flatten(-2)
                h = ops.engram_mix(h, F.linear(e, w[f"{p}.engram.wkv.weight"]), w[f"{p}.engram.q_weight"],
                                   w[f"{p}.engram.k_weight"], cfg.rms_norm_eps)
                if record is not None:
                    record[f"engram.{p}.rows"] = ids[:, :length]
                    record[f"engram.{p}.out"] = h[:, :length]
            if layer in cfg.dspark_target_layer_ids:
                taps.append(h.float().mean(2).to(h.dtype)[:, :length])

            def attend(x, layer=layer, p=p):
                return self._attend(w, layer, p, x, slots, wmask, dense, kvq, train_index, index_losses, record, skip)

            h, pre, chosen = self.sublayers(w, p, h, pre, attend, cfg.num_experts_per_tok, record)
            loads.append(chosen)
            if record is not None:
                record[f"stream.{p}"], record[f"pre.{p}"] = h[:, :length], pre[:, :length]
        hidden = ops.rms_norm(ops.hc_collapse(h, pre), w["norm.weight"], cfg.rms_norm_eps)[:, :length]
        return {"hidden": hidden, "taps": torch.cat(taps, -1) if taps else None,
                "loads": [c.view(*tokens.shape, -1)[:, :length] for c in loads],
                "index_loss": sum(index_losses) / len(index_losses) if index_losses else None}

    def _attend(self, w, layer, p, x, slots, wmask, dense, kvq, train_index, index_losses, record, skip):
        cfg = self.cfg
        length, ratio = x.shape[1], cfg.compress_ratios[layer]
        cos, sin = self.rope(length, ratio > 0)
        a = f"{p}.attn"
        qr, q, kv = ops.attn_in(x, w[f"{a}.wq_a.weight"], w[f"{a}.q_norm.weight"], w[f"{a}.wq_b.weight"],
                                w[f"{a}.wkv.weight"], w[f"{a}.kv_norm.weight"], cos, sin,
                                cfg.num_attention_heads, cfg.rms_norm_eps)
        if kvq:
            kv = native.straight_through(kv, native.kv_window(kv.detach()))
        sink = w[f"{a}.attn_sink"]
        if "sink" in skip:
            sink = torch.full_like(sink, -1e4)
        entries = mask = scores = None
        if ratio > 0 and "compressed" not in skip:
            scores = self._index(w, layer, a, x, qr, slots, dense, kvq, train_index, record)
            entries, mask = slots["entries"], slots["mask"]
        o, entry_scores = ops.attention(q, kv, entries, mask, sink, cfg.sliding_window, wmask)
        if scores is not None:
            index_losses.append(ops.index_loss(scores, entry_scores[:scores.shape[0]], slots["seen"],
                                               cfg.head_dim ** -0.5))
        return ops.attn_out(o, w[f"{a}.wo_a.weight"], w[f"{a}.wo_b.weight"], cos, sin, cfg.o_groups)

    def _index(self, w, layer, a, x, qr, slots, dense, kvq, train_index, record):
        """Refresh the shared slots of a kv or index source layer.

        Returns trainable scores of the first quarter of the rows when the index loss is wanted, else None.
        """
        cfg, ratio = self.cfg, self.cfg.compress_ratios[layer]
        cos, sin = self.rope(x.shape[1], True)
        if layer in cfg.kv_source_layer_ids:
            gate = w.get(f"{a}.compressor.wgate.weight")
            latent = ops.compress(x, w[f"{a}.compressor.wkv.weight"], gate, w[f"{a}.compressor.norm.weight"], ratio,
                                  cfg.rms_norm_eps)
            n = latent.shape[1]
            c, s = cos[:n * ratio:ratio], sin[:n * ratio:ratio]
            keys = ops.rms_norm(F.linear(latent.detach(), w[f"{a}.indexer.wk.weight"]),
                                w[f"{a}.indexer.k_norm.weight"], cfg.rms_norm_eps)
            keys, entries = ops.rope(keys, c, s), ops.rope(latent, c, s)
            if kvq:
                keys = native.straight_through(keys, native.kv_index(keys.detach()))
                entries = native.straight_through(entries, native.kv_compressed(entries.detach()))
            slots.update(entries=entries, keys=keys, ratio=ratio, seen=ops.visible(x.shape[1], n, ratio, x.device))
        if layer not in cfg.index_source_layer_ids:
            return None

        def score(qr, x, keys):
            iq = F.linear(qr, w[f"{a}.indexer.wq_b.weight"]).unflatten(-1, (cfg.index_n_heads, -1))
            iq = ops.rope(iq, cos.unsqueeze(-2), sin.unsqueeze(-2))
            if kvq:
                iq = native.straight_through(iq, native.kv_index(iq.detach()))
            weights = F.linear(x, w[f"{a}.indexer.weights_proj.weight"]) * (
                cfg.index_head_dim ** -0.5 * cfg.index_n_heads ** -0.5)
            return ops.index_scores(iq, keys, weights)

        with torch.no_grad():
            scores = score(qr, x, slots["keys"])
            seen = slots["seen"]
            masked = torch.where(seen, scores, -torch.inf)
            if layer > cfg.candidate_source_layer_id:
                masked = torch.where(slots["candidates"], masked, -torch.inf)
            if layer == cfg.candidate_source_layer_id:
                slots["candidates"] = ops.candidate_mask(masked, seen, ratio, cfg.candidate_block_size,
                                                         cfg.candidate_topk_blocks)
            if dense:
                slots["mask"] = seen[None]
            else:
                slots["mask"] = model_kernels.topk_mask(masked, cfg.index_topk) & (masked > -torch.inf)
            if record is not None:
                record[f"indexer.{a}"] = (masked, slots["mask"])
                if layer == cfg.candidate_source_layer_id:
                    record[f"candidates.{a}"] = slots["candidates"]
        if not train_index:
            return None
        n = max(1, x.shape[0] // 4)
        return score(qr[:n].detach(), x[:n].detach(), slots["keys"][:n])

    def logits(self, w, hidden):
        return F.linear(hidden, w["head.weight"]).float()
