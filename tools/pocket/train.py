"""Trains the pocket backbone: pretraining, then decay with native rounding, resumable at any step.

Usage: train.py --data DIR --tokenizer FILE --out DIR --total-steps N [--resume FILE|STEM] [--seconds S] ...
The learning rate is a function of the step alone (warm-up, plateau, linear decay), the rows too, so a run
cut into pieces equals one piece.  From `--native-from` on weights and KV pass through the stored formats with a
straight-through gradient.  Writes <out>/<log>.jsonl, compact shards, and an exact checkpoint to --exact.
"""
import argparse
import json
import os
import time

import torch

import engram_map
import model
import model_engram
import model_ops
import model_pocket
import train_data
import train_state
from model_config import Config
from tokenizers import Tokenizer
from train_optim import Optimiser, balance


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", required=True)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--log", default="train")
    p.add_argument("--exact", default="", help="path of the exact local checkpoint (read when it exists)")
    p.add_argument("--resume", default="", help="folder/stem of a compact checkpoint, used without an exact one")
    p.add_argument("--total-steps", type=int, required=True)
    p.add_argument("--stop-step", type=int, default=0)
    p.add_argument("--seconds", type=float, default=1e9)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=int, default=200)
    p.add_argument("--dense-steps", type=int, default=400)
    p.add_argument("--decay-from", type=float, default=0.6, help="share of the steps before the decay")
    p.add_argument("--native-from", type=float, default=0.7, help="share of the steps before native rounding")
    p.add_argument("--bias-rate", type=float, default=2e-3)
    p.add_argument("--eval-every", type=int, default=250)
    p.add_argument("--dev-rows", type=int, default=16, help="held-out rows per domain")
    p.add_argument("--device", default="cuda")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--compile", type=int, default=1)
    p.add_argument("--cache", default="", help="compile-cache artifact to load when it exists")
    p.add_argument("--small", type=int, default=0, help="1: a reduced configuration for tests on a CPU")
    return p.parse_args()


def make_config(tokenizer, small):
    classes = engram_map.token_map(tokenizer)
    changes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "engram_vocab_size": 50} if small else {}
    root = model_pocket.root_config(tokenizer.get_vocab_size(with_added_tokens=True), max(classes) + 1,
                                    tokenizer.token_to_id("<｜System｜>"), **changes)
    return root, Config.from_text(root["text_config"]), classes


def learning_rate(args, step):
    warm = min(1.0, (step + 1) / args.warmup)
    left = (args.total_steps - step) / max(1.0, args.total_steps * (1 - args.decay_from))
    return args.lr * warm * min(1.0, max(left, 0.0))


