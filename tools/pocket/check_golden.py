"""Compare the PyTorch network with the vendor-computed fixtures: prints one table, exit code 1 on a miss.

Usage: check_golden.py <fixture folder containing tiny-a and tiny-a-ref> [--device cuda]
`fp32` reference: logits, hidden, streams, router and index choices, candidates, Engram rows, drafts.
`fp32kvq` reference: prefill logits with the KV roundings.  Values within 1e-3, choices identical
(kvq: median row error at most 1e-3, as one flipped rounding may move a row).
"""
import argparse
import os
import sys

import numpy as np
import torch

import model
import model_engram
import native
import native_checkpoint
from drafter import Drafter

PROMPTS = ("p1", "p5", "p17", "p40", "p150")


class Table:
    def __init__(self):
        self.failed = 0

    def row(self, name, value, limit, what):
        good = bool(value <= limit)
        self.failed += not good
        print(f"{name:34s} {what:22s} {value:10.2e}  limit {limit:7.0e}  {'ok' if good else 'MISS'}")


def selected(gates, k):
    """Expert ids ascending per row and their weights."""
    ids = torch.topk(gates, k, -1).indices.sort(-1).values
    return ids, gates.gather(-1, ids)


def check_prefill(table, net, w, ref, name, tokens, taps_out):
    cfg = net.cfg
    device = tokens.device

    def want(key):
        return torch.from_numpy(ref[f"{name}.prefill.{key}"][1].copy()).to(device) if f"{name}.prefill.{key}" in ref \
            else None

    rec, length = {}, tokens.shape[1]
    out = net.forward(w, tokens, record=rec)
    table.row(f"{name} logits", (net.logits(w, out["hidden"])[0] - want("logits")).abs().max().item(), 1e-3, "max abs")
    if want("hidden") is not None:
        table.row(f"{name} hidden", (out["hidden"][0] - want("hidden")).abs().max().item(), 1e-3, "max abs")
        table.row(f"{name} taps", (out["taps"][0] - want("taps")).abs().max().item(), 1e-3, "max abs")
    wrong, worst = 0, 0.0
    for layer in range(cfg.num_hidden_layers):
        gates = rec[f"router.layers.{layer}"][0][:length]
        ids, value = selected(gates, cfg.num_experts_per_tok)
        order = want(f"router.L{layer}.ids").long()
        wanted, perm = order.sort(-1)
        wrong += (ids != wanted).sum().item()
        worst = max(worst, (value - want(f"router.L{layer}.weights").gather(-1, perm)).abs().max().item())
    table.row(f"{name} router ids", wrong, 0, "differences")
    table.row(f"{name} router weights", worst, 1e-4, "max abs")
    wrong, rows = 0, 0
    for layer in cfg.index_source_layer_ids:
        wanted = want(f"indexer.L{layer}.ids")
        if wanted is None:
            continue
        mask = rec[f"indexer.layers.{layer}.attn"][1][0, :length]
        golden = torch.zeros(length, mask.shape[-1] + 1, dtype=torch.bool, device=device)
        golden.scatter_(1, torch.where(wanted < 0, mask.shape[-1], wanted).long(), True)
        wrong += (golden[:, :-1] != mask).any(-1).sum().item()
        rows += length
    table.row(f"{name} index lists", wrong, 0, f"rows of {rows}")
    source = cfg.candidate_source_layer_id
    if want(f"candidates.L{source}") is not None:
        c = want(f"candidates.L{source}").bool()
        mine = rec[f"candidates.layers.{source}.attn"][0, :length, :c.shape[-1]]
        seen = rec[f"indexer.layers.{source}.attn"][0][0, :length, :c.shape[-1]] > -torch.inf
        table.row(f"{name} candidates", ((mine != c) & seen).sum().item(), 0, "differences")
    wrong = sum((rec[f"engram.layers.{layer}.rows"][0] != want(f"engram.L{layer}.rows")).sum().item()
                for layer in cfg.engram_layer_ids)
    table.row(f"{name} engram rows", wrong, 0, "differences")
    if want("stream.L0.out") is not None:
        worst = {"stream": 0.0, "attn": 0.0, "ffn": 0.0}
        for layer in range(cfg.num_hidden_layers):
            p = f"layers.{layer}"
            pairs = [("stream", rec[f"stream.{p}"][0], want(f"stream.L{layer}.out"))]
            for sub in ("attn", "ffn"):
                pairs.append((sub, rec[f"{sub}.{p}.out"][0, :length], want(f"{sub}.L{layer}.out")))
            for kind, mine, wanted in pairs:
                worst[kind] = max(worst[kind], (mine - wanted).abs().max().item())
        for kind, value in worst.items():
            table.row(f"{name} {kind} outputs", value, 1e-3, "max abs, all layers")
    taps_out[name] = out["taps"]


