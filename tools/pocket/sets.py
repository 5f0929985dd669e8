"""Builds the shipped data sets of the pocket model: calibration, sensitivity, panel, shifted.

Each is JSON lines {id, domain, mode, ids, role_mask, source, licence}; every row starts with BOS and comes from one document or
one conversation. Documents are disjoint by corpus.py; no 13-gram of ids is shared by two sets, and windows that share one with the
training stream are avoided where the document leaves a choice. Exempt as chat format, not content: 13-grams that begin in
the system turn or hold the DSML marker. Command: sets.py PARTS_DIR TOKENS_DIR MODEL_DIR (prints the report).
"""

import argparse
import collections
import hashlib
import json
import pathlib
import random

import numpy as np
from tokenizers import Tokenizer

import dialogue
from dialogue_format import ASSISTANT, DSML, EOS, ROLE_RAW, THINK_CLOSE, THINK_OPEN, USER, role_mask
from licences import LICENCES

N = 13
ORDER = ["panel", "shifted", "sensitivity", "calibration"]
TEXT_DOMAINS = ["prose", "encyc", "docs", "multi", "code"]

# Rows per domain as {tokens in the row: rows}; structured text adds dialogues up to DIALOGUE_TOKENS.
ROWS = {"calibration": {1024: 16, 512: 11}, "sensitivity": {1024: 2, 512: 1, 256: 1}, "panel": {1024: 4, 512: 8, 256: 10},
        "shifted": {1024: 1, 512: 2, 256: 3}}
MULTI_ROWS = {"calibration": {1024: 8, 512: 12, 256: 22, 128: 16}, "sensitivity": {1024: 1, 512: 2, 256: 2, 128: 2},
              "panel": {1024: 4, 512: 5, 256: 12, 128: 8},
              "shifted": {1024: 1, 512: 2, 256: 3}}
STRUCT_ROWS = {"calibration": {1024: 6, 512: 4}, "sensitivity": {1024: 1}, "panel": {1024: 2, 512: 3, 256: 4}, "shifted": {1024: 1, 512: 1}}
DIALOGUE_TOKENS = {"calibration": 13000, "sensitivity": 1500, "panel": 7200, "shifted": 1400}
# Share of a window's 13-grams that may also occur in training before the next source in turn is tried.
TRAIN_SHARE = {"panel": 0.01, "shifted": 0.01, "sensitivity": 0.03, "calibration": 0.03}
MIN_DIALOGUE, MAX_DIALOGUE = 96, 1024
CANDIDATES = 6000

