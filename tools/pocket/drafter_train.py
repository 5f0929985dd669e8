"""Trains the DSpark drafter on a frozen native backbone (model.md section 8).

Every step drafts from random anchors of the training rows: teacher-forced Markov input, distillation of the
backbone's next-token distribution at the five draft positions, confidence BCE on arg-max agreement.  The second
half runs with native rounding of the drafter's weights.  Usage: drafter_train.py --backbone STEM --data DIR ...
"""
import argparse
import json
import os
import time

import torch
import torch.nn.functional as F

import engram_map
import mixture
import model
import model_engram
import model_ops
import train_data
import train_state
from drafter import Drafter, draft_loss
from model_config import Config, parameters
from tokenizers import Tokenizer
from train_final import FINE_WEIGHTS
from train_optim import Optimiser, balance


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--backbone", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--seconds", type=float, default=1e9, help="the schedule shrinks to end by then")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--anchors", type=int, default=96)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--device", default="cuda")
    p.add_argument("--compile", type=int, default=1)
    return p.parse_args()


class DrafterTrainer:
    def __init__(self, args):
        self.args, device = args, args.device
        _, values, extra = train_state.load_compact(*os.path.split(args.backbone))
        self.root = extra["root"]
        self.cfg = cfg = Config.from_text(self.root["text_config"])
        classes = engram_map.token_map(Tokenizer.from_file(args.tokenizer))
        self.net = model.Network(cfg, model_engram.Hasher(cfg, classes, device), device)
        self.drafter = Drafter(self.net)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.no_grad():
            self.w = model.effective(cfg, {n: v.to(device) for n, v in values.items()}, self.dtype)
        fresh = model.initialise(cfg, 2)
        self.params = {n: v.to(device).requires_grad_(not n.endswith("gate.bias"))
                       for n, v in fresh.items() if n.startswith("mtp.")}
        self.optimiser = Optimiser(self.params)
        self.generator = torch.Generator().manual_seed(3)
        self.rows = train_data.TrainRows(args.data, args.steps, args.batch, device, seed=7)
        self.dev = train_data.DevRows(args.data, args.batch, device)
        self.position_weights = torch.tensor([0.85 ** j for j in range(cfg.dspark_block_size)], device=device)

    def forward(self, x, anchors, native):
        """Backbone without gradient, then drafts at `anchors`; returns draft_loss values and expert choices."""
        cfg, n = self.cfg, self.cfg.dspark_block_size
        with torch.no_grad():
            out = self.net.forward(self.w, x, kvq=native)
        wd = model.effective(cfg, self.params, self.dtype, quantised=native, drafter=True)
        _, keys = self.drafter.context(wd, out["taps"], kvq=native)
        b, a = anchors.shape
        at = (anchors[..., None] + 1 + torch.arange(n, device=x.device)).flatten(1)
        prev = x.gather(1, at).unflatten(1, (a, n))
        hidden, normed, choices = self.drafter.block(wd, self.w["embed.weight"], keys, anchors, prev[..., 0], kvq=native)
        logits, confidence = self.drafter.heads(wd, self.w["head.weight"], hidden, normed, prev)
        with torch.no_grad():
            d = out["hidden"].shape[-1]
            wanted = out["hidden"].gather(1, at[..., None].expand(-1, -1, d))
            target = F.linear(wanted, self.w["head.weight"]).float().unflatten(1, (a, n))
        valid = torch.ones(b * a, n, device=x.device)
        v = cfg.vocab_size
        return draft_loss(logits.view(b * a, n, v), confidence.view(b * a, n), target.view(b * a, n, v),
                          self.position_weights, valid), choices

    def anchors(self, b):
        length = train_data.ROW - 1
        return torch.randint(0, length - self.cfg.dspark_block_size - 1, (b, self.args.anchors),
                             generator=self.generator).to(self.args.device)

    def run(self):
        args, begin = self.args, time.time()
        log = open(os.path.join(args.out, "drafter.jsonl"), "a")
        step, total, mark, loads = 0, args.steps, time.time(), []
        prefixes = self.drafter.stages
        while step < total:
            native = step >= total // 2
            x = self.rows.get(step)[0]
            (loss, ce, bce, agree), choices = self.forward(x, self.anchors(x.shape[0]), native)
            loss.backward()
            lr = args.lr * min(1.0, (step + 1) / 50) * min(1.0, 2.0 * (1 - step / total) + 0.02)
            self.optimiser.step(lr)
            share = [c.float().mean(0) for c in choices]
            balance(self.params, prefixes, share, self.cfg.dspark_num_experts_per_tok, 2e-3)
            step += 1
            if step == 100 and args.device == "cuda":  # enough to know the speed: fit the schedule into the time
                torch.cuda.synchronize()
                pace = (time.time() - mark) / 50
                total = min(total, max(200, int(step + (args.seconds - (time.time() - begin)) / (1.2 * pace))))
            if step % 50 == 0 or step == total:
                line = {"step": step, "of": total, "loss": loss.item(), "ce": ce.item(), "bce": bce.item(),
                        "agree": agree.item(), "native": int(native), "lr": lr, "seconds": time.time() - begin}
                log.write(json.dumps({k: round(v, 5) for k, v in line.items()}) + "\n")
                log.flush()
                print(json.dumps({k: round(v, 4) for k, v in line.items()}), flush=True)
                mark = time.time()
        specs = parameters(self.cfg)
        on_grid = {n: model.rounded(p.detach(), specs[n].stored) for n, p in self.params.items()}
        train_state.save_compact(args.out, "drafter", step, on_grid, {"loads": [s.tolist() for s in share]})


def main():
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = True
    mixture.WEIGHTS.update(FINE_WEIGHTS)
    if args.compile:
        model_ops.compile_ops()
    DrafterTrainer(args).run()


if __name__ == "__main__":
    main()
