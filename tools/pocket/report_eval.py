"""Measures an exported pocket model and writes the numbers as JSON; report.py turns them into docs/pocket.md.

Usage: report_eval.py --model models/pocket --data TOKEN_DIR --out eval.json [--device cuda]
Perplexity on the panel and the shifted panel beside n-gram baselines, routing shares, ablations, drafter
acceptance (greedy verification on text the model itself generated from panel prompts), sample replies.
Everything runs in float32 from the stored files.
"""
import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import dialogue_format
import engram_map
import model
import model_engram
import native_checkpoint
import train_data
from drafter import Drafter
from report_ngram import NGram
from tokenizers import Tokenizer

QUESTIONS = ["What is the capital of France?", "Who are you?", "What is 3 + 4?", "Sort these numbers: 5, 2, 9",
             "Tell me a story about a fox.", "Write a JSON object with the keys name and age."]


class Model:
    def __init__(self, folder, device):
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.cfg, params = native_checkpoint.load(folder)
        classes = engram_map.token_map(self.tokenizer)
        self.net = model.Network(self.cfg, model_engram.Hasher(self.cfg, classes, device), device)
        self.params = {n: v.to(device) for n, v in params.items()}
        self.w = model.effective(self.cfg, self.params)
        self.wd = model.effective(self.cfg, self.params, drafter=True)
        self.drafter, self.device = Drafter(self.net), device

    def losses(self, rows, batch=32, w=None, **options):
        """Nats of every target; rows int64 [R,S] -> float32 [R,S-1]."""
        w, out = w or self.w, []
        for i in range(0, len(rows), batch):
            part = rows[i:i + batch]
            logits = self.net.logits(w, self.net.forward(w, part, **options)["hidden"])[:, :-1]
            out.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none").view(len(part), -1))
        return torch.cat(out)

    def generate(self, prompts, count):
        """Greedy continuations, whole forward per token; returns one id list per prompt (stops after EOS)."""
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        width = int(lengths.max()) + count
        tokens = torch.full((len(prompts), width), self.cfg.engram_pad_token_id, dtype=torch.long, device=self.device)
        for i, p in enumerate(prompts):
            tokens[i, :len(p)] = torch.tensor(p)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        at = lengths.clone()
        row = torch.arange(len(prompts), device=self.device)
        for _ in range(count):
            seen = int(at.max())
            hidden = self.net.forward(self.w, tokens[:, :seen])["hidden"][row, at - 1]
            following = self.net.logits(self.w, hidden).argmax(-1)
            tokens[row, at] = torch.where(done, tokens[row, at], following)
            at = at + (~done).long()
            done |= following == 1
            if bool(done.all()):
                break
        return [tokens[i, :at[i]].tolist() for i in range(len(prompts))]


def read_rows(path):
    with open(path) as handle:
        return [json.loads(line) for line in handle]


def by_domain(records, losses):
    """Token-weighted mean nats per domain; losses: one float tensor per record."""
    out = {}
    for domain in sorted({r["domain"] for r in records}):
        out[domain] = torch.cat([v for r, v in zip(records, losses) if r["domain"] == domain]).double().mean().item()
    out["all"] = torch.cat(losses).double().mean().item()
    return out


def equal_lengths(records):
    """Index lists of records with equal token counts."""
    groups = {}
    for i, r in enumerate(records):
        groups.setdefault(len(r["ids"]), []).append(i)
    return list(groups.values())


def perplexities(m, folder, baseline, length=0):
    """Nats per domain of model, cache roundings, unigram and 5-gram; length > 0 keeps rows of that many tokens."""
    out = {}
    for name in ("panel", "shifted"):
        records = read_rows(os.path.join(folder, "data", f"{name}.jsonl"))
        records = [r for r in records if not length or len(r["ids"]) == length]
        if not records:
            continue
        kinds = {"model": lambda rows: m.losses(rows, batch=8), "kvq": lambda rows: m.losses(rows, batch=8, kvq=True),
                 "unigram": lambda rows: baseline.nats(rows, 1), "five": lambda rows: baseline.nats(rows, 5)}
        entry = {"rows": len(records), "tokens": sum(len(r["ids"]) - 1 for r in records)}
        for kind, measure in kinds.items():
            losses = [None] * len(records)
            for group in equal_lengths(records):
                rows = torch.tensor([records[i]["ids"] for i in group], device=m.device)
                for i, value in zip(group, measure(rows)):
                    losses[i] = value
            entry[kind] = by_domain(records, losses)
            print(name, kind, round(entry[kind]["all"], 4), flush=True)
        out[name] = entry
    return out


def routing(m, rows):
    """Per layer: least and most used share (of tokens), normalised entropy, on the panel."""
    total = None
    for i in range(0, len(rows), 32):
        out = m.net.forward(m.w, rows[i:i + 32])
        part = torch.stack([c.float().sum((0, 1)) for c in out["loads"]])
        total = part if total is None else total + part
    share = total / rows.numel()
    p = share / share.sum(1, keepdim=True)
    entropy = -(p * torch.log(p.clamp_min(1e-12))).sum(1) / np.log(p.shape[1])
    return [{"least": s.min().item(), "most": s.max().item(), "entropy": e.item(), "shares": s.tolist()}
            for s, e in zip(share, entropy)]