MULTIPLIERS = np.random.default_rng(13).integers(1, 1 << 63, N, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def gram_hashes(ids):
    """uint64 [len - 12] hash of every 13-gram of ids (empty when shorter)."""
    ids = np.asarray(ids).astype(np.uint64)
    count = len(ids) - N + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    out = np.zeros(count, dtype=np.uint64)
    for k in range(N):
        out += (ids[k:k + count] + np.uint64(1)) * MULTIPLIERS[k]
    return out ^ (out >> np.uint64(29))


def train_hashes(tokens_dir):
    """Sorted hashes of all 13-grams of the training stream."""
    train = np.load(pathlib.Path(tokens_dir) / "train.npy", mmap_mode="r")
    step = 4_000_000
    parts = [gram_hashes(train[i:i + step + N - 1]) for i in range(0, len(train), step)]
    out = np.concatenate(parts)
    out.sort()
    return out


def in_sorted(values, table):
    """Boolean [len(values)]: is the value in the sorted table."""
    if len(table) == 0:
        return np.zeros(len(values), dtype=bool)
    at = np.searchsorted(table, values)
    at[at == len(table)] = 0
    return table[at] == values


class Builder:
    """Accepts rows, keeping the 13-grams of accepted rows per set so that no gram is used by two sets."""

    def __init__(self, parts_dir, tokens_dir, model_dir):
        self.parts_dir = pathlib.Path(parts_dir)
        self.tok = Tokenizer.from_file(str(pathlib.Path(model_dir) / "tokenizer.json"))
        self.special = {t: self.tok.token_to_id(t) for t in (USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, EOS, DSML)}
        self.train = train_hashes(tokens_dir)
        self.other_sets = np.empty(0, dtype=np.uint64)
        self.own_set = []
        self.rows = collections.defaultdict(list)
        self.shared_with_train = collections.Counter()
        self.grams = collections.Counter()
        self.dropped = collections.Counter()

    def content_mask(self, ids, is_dialogue):
        """Boolean per 13-gram: does it count in the overlap check."""
        count = max(len(ids) - N + 1, 0)
        mask = np.ones(count, dtype=bool)
        if is_dialogue and count:
            first_user = ids.index(self.special[USER])
            mask[:first_user] = False
            hit = np.convolve(np.asarray(ids) == self.special[DSML], np.ones(N, dtype=int))[N - 1:N - 1 + count] > 0
            mask[hit] = False
        return mask

    def close_set(self):
        """Ends a set: its 13-grams are closed to the sets built after it."""
        self.other_sets = np.unique(np.concatenate([self.other_sets] + self.own_set))
        self.own_set = []

    def foreign(self, hashes):
        """Boolean per hash: already used by a row of another set."""
        return in_sorted(hashes, self.other_sets)

    def accept(self, name, domain, mode, ids, roles, source, document, hashes, counted):
        self.own_set.append(hashes[counted])
        key = (name, domain + ("/dialogue" if mode != "raw" else ""))
        self.grams[key] += int(counted.sum())
        self.shared_with_train[key] += int(in_sorted(hashes[counted], self.train).sum())
        self.rows[name].append({"id": f"{source}:{document}", "domain": domain, "mode": mode, "ids": [int(i) for i in ids],
                                "role_mask": [int(r) for r in roles], "source": source, "licence": LICENCES[source][1]})

    def text_rows(self, name, domain, wanted):
        """Windows from the documents of one domain, sources in turn, the cleanest window of an unused document first."""
        by_source = collections.defaultdict(list)
        with open(self.parts_dir / f"{name}.jsonl", encoding="utf-8") as handle:
            for line in handle:
                record = json.loads(line)
                if record["domain"] == domain:
                    ids = np.array(self.tok.encode(record["text"], add_special_tokens=False).ids, dtype=np.int64)
                    hashes = gram_hashes(ids)
                    sums = [np.concatenate([[0], np.cumsum(bad)]) for bad in (self.foreign(hashes), in_sorted(hashes, self.train))]
                    by_source[record["source"]].append((record["doc"], ids, np.zeros(len(ids), dtype=bool), *sums))
        sources = sorted(by_source)
        rng = random.Random(f"sets:{name}:{domain}")
        for documents in by_source.values():
            rng.shuffle(documents)
        turn = 0
        for length in sorted(wanted, reverse=True):
            for _ in range(wanted[length]):
                if not self.take_window(name, domain, by_source, sources, turn, length, rng):
                    raise SystemExit(f"sets: {name}/{domain}: no document leaves a window of {length} tokens")
                turn += 1

    def take_window(self, name, domain, by_source, sources, turn, length, rng):
        """Accepts the window with the fewest 13-grams in common with training; False when no document is long enough."""
        allowed = int(TRAIN_SHARE[name] * (length - N))
        best = None
        for shift in range(len(sources)):
            source = sources[(turn + shift) % len(sources)]
            for document, ids, used, bad_sets, bad_train in by_source[source]:
                taken = np.concatenate([[0], np.cumsum(used)])
                starts = list(range(0, len(ids) - length + 2, 64))
                rng.shuffle(starts)
                for at in starts[:200]:
                    end = at + length - 1
                    if taken[end] - taken[at] or bad_sets[end - N + 1] - bad_sets[at]:
                        continue
                    shared = int(bad_train[end - N + 1] - bad_train[at])
                    cost = (max(shared - allowed, 0), bool(used.any()), shared, shift)
                    if best is None or cost < best[0]:
                        best = (cost, source, document, ids, used, at)
            if best and best[0][:2] == (0, False):
                break
        if best is None:
            return False
        _, source, document, ids, used, at = best
        used[at:at + length - 1] = True
        row = [0] + ids[at:at + length - 1].tolist()
        hashes = gram_hashes(row)
        counted = np.ones(len(hashes), dtype=bool)
        self.accept(name, domain, "raw", row, [ROLE_RAW] * len(row), source, f"{document}@{at}", hashes, counted)
        return True

    def dialogue_rows(self, name, budget):
        """Conversations of the set's own random stream; those sharing least with training first, kinds in turn."""
        pools = collections.defaultdict(list)
        for index in range(CANDIDATES):
            talk = dialogue.conversation(name, index)
            ids = self.tok.encode(talk["text"], add_special_tokens=False).ids
            if MIN_DIALOGUE <= len(ids) <= MAX_DIALOGUE:
                hashes = gram_hashes(ids)
                counted = self.content_mask(ids, True)
                shared = int(in_sorted(hashes[counted], self.train).sum())
                pools[(talk["kind"], talk["mode"])].append((shared / max(int(counted.sum()), 1), index, ids, hashes, counted))
        for pool in pools.values():
            pool.sort(key=lambda item: item[:2], reverse=True)
        total, keys = 0, sorted(pools)
        while total < budget:
            if not any(pools.values()):
                raise SystemExit(f"sets: {name}: dialogues run out at {total} of {budget} tokens")
            for key in keys:
                while pools[key]:
                    _, index, ids, hashes, counted = pools[key].pop()
                    if self.foreign(hashes[counted]).any():
                        self.dropped[name] += 1
                        continue
                    self.accept(name, "struct", key[1], ids, role_mask(ids, self.special), "dialogue", f"{key[0]}-{name}-{index}", hashes, counted)
                    total += len(ids)
                    break
                if total >= budget:
                    break


def overlap(rows_a, rows_b, builder):
    """Distinct counted 13-grams that occur in both lists of rows."""
    sides = []
    for rows in (rows_a, rows_b):
        parts = [gram_hashes(r["ids"])[builder.content_mask(r["ids"], r["mode"] != "raw")] for r in rows]
        sides.append(np.unique(np.concatenate(parts)))
    return len(np.intersect1d(*sides))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts_dir")
    parser.add_argument("tokens_dir")
    parser.add_argument("model_dir")
    args = parser.parse_args()
    builder = Builder(args.parts_dir, args.tokens_dir, args.model_dir)
    for name in ORDER:
        for domain in TEXT_DOMAINS:
            builder.text_rows(name, domain, (MULTI_ROWS if domain == "multi" else ROWS)[name])
        builder.text_rows(name, "struct", STRUCT_ROWS[name])
        builder.dialogue_rows(name, DIALOGUE_TOKENS[name])
        builder.close_set()
    data_dir = pathlib.Path(args.model_dir) / "data"
    data_dir.mkdir(parents=True, exist_ok=True)
    sums = []
    for name in sorted(ORDER):
        body = "".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in builder.rows[name]).encode()
        (data_dir / f"{name}.jsonl").write_bytes(body)
        sums.append(f"{hashlib.sha256(body).hexdigest()}  {name}.jsonl\n")
    (data_dir / "SHA256SUMS").write_text("".join(sums))
    print("| set | domain | rows | tokens | 1024-token rows | counted 13-grams | of these also in training |\n|---|---|---:|---:|---:|---:|---:|")
    for name in sorted(ORDER):
        for domain in TEXT_DOMAINS + ["struct", "struct/dialogue"]:
            rows = [r for r in builder.rows[name] if r["domain"] + ("/dialogue" if r["mode"] != "raw" else "") == domain]
            key = (name, domain)
            print(f"| {name} | {domain} | {len(rows)} | {sum(len(r['ids']) for r in rows)} | {sum(len(r['ids']) == 1024 for r in rows)} "
                  f"| {builder.grams[key]} | {builder.shared_with_train[key]} |")
        rows = builder.rows[name]
        print(f"| {name} | all | {len(rows)} | {sum(len(r['ids']) for r in rows)} | {sum(len(r['ids']) == 1024 for r in rows)} | | |")
    print("\n| pair | shared 13-grams |\n|---|---:|")
    for i, a in enumerate(sorted(ORDER)):
        for b in sorted(ORDER)[i + 1:]:
            print(f"| {a} / {b} | {overlap(builder.rows[a], builder.rows[b], builder)} |")
    print(f"\ndialogues dropped for sharing a 13-gram with another set: {dict(builder.dropped)}")


if __name__ == "__main__":
    main()
