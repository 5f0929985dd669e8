"""Turns the packed training text and the dialogue generator into token streams for training.

Command: tokenize_corpus.py TEXT_XZ TOKENIZER_JSON OUT_DIR [--dialogues N] [--jobs J] [--seed S]
Writes to OUT_DIR:
  train.npy   uint16 stream; every document begins with BOS; the documents of one source are contiguous, in a seeded order
  roles.npy   uint8 beside it: 0 prompt, 1 reasoning, 2 answer (dialogues), 3 raw text
  meta.json   sources [{name, domain, begin, end, documents, bytes}], doc_starts (token index of every BOS), domains
  dev_<domain>.npy, dev_<domain>_roles.npy, dev_bytes.json   held-out streams of documents that are not in training
Dialogues form the domain `dialogue`. Needs numpy and tokenizers, nothing else.
"""

import argparse
import json
import lzma
import multiprocessing
import os
import pathlib
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import dialogue  # noqa: E402
from dialogue_format import ROLE_RAW, role_mask  # noqa: E402

BOS_ID = 0
DEV_DIALOGUES = 800
STATE = {}


def start_worker(tokenizer_path):
    STATE["tok"] = Tokenizer.from_file(tokenizer_path)
    STATE["special"] = {t: STATE["tok"].token_to_id(t) for t in ("<｜Assistant｜>", "<think>", "</think>", "<｜end▁of▁sentence｜>")}


def encode_raw(texts):
    """uint16 arrays of plain documents: BOS + ids. Chat markers inside the text are tokenised as in any other reader."""
    out = []
    for text in texts:
        ids = STATE["tok"].encode(text, add_special_tokens=False).ids
        out.append(np.array([BOS_ID] + ids, dtype=np.uint16))
    return out


def encode_dialogues(job):
    """(ids, roles, bytes) of dialogues begin..end-1 of a split."""
    split, begin, end = job
    out = []
    for index in range(begin, end):
        text = dialogue.conversation(split, index)["text"]
        ids = STATE["tok"].encode(text, add_special_tokens=False).ids
        out.append((np.array(ids, dtype=np.uint16), np.array(role_mask(ids, STATE["special"]), dtype=np.uint8), len(text.encode())))
    return out


def chunks_by_size(rows, limit=1_500_000):
    """Groups consecutive rows so that a group holds about `limit` characters of text."""
    group, size = [], 0
    for row in rows:
        group.append(row)
        size += len(row[3])
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_dev(out_dir, dev):
    sizes = {}
    for domain, parts in sorted(dev.items()):
        np.save(out_dir / f"dev_{domain}.npy", np.concatenate([p[0] for p in parts]))
        np.save(out_dir / f"dev_{domain}_roles.npy", np.concatenate([p[1] for p in parts]))
        sizes[domain] = {"tokens": int(sum(len(p[0]) for p in parts)), "bytes": int(sum(p[2] for p in parts)), "documents": len(parts)}
    (out_dir / "dev_bytes.json").write_text(json.dumps(sizes, indent=1) + "\n")
    return sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text_xz")
    parser.add_argument("tokenizer_json")
    parser.add_argument("out_dir")
    parser.add_argument("--dialogues", type=int, default=160_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begin_time = time.time()
    out_dir = pathlib.Path(args.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    pool = multiprocessing.get_context("fork").Pool(args.jobs, start_worker, (args.tokenizer_json,))
    step = 500
    jobs = [("train", i, min(i + step, args.dialogues)) for i in range(0, args.dialogues, step)]
    talk = pool.imap(encode_dialogues, jobs + [("dev", 0, DEV_DIALOGUES)])
    with lzma.open(args.text_xz, "rt", encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle]
    groups = list(chunks_by_size(rows))
    encoded = pool.imap(encode_raw, [[r[3] for r in g] for g in groups])
    by_source, dev = {}, {}
    for group, arrays in zip(groups, encoded):
        for (part, domain, source, text), ids in zip(group, arrays):
            item = (ids, np.full(len(ids), ROLE_RAW, dtype=np.uint8), len(text.encode()))
            if part == "train":
                by_source.setdefault((domain, source), []).append(item)
            else:
                dev.setdefault(domain, []).append(item)
    for (split, _, _), items in zip(jobs + [("dev", 0, 0)], talk):
        (by_source.setdefault(("dialogue", "dialogue"), []) if split == "train" else dev.setdefault("dialogue", [])).extend(items)
    pool.close()
    rng = np.random.default_rng(args.seed)
    ids, roles, doc_starts, sources, at = [], [], [], [], 0
    for (domain, source), items in by_source.items():
        first = at
        for i in rng.permutation(len(items)):
            ids.append(items[i][0])
            roles.append(items[i][1])
            doc_starts.append(at)
            at += len(items[i][0])
        sources.append({"name": source, "domain": domain, "begin": first, "end": at, "documents": len(items), "bytes": sum(x[2] for x in items)})
    np.save(out_dir / "train.npy", np.concatenate(ids))
    np.save(out_dir / "roles.npy", np.concatenate(roles))
    domains = list(dict.fromkeys(s["domain"] for s in sources))
    (out_dir / "meta.json").write_text(json.dumps({"domains": domains, "sources": sources, "doc_starts": doc_starts}) + "\n")
    sizes = write_dev(out_dir, dev)
    print("| domain | source | documents | bytes | tokens |\n|---|---|---:|---:|---:|")
    for s in sources:
        print(f"| {s['domain']} | {s['name']} | {s['documents']} | {s['bytes']} | {s['end'] - s['begin']} |")
    print(f"train: {at} tokens, {len(doc_starts)} documents; dev: {json.dumps(sizes)}")
    print(f"{time.time() - begin_time:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
