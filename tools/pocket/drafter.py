"""The DSpark drafter: blocks of draft rows beside a frozen backbone (model.md section 8).

A draft call belongs to a backbone position p (an "anchor"): its rows j = 0..block-1 sit at p+1+j, see the
context keys of the last W positions up to p and each other.  Everything is batched over rows B and
anchors A, so training and evaluation draft from many positions of a sequence in one call.
"""
import torch
import torch.nn.functional as F

import model_kernels
import model_ops as ops
import native


class Drafter:
    """Forward passes of the drafter; weights come from model.effective(..., drafter=True)."""

    def __init__(self, network):
        self.net, self.cfg = network, network.cfg
        self.stages = [f"mtp.{k}" for k in range(self.cfg.num_nextn_predict_layers)]

    def context(self, w, taps, kvq=False):
        """taps [B,S,taps*D] -> (main_x [B,S,D], context keys per stage [B,S,d])."""
        cfg = self.cfg
        main = ops.rms_norm(F.linear(taps, w["mtp.0.main_proj.weight"]), w["mtp.0.main_norm.weight"],
                            cfg.rms_norm_eps)
        cos, sin = self.net.rope(taps.shape[1], False)
        keys = []
        for p in self.stages:
            k = ops.rms_norm(F.linear(main, w[f"{p}.attn.wkv.weight"]), w[f"{p}.attn.kv_norm.weight"],
                             cfg.rms_norm_eps)
            k = ops.rope(k, cos, sin)
            keys.append(native.straight_through(k, native.kv_window(k.detach())) if kvq else k)
        return main, keys

    def block(self, w, embed, keys, anchors, first, kvq=False, record=None):
        """anchors, first int64 [B,A] (position p and the token at p+1) -> (x, normed x) [B,A,block,D], choices."""
        cfg, n = self.cfg, self.cfg.dspark_block_size
        b, a = anchors.shape
        window = cfg.sliding_window
        ids = torch.full((b, a, n), cfg.dspark_noise_token_id, dtype=torch.long, device=anchors.device)
        ids[..., 0] = first
        position = (anchors[..., None] + 1 + torch.arange(n, device=anchors.device)).flatten(1)
        cos, sin = self.net.rope(keys[0].shape[1] + n, False)
        cos, sin = cos[position], sin[position]
        h = F.embedding(ids.flatten(1), embed)[:, :, None].expand(-1, -1, cfg.hc_mult, -1).contiguous()
        pre = torch.zeros(b, a * n, cfg.hc_mult, device=h.device)
        pre[..., 0] = 1.0
        past = anchors[..., None] + torch.arange(1 - window, 1, device=anchors.device)
        live = F.pad(past >= 0, (0, n), value=True)[:, :, None].expand(-1, -1, n, -1).flatten(1, 2)
        gather = past.clamp_min(0).flatten(1)
        choices = []
        for p, stage_keys in zip(self.stages, keys):

            def attend(x, p=p, stage_keys=stage_keys):
                t = f"{p}.attn"
                _, q, kv = ops.attn_in(x, w[f"{t}.wq_a.weight"], w[f"{t}.q_norm.weight"], w[f"{t}.wq_b.weight"],
                                       w[f"{t}.wkv.weight"], w[f"{t}.kv_norm.weight"], cos, sin,
                                       cfg.num_attention_heads, cfg.rms_norm_eps)
                if kvq:
                    kv = native.straight_through(kv, native.kv_window(kv.detach()))
                heads, d = q.shape[-2:]
                ring = stage_keys.gather(1, gather[..., None].expand(-1, -1, d)).unflatten(1, (a, window))
                all_keys = torch.cat([ring, kv.unflatten(1, (a, n))], 2)
                s = q.reshape(b, a, n * heads, d) @ all_keys.transpose(-1, -2)
                prob, _ = ops.attn_weights(s.reshape(b, a * n, heads, -1), None, live, None, w[f"{t}.attn_sink"],
                                           d ** -0.5)
                o = (prob.reshape(b, a, n * heads, -1) @ all_keys).reshape(b, a * n, heads, d)
                return ops.attn_out(o, w[f"{t}.wo_a.weight"], w[f"{t}.wo_b.weight"], cos, sin, cfg.o_groups)

            h, pre, chosen = self.net.sublayers(w, p, h, pre, attend, cfg.dspark_num_experts_per_tok, record)
            choices.append(chosen)
        x = ops.hc_collapse(h, pre)
        normed = ops.rms_norm(x, w[f"{self.stages[-1]}.norm.weight"], cfg.rms_norm_eps)
        return x.unflatten(1, (a, n)), normed.unflatten(1, (a, n)), choices

    def heads(self, w, head, x, normed, prev, markov=True):
        """Logits float32 [...,V] and raw confidence [...] of rows whose previous token is `prev`."""
        p = self.stages[-1]
        e = F.embedding(prev, w[f"{p}.markov_head.embed.weight"])
        logits = F.linear(normed, head).float()
        if markov:
            logits = logits + F.linear(e, w[f"{p}.markov_head.head.weight"]).float()
        both = torch.cat([x.float(), e.float()], -1)
        return logits, F.linear(both, w[f"{p}.confidence_head.proj.weight"].float())[..., 0]

    def draft(self, w, embed, head, keys, anchors, first, kvq=False, markov=True):
        """Greedy drafts: ids int64 [B,A,block+1] (column 0 = `first`), logits, confidence."""
        x, normed, _ = self.block(w, embed, keys, anchors, first, kvq)
        ids, logits, confidence = [first], [], []
        for j in range(self.cfg.dspark_block_size):
            row, conf = self.heads(w, head, x[:, :, j], normed[:, :, j], ids[-1], markov)
            ids.append(row.argmax(-1))
            logits.append(row)
            confidence.append(conf)
        return torch.stack(ids, -1), torch.stack(logits, 2), torch.stack(confidence, -1)


def draft_loss(logits, confidence, target_logits, weights, valid):
    """Distillation of the backbone's next-token distribution plus confidence BCE.

    logits, target_logits [N,block,V]; confidence [N,block]; weights [block] per draft position; valid [N,block].
    Returns (loss, cross entropy, BCE, agreement of the arg-maxes), means over valid rows.
    """
    logp = torch.log_softmax(logits.float(), -1)
    target = torch.softmax(target_logits.float(), -1)
    ce = -(target * logp).sum(-1)
    agree = logits.argmax(-1) == target_logits.argmax(-1)
    bce = F.binary_cross_entropy_with_logits(confidence, agree.float(), reduction="none")
    mass = weights * valid
    total = mass.sum().clamp_min(1.0)
    ce_mean, bce_mean = (ce * mass).sum() / total, (bce * mass).sum() / total
    share = (agree * valid).sum() / valid.sum().clamp_min(1.0)
    return ce_mean + 0.1 * bce_mean, ce_mean.detach(), bce_mean.detach(), share.detach()
