"""Optimisers for the pocket model: Muon for hidden matrices, Adam for everything else.

Muon: momentum, five Newton-Schulz steps that orthogonalise the update, scaled by 0.2*sqrt(max(a,b)) so that
its size matches Adam's and one learning rate serves both.  Stacked experts are batches of matrices.
Router biases are not trained by gradient: `balance` nudges only experts outside a wide load band.
"""
import torch

_MUON_PARTS = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "ffn.experts", "ffn.shared_experts",
               "engram.wkv", "compressor.wkv", "main_proj")


def is_muon(name):
    return any(part in name for part in _MUON_PARTS) and "indexer" not in name


def orthogonalise(g):
    """Newton-Schulz iteration on [n, a, b] with a <= b; singular values move towards 1."""
    x = g.to(torch.bfloat16) if g.is_cuda else g
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None].to(x.dtype) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.float()


class Optimiser:
    """One step over a dict of parameters; state is a plain dict so that checkpoints are exact."""

    def __init__(self, params, weight_decay=0.1, betas=(0.9, 0.95), momentum=0.95):
        self.params = {n: p for n, p in params.items() if not n.endswith("gate.bias")}
        self.muon = [n for n in self.params if is_muon(n)]
        self.adam = [n for n in self.params if not is_muon(n)]
        self.weight_decay, self.betas, self.momentum = weight_decay, betas, momentum
        self.steps = 0
        self.state = {n: torch.zeros_like(self.params[n]) for n in self.muon}
        self.state.update({f"{n}#m": torch.zeros_like(self.params[n]) for n in self.adam})
        self.state.update({f"{n}#v": torch.zeros_like(self.params[n]) for n in self.adam})
        self.groups = {}
        for n in self.muon:
            self.groups.setdefault(tuple(self.params[n].shape[-2:]), []).append(n)

    @torch.no_grad()
    def step(self, lr, clip=1.0):
        """Apply one update with learning rate `lr`; returns the gradient norm (a tensor)."""
        self.steps += 1
        grads = {n: p.grad for n, p in self.params.items() if p.grad is not None}
        norm = torch.stack(torch._foreach_norm(list(grads.values()))).norm()
        torch._foreach_mul_(list(grads.values()), (clip / (norm + 1e-6)).clamp_max(1.0))
        for (a, b), names in self.groups.items():
            names = [n for n in names if n in grads]
            if not names:
                continue
            buffers = [self.state[n] for n in names]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, [grads[n] for n in names])
            mixed = torch._foreach_add([grads[n] for n in names], buffers, alpha=self.momentum)
            stack = torch.cat([m.reshape(-1, a, b) for m in mixed])
            update = orthogonalise(stack.transpose(1, 2) if a > b else stack)
            update = (update.transpose(1, 2) if a > b else update) * (0.2 * max(a, b) ** 0.5)
            parts = update.split([m.numel() // (a * b) for m in mixed])
            weights = [self.params[n] for n in names]
            torch._foreach_mul_(weights, 1 - lr * self.weight_decay)
            torch._foreach_add_(weights, [u.reshape(w.shape) for u, w in zip(parts, weights)], alpha=-lr)
        for tables, factor in ((True, 1.0), (False, 0.5)):  # embedding-like tables learn at twice the rate
            self._adam([n for n in self.adam if n in grads and ("embed.weight" in n) == tables], grads, lr * factor)
        for p in self.params.values():
            p.grad = None
        return norm


    def _adam(self, names, grads, lr):
        if not names:
            return
        g = [grads[n] for n in names]
        m, v = [self.state[f"{n}#m"] for n in names], [self.state[f"{n}#v"] for n in names]
        b1, b2 = self.betas
        torch._foreach_mul_(m, b1)
        torch._foreach_add_(m, g, alpha=1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        bottom = torch._foreach_sqrt(v)
        torch._foreach_div_(bottom, (1 - b2 ** self.steps) ** 0.5)
        torch._foreach_add_(bottom, 1e-12)
        torch._foreach_addcdiv_([self.params[n] for n in names], m, bottom, -lr / (1 - b1 ** self.steps))


@torch.no_grad()
def balance(params, prefixes, loads, top_k, rate, low=0.3, high=3.0):
    """Weak balancing: bias += rate below low*mean load, -= rate above high*mean; nothing in between.

    loads: per prefix a float tensor [E], the share of tokens that chose each expert.
    """
    for p, share in zip(prefixes, loads):
        mean = top_k / share.numel()
        params[f"{p}.ffn.gate.bias"] += rate * ((share < low * mean).float() - (share > high * mean).float())