class Trainer:
    def __init__(self, args):
        self.args, device = args, args.device
        root, cfg, classes = make_config(Tokenizer.from_file(args.tokenizer), args.small)
        self.root, self.cfg = root, cfg
        self.net = model.Network(cfg, model_engram.Hasher(cfg, classes, device), device)
        everything = model.initialise(cfg, args.seed, device)
        self.params = {n: v for n, v in everything.items() if not n.startswith("mtp.")}
        self.generator = torch.Generator().manual_seed(args.seed)
        self.step, self.rewarm = 0, -1
        if args.resume and not (args.exact and os.path.exists(args.exact)):
            folder, stem = os.path.split(args.resume)
            self.step, values, _ = train_state.load_compact(folder, stem)
            self.params = {n: values[n].to(device) for n in self.params}
            self.rewarm = self.step
        for n, v in self.params.items():
            v.requires_grad_(not n.endswith("gate.bias"))
        self.optimiser = Optimiser(self.params)
        if args.exact and os.path.exists(args.exact):
            self.step, _ = train_state.load_exact(args.exact, self.params, self.optimiser, self.generator)
        self.rows = train_data.TrainRows(args.data, args.total_steps, args.batch, device)
        self.dev = train_data.DevRows(args.data, args.batch, device, args.dev_rows)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.prefixes = [f"layers.{k}" for k in range(cfg.num_hidden_layers)]
        os.makedirs(args.out, exist_ok=True)
        self.log = open(os.path.join(args.out, f"{args.log}.jsonl"), "a")

    def native(self):
        return self.step >= self.args.native_from * self.args.total_steps

    def write(self, **fields):
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in fields.items()})
        self.log.write(line + "\n")
        self.log.flush()
        print(line[:420], flush=True)

    def train_step(self):
        """One update; returns (loss, index loss, gradient norm, loads [layers, experts]) as tensors."""
        args, cfg = self.args, self.cfg
        x, y, weight = self.rows.get(self.step)
        native = self.native()
        w = model.effective(cfg, self.params, self.dtype, quantised=native)
        out = self.net.forward(w, x, dense=self.step < args.dense_steps, kvq=native, train_index=True)
        each = model_ops.token_loss(out["hidden"].flatten(0, 1), w["head.weight"], y.flatten())
        loss = (each * weight.flatten()).sum() / weight.sum()
        (loss + 0.1 * out["index_loss"]).backward()
        lr = learning_rate(args, self.step)
        if self.rewarm >= 0:
            lr *= min(1.0, (self.step - self.rewarm + 1) / 60)
        norm = self.optimiser.step(lr)
        loads = torch.stack([c.float().mean((0, 1)) for c in out["loads"]])
        balance(self.params, self.prefixes, loads, cfg.num_experts_per_tok, args.bias_rate)
        self.step += 1
        return loss.detach(), out["index_loss"].detach(), norm, loads

    def evaluate(self, native):
        w = model.effective(self.cfg, self.params, self.dtype, quantised=native)
        w = {k: v.detach().requires_grad_(v.requires_grad) for k, v in w.items()}  # same compiled graphs as training

        def loss_of(x, y):
            out = self.net.forward(w, x, dense=self.step <= self.args.dense_steps, kvq=native)
            loss = model_ops.token_loss(out["hidden"].flatten(0, 1), w["head.weight"], y.flatten())
            return loss.detach().view(y.shape)

        return {k: round(v, 4) for k, v in self.dev.evaluate(loss_of).items()}

    def report(self, window, seconds):
        """One log line from the last steps; synchronises."""
        loss, index, norm = (torch.stack([r[i] for r in window]).mean().item() for i in range(3))
        tokens = self.step * self.args.batch * (train_data.ROW - 1)
        self.write(step=self.step, tokens=tokens, loss=loss, index_loss=index, grad_norm=norm,
                   lr=learning_rate(self.args, self.step - 1), native=int(self.native()),
                   tok_s=round(len(window) * self.args.batch * (train_data.ROW - 1) / seconds))

    def run(self):
        args, begin = self.args, time.time()
        stop = min(args.stop_step or args.total_steps, args.total_steps)
        window, mark, loads = [], time.time(), None
        while self.step < stop and time.time() - begin < args.seconds:
            window.append(self.train_step())
            if self.step % 25 == 0 or self.step <= 3 or self.step % args.eval_every == 0:
                self.report(window, time.time() - mark)
                loads = torch.stack([r[3] for r in window]).mean(0)
                if not torch.isfinite(window[-1][0]):
                    raise FloatingPointError(f"loss is not finite at step {self.step}")
                window, mark = [], time.time()
            if self.step % args.eval_every == 0:
                self.write(step=self.step, dev=self.evaluate(self.native()),
                           load_min=[round(v, 3) for v in loads.amin(1).tolist()],
                           load_max=[round(v, 3) for v in loads.amax(1).tolist()])
                mark = time.time()
        self.finish(loads)

    def finish(self, loads):
        args = self.args
        final = {"step": self.step, "dev_native": self.evaluate(True), "dev_float": self.evaluate(False)}
        if loads is not None:
            final["loads"] = [[round(v, 4) for v in row] for row in loads.tolist()]
        if args.exact:
            train_state.save_exact(args.exact, self.step, self.params, self.optimiser, self.generator, {})
        train_state.save_compact(args.out, "backbone", self.step, self.params, {"root": self.root})
        self.write(**final)


def main():
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = True
    if args.compile:
        if args.cache and os.path.exists(args.cache):
            torch.compiler.load_cache_artifacts(open(args.cache, "rb").read())
        model_ops.compile_ops()
    begin = time.time()
    trainer = Trainer(args)
    print(f"ready after {time.time() - begin:.1f} s, step {trainer.step}", flush=True)
    trainer.run()
    if args.compile:
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is not None:
            with open(os.path.join(args.out, "cache.bin"), "wb") as handle:
                handle.write(artifacts[0])


if __name__ == "__main__":
    main()