def ablations(m, rows):
    """Mean nats with one mechanism changed."""
    flat = {k: torch.zeros_like(v) if k.endswith("gate.bias") else v for k, v in m.w.items()}
    out = {"complete": m.losses(rows).mean().item()}
    for name in ("engram", "sink", "compressed"):
        out[f"without {name}"] = m.losses(rows, skip=(name,)).mean().item()
    out["every visible entry (no index pruning)"] = m.losses(rows, dense=True).mean().item()
    out["without router bias"] = m.losses(rows, w=flat).mean().item()
    no_mix = {k: (v * 0 if k.endswith("_scale") else v) for k, v in m.w.items()}
    out["static stream mixing (hc scale 0)"] = m.losses(rows, w=no_mix).mean().item()
    return out


def accepted_rounds(m, sequences, starts, markov=True):
    """Greedy verification on self-generated text: committed tokens of successive rounds, per sequence.

    In such text the backbone's arg-max after any prefix is the next token, so a draft is accepted exactly while
    it equals the text; one bonus token follows.
    """
    n, rounds = m.cfg.dspark_block_size, []
    for ids, start in zip(sequences, starts):
        if len(ids) < start + n + 2:
            rounds.append([])
            continue
        tokens = torch.tensor([ids], device=m.device)
        taps = m.net.forward(m.w, tokens)["taps"]
        keys = m.drafter.context(m.wd, taps)[1]
        anchors = torch.arange(start - 1, len(ids) - n - 1, device=m.device)[None]
        drafts = m.drafter.draft(m.wd, m.w["embed.weight"], m.w["head.weight"], keys, anchors,
                                 tokens[:, start:len(ids) - n], markov=markov)[0][0, :, 1:]
        wanted = tokens[0, anchors[0][:, None] + 2 + torch.arange(n, device=m.device)]
        good = (drafts == wanted).long().cumprod(-1).sum(-1).tolist()
        p, mine = 0, []
        while p < len(good):
            mine.append(good[p] + 1)
            p += good[p] + 1
        rounds.append(mine)
    return rounds


def drafting(m, folder, prompt_length=128, count=96):
    """Acceptance on greedy continuations of the panel rows, per domain, with and without the Markov term."""
    records = [r for r in read_rows(os.path.join(folder, "data", "panel.jsonl")) if len(r["ids"]) > prompt_length]
    prompts = [r["ids"][:prompt_length] for r in records]
    texts = m.generate(prompts, count)
    out, starts = {}, [prompt_length] * len(texts)
    for name, markov in (("complete", True), ("without markov", False)):
        rounds = accepted_rounds(m, texts, starts, markov)
        table = {}
        for domain in sorted({r["domain"] for r in records}):
            mine = [x for r, row in zip(records, rounds) if r["domain"] == domain for x in row]
            table[domain] = {"rounds": len(mine), "committed": sum(mine) / max(1, len(mine))}
        flat = [x for row in rounds for x in row]
        table["all"] = {"rounds": len(flat), "committed": sum(flat) / max(1, len(flat)),
                        "histogram": np.bincount(flat, minlength=m.cfg.dspark_block_size + 2).tolist()}
        out[name] = table
    return out


def chats(m):
    out = []
    for thinking in (False, True):
        prompts = []
        for question in QUESTIONS:
            text = dialogue_format.render([{"role": "user", "content": question}], thinking=thinking)
            prompts.append(m.tokenizer.encode(text, add_special_tokens=False).ids)
        for question, prompt, ids in zip(QUESTIONS, prompts, m.generate(prompts, 120)):
            out.append({"thinking": thinking, "question": question,
                        "reply": m.tokenizer.decode(ids[len(prompt):], skip_special_tokens=False)})
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sources", default="", help="folder with data/ and tokenizer.json when not the model folder")
    parser.add_argument("--length", type=int, default=0, help="perplexity on rows of this many tokens only")
    parser.add_argument("--only-perplexity", action="store_true", help="update an existing file (CPU is enough)")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    begin, source = time.time(), args.sources or args.model
    m, result = Model(args.model, args.device), {}
    if args.only_perplexity:
        with open(args.out) as handle:
            result = json.load(handle)

    def stage(name, value):
        result[name] = value
        with open(args.out, "w") as handle:
            json.dump(result, handle)
        print(f"{name}: {time.time() - begin:.1f} s", flush=True)

    with torch.no_grad():
        if not args.only_perplexity:
            stage("chats", chats(m))
            stage("drafting", drafting(m, source))
            panel = torch.tensor([r["ids"] for r in read_rows(os.path.join(source, "data", "panel.jsonl"))
                                  if len(r["ids"]) == 1024], device=args.device)
            stage("routing", routing(m, panel))
            dev = train_data.DevRows(args.data, 32, args.device, per_domain=8)
            stage("ablations", ablations(m, dev.rows[:dev.count, :-1]))
        train = torch.from_numpy(np.load(os.path.join(args.data, "train.npy")).astype(np.int64)).to(args.device)
        baseline = NGram(train, m.cfg.vocab_size)
        stage("perplexity", perplexities(m, source, baseline, args.length))


if __name__ == "__main__":
    main()