def check_drafts(table, net, w, wd, ref, name, tokens):
    """Drafts at the recorded positions of the greedy continuation (prefill of prompt + continuation)."""
    drafter = Drafter(net)
    device = tokens.device
    fed = torch.from_numpy(ref[f"{name}.decode.owner.tokens"][1].copy()).to(device)
    full = torch.cat([tokens[0], fed])[None]
    position = torch.from_numpy(ref[f"{name}.draft.position"][1].copy()).to(device)
    ids = torch.from_numpy(ref[f"{name}.draft.ids"][1].copy()).to(device)
    out = net.forward(w, full)
    table.row(f"{name} decode logits", (net.logits(w, out["hidden"])[0, tokens.shape[1]:]
                                        - torch.from_numpy(ref[f"{name}.decode.owner.logits"][1].copy()).to(device)
                                        ).abs().max().item(), 1e-3, "max abs, 24 steps")
    main, keys = drafter.context(wd, out["taps"])
    mine, logits, conf = drafter.draft(wd, w["embed.weight"], w["head.weight"], keys, position[None],
                                       ids[None, :, 0])
    table.row(f"{name} draft ids", (mine[0] != ids).sum().item(), 0, f"differences of {ids.numel()}")
    for key, value in (("logits", logits[0]), ("confidence", conf[0]), ("main_x", main[0, position])):
        wanted = torch.from_numpy(ref[f"{name}.draft.{key}"][1].copy()).to(device)
        table.row(f"{name} draft {key}", (value - wanted).abs().max().item(), 1e-3, "max abs")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fixtures")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = os.path.join(args.fixtures, "tiny-a")
    cfg, params = native_checkpoint.load(folder)
    common = native.read_safetensors(os.path.join(args.fixtures, "tiny-a-ref", "common.safetensors"))
    net = model.Network(cfg, model_engram.Hasher(cfg, common["engram.token_map"][1], args.device), args.device)
    params = {k: v.to(args.device) for k, v in params.items()}
    table, taps = Table(), {}
    with torch.no_grad():
        w = model.effective(cfg, params)
        wd = model.effective(cfg, params, drafter=True)
        ref = native.read_safetensors(os.path.join(args.fixtures, "tiny-a-ref", "reference-fp32.safetensors"))
        kvq = native.read_safetensors(os.path.join(args.fixtures, "tiny-a-ref", "reference-fp32kvq.safetensors"))
        for name in PROMPTS:
            tokens = torch.from_numpy(common[f"{name}.tokens"][1].copy())[None].to(args.device)
            check_prefill(table, net, w, ref, name, tokens, taps)
            check_drafts(table, net, w, wd, ref, name, tokens)
            wanted = kvq[f"{name}.prefill.logits"][1]
            logits = net.logits(w, net.forward(w, tokens, kvq=True)["hidden"])[0].cpu().numpy()
            row = np.median(np.abs(logits - wanted).max(-1))
            table.row(f"{name} kvq logits", float(row), 1e-3, "median row max abs")
    rounded = {k: model.rounded(v, model.parameters(cfg)[k].stored) for k, v in params.items()}
    moved = sum(int((rounded[k] != params[k]).sum()) for k in params)
    table.row("stored values re-rounded", moved, 0, "values that move")
    print("all within limits" if not table.failed else f"{table.failed} rows missed")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
