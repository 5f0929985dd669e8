"""Operations of the V4.1 network as pure functions on torch tensors (model.md sections 3 to 7).

Shapes: B rows, S positions, D = d_model, C = hc_mult streams, H heads, d = head_dim, W window,
T compressed entries, E experts.  Statistics, router, mHC coefficients and softmax are float32;
matrix products run in the dtype of their input.  `compile_ops()` swaps the fusable functions for
compiled ones (GPU training); results are the same up to rounding.
"""
import torch
import torch.nn.functional as F

import model_kernels


def rms_norm(x, weight, eps):
    f = x.float()
    return (weight.float() * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def rope(x, cos, sin):
    """Rotate the last 2*cos.shape[-1] channels, adjacent pairs; cos/sin broadcast against x[..., pairs]."""
    n = 2 * cos.shape[-1]
    head, tail = x[..., :-n], x[..., -n:].float().unflatten(-1, (-1, 2))
    u, v = tail[..., 0], tail[..., 1]
    turned = torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(-2)
    return torch.cat([head, turned.to(x.dtype)], -1)


# ---------------------------------------------------------------- mHC (section 4)

def hc_in(h, pre, fn, scale, base, norm_w, hc_eps, eps):
    """h [B,S,C,D], carried pre [B,S,C] -> (x [B,S,D], new pre, post [B,S,C], comb logits [B,S,C,C])."""
    c = h.shape[-2]
    f = h.float()
    x = (pre[..., None] * f).sum(-2).to(h.dtype)
    x = rms_norm(x, norm_w, eps)
    z = f.flatten(-2)
    m = F.linear(z, fn) * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    new_pre = torch.sigmoid(m[..., :c] * scale[0] + base[:c]) + hc_eps
    post = 2 * torch.sigmoid(m[..., c:2 * c] * scale[1] + base[c:2 * c])
    comb = (m[..., 2 * c:] * scale[2] + base[2 * c:]).unflatten(-1, (c, c))
    return x, new_pre, post, comb


def hc_out(y, h, post, comb):
    """out[j] = post[j]*y + sum_i comb[i][j]*h[i]."""
    out = post[..., None] * y.float()[..., None, :]
    for i in range(h.shape[-2]):
        out = out + comb[..., i, :, None] * h[..., i:i + 1, :].float()
    return out.to(h.dtype)


def hc_collapse(h, pre):
    return (pre[..., None] * h.float()).sum(-2).to(h.dtype)


# ---------------------------------------------------------------- attention (section 5)

def attn_in(x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, n_heads, eps):
    """-> (qr [B,S,q_lora], rotated q [B,S,H,d], rotated kv [B,S,d])."""
    qr = rms_norm(F.linear(x, wq_a), q_norm, eps)
    q = rope(F.linear(qr, wq_b).unflatten(-1, (n_heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2))
    kv = rope(rms_norm(F.linear(x, wkv), kv_norm, eps), cos, sin)
    return qr, q, kv


def attn_weights(window_scores, entry_scores, window_mask, entry_mask, sink, scale):
    """Joint softmax with sink.  [B,S,H,2W], [B,S,H,T] or None -> probabilities of both parts."""
    a = torch.where(window_mask[:, :, None], window_scores.float() * scale, -torch.inf)
    if entry_scores is not None:
        b = torch.where(entry_mask[:, :, None], entry_scores.float() * scale, -torch.inf)
        a = torch.cat([a, b], -1)
    s = sink.float()[:, None]
    top = torch.maximum(a.amax(-1, keepdim=True), s).detach()
    e = torch.exp(a - top)
    p = (e / (e.sum(-1, keepdim=True) + torch.exp(s - top))).to(window_scores.dtype)
    n = window_scores.shape[-1]
    return p[..., :n], p[..., n:]


def attn_out(o, wo_a, wo_b, cos, sin, groups):
    """Inverse rotation, grouped projection; o [B,S,H,d] -> [B,S,D]."""
    o = rope(o, cos.unsqueeze(-2), -sin.unsqueeze(-2))
    o = o.flatten(-2).unflatten(-1, (groups, -1))
    t = torch.einsum("bsgi,gri->bsgr", o, wo_a.unflatten(0, (groups, -1)))
    return F.linear(t.flatten(-2), wo_b)


def window_chunks(kv, window):
    """kv [B,S,d], S a multiple of W -> keys of the previous and the own chunk, [B,S/W,2W,d]."""
    chunks = F.pad(kv, (0, 0, window, 0)).unflatten(1, (-1, window))
    return torch.cat([chunks[:, :-1], chunks[:, 1:]], 2)


def window_mask(length, window, device):
    """[1,S,2W] bool: which of the chunk keys a query sees."""
    p = torch.arange(length, device=device)[:, None]
    key = (p // window - 1) * window + torch.arange(2 * window, device=device)
    return ((key >= 0) & (key <= p) & (key > p - window))[None]


def attention(q, kv, entries, entry_mask, sink, window, wmask):
    """q [B,S,H,d], kv [B,S,d], entries [B,T,d] or None -> o [B,S,H,d]; S a multiple of the window."""
    b, s, h, d = q.shape
    keys = window_chunks(kv, window)
    qw = q.reshape(b, s // window, window * h, d)
    sw = (qw @ keys.transpose(-1, -2)).reshape(b, s, h, 2 * window)
    sc = None if entries is None else (q.reshape(b, s * h, d) @ entries.transpose(1, 2)).reshape(b, s, h, -1)
    pw, pc = attn_weights(sw, sc, wmask, entry_mask, sink, d ** -0.5)
    o = (pw.reshape(b, s // window, window * h, 2 * window) @ keys).reshape(b, s, h, d)
    if sc is not None:
        o = o + (pc.reshape(b, s * h, -1) @ entries).reshape(b, s, h, d)
    return o, sc


def compress(x, wkv, wgate, norm_w, ratio, eps):
    """Un-rotated latents [B, S//ratio, d] of a kv source."""
    n = x.shape[1] // ratio
    if ratio == 1:
        return rms_norm(F.linear(x, wkv), norm_w, eps)
    f = x[:, :n * ratio].float()
    k = F.linear(f, wkv.float()).unflatten(1, (n, ratio))
    g = F.linear(f, wgate.float()).unflatten(1, (n, ratio))
    return rms_norm((torch.softmax(g, 2) * k).sum(2).to(x.dtype), norm_w, eps)


def index_scores(iq, keys, weights):
    """iq [B,S,h,i], keys [B,T,i], weights [B,S,h] -> float32 [B,S,T]."""
    b, s, h, i = iq.shape
    dots = (iq.reshape(b, s * h, i) @ keys.transpose(1, 2)).reshape(b, s, h, -1)
    return index_reduce(dots, weights)


def index_reduce(dots, weights):
    return (torch.relu(dots.float()) * weights.float()[..., None]).sum(2)


def visible(length, n_entries, ratio, device):
    """[S,T] bool: entry j is visible to position p iff j < (p+1) div ratio."""
    n = (torch.arange(length, device=device) + 1) // ratio
    return torch.arange(n_entries, device=device)[None] < n[:, None]


def candidate_mask(scores, seen, ratio, block, n_blocks):
    """Block mask of section 5.5 from masked scores [B,S,T] -> bool [B,S,T]."""
    b, s, t = scores.shape
    count = -(-t // block)
    best = F.pad(scores, (0, count * block - t), value=-torch.inf).unflatten(-1, (count, block)).amax(-1)
    n = (torch.arange(s, device=scores.device) + 1) // ratio
    newest = torch.arange(count, device=scores.device)[None] == ((n - 1) // block)[:, None]
    best = torch.where(newest & (n > 0)[:, None], torch.inf, best)
    kept = model_kernels.topk_mask(best, n_blocks) & (best > -torch.inf)
    return kept.repeat_interleave(block, -1)[..., :t]


# ---------------------------------------------------------------- MoE (section 6)

def router(x, gate, bias, top_k, route_scale):
    """-> (gates [N,E] float32 with zeros outside the selection, scores, selection bool)."""
    s = torch.sqrt(F.softplus(F.linear(x.float(), gate.float())))
    chosen = model_kernels.topk_mask((s + bias).detach(), top_k)
    kept = s * chosen
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * route_scale, s, chosen


def experts(x, w13, w2, gates, limit):
    """All experts of a layer at once; the shared expert is the last one with gate 1.

    x [N,D]; w13 [2*(E+1)*F, D] (gate projections, then up projections); w2 [D, (E+1)*F].
    """
    z = swiglu(F.linear(x, w13), gates, limit)
    return F.linear(z, w2)


def swiglu(au, gates, limit):
    n = gates.shape[-1] + 1
    a, u = au.float().chunk(2, -1)
    z = F.silu(a.clamp(max=limit)) * u.clamp(-limit, limit)
    g = F.pad(gates, (0, 1), value=1.0)
    return (z.unflatten(-1, (n, -1)) * g[..., None]).flatten(-2).to(au.dtype)


# ---------------------------------------------------------------- Engram (section 7.4)

def engram_mix(h, kv, q_w, k_w, eps):
    """h [B,S,C,D] += gate * value from kv [B,S,(C+1)*D]."""
    c, d = h.shape[-2:]
    kv = kv.unflatten(-1, (c + 1, d)).float()
    key, value, f = kv[..., :c, :], kv[..., c:, :], h.float()
    dot = (f * q_w.float() * k_w.float() * key).sum(-1)
    dot = dot * torch.rsqrt(f.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * d ** -0.5
    sign = torch.where(dot >= 0, 1.0, -1.0)
    g = torch.sigmoid(sign * torch.sqrt(dot.abs().clamp_min(1e-6)))
    return (f + g[..., None] * value).to(h.dtype)


# ---------------------------------------------------------------- losses

def token_loss(hidden, head, targets):
    """Cross entropy per token, float32 [N]; targets < 0 give 0."""
    logits = F.linear(hidden, head).float()
    picked = logits.gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    return (torch.logsumexp(logits, -1) - picked) * (targets >= 0)


def index_loss(scores, entry_scores, seen, scale):
    """KL(attention mass over visible entries, detached || softmax(index scores)), mean over rows."""
    raw = torch.where(seen[None, :, None], entry_scores.detach().float() * scale, -torch.inf)
    top = raw.amax(-1, keepdim=True).clamp_min(-1e30)
    e = torch.exp(raw - top)
    target = (e / e.sum(-1, keepdim=True).clamp_min(1e-20)).mean(2)
    s = torch.where(seen, scores.float(), -1e30)
    logp = s - torch.logsumexp(s, -1, keepdim=True)
    return (target * (torch.log(target.clamp_min(1e-9)) - logp) * seen).sum(-1).mean()


_FUSABLE = ("hc_in", "hc_out", "hc_collapse", "attn_in", "attn_weights", "attn_out", "index_reduce", "swiglu",
            "engram_mix", "token_loss", "index_loss", "rms_norm", "compress")


def compile_ops():
    """Replace the fusable functions by compiled ones, once per process."""
    torch._dynamo.config.recompile_limit = 64
    for name in _FUSABLE:
        globals()[name] = torch.compile(globals()[name], dynamic=False)
