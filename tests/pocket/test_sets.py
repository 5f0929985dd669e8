"""The shipped data sets of the pocket model: hashes, schema, domains, sizes, disjoint documents and 13-grams.

Plain unittest with numpy. The 13-gram rule is restated here from docs/pocket-data.md, independent of tools/pocket/sets.py.
"""

import hashlib
import json
import pathlib
import re
import unittest

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "models" / "pocket" / "data"
SETS = ["calibration", "panel", "sensitivity", "shifted"]
DOMAINS = {"prose", "encyc", "docs", "multi", "code", "struct"}
SHIFTED_SOURCES = {"scofield", "devil", "apache-en", "libreoffice-it", "go-archive", "tzdata"}
N = 13


def load(name):
    with open(DATA / f"{name}.jsonl", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def ids_of_tokens():
    added = json.loads((ROOT / "models/pocket/tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return {entry["content"]: entry["id"] for entry in added}


def content_grams(row, user_id, dsml_id):
    """13-grams of a row as tuples; chat format (system turn, calls markup) does not count."""
    ids = row["ids"]
    first = ids.index(user_id) if row["mode"] != "raw" else 0
    grams = set()
    for i in range(first, len(ids) - N + 1):
        gram = tuple(ids[i:i + N])
        if row["mode"] == "raw" or dsml_id not in gram:
            grams.add(gram)
    return grams


def document_of(row):
    """Row id without the token offset: one corpus document or one conversation."""
    return re.sub(r"@\d+$", "", row["id"])


class Sets(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rows = {name: load(name) for name in SETS}
        cls.special = ids_of_tokens()
        cls.vocab = len(json.loads((ROOT / "models/pocket/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
        cls.vocab += sum(1 for i in cls.special.values() if i >= cls.vocab)

    def test_vocabulary_is_exact(self):
        self.assertEqual(self.vocab, 6144)
        self.assertEqual(max(self.special.values()), 6143)

    def test_sha256sums(self):
        lines = (DATA / "SHA256SUMS").read_text().splitlines()
        self.assertEqual(len(lines), len(SETS))
        for line in lines:
            digest, name = line.split()
            self.assertEqual(hashlib.sha256((DATA / name).read_bytes()).hexdigest(), digest, name)
        self.assertEqual({line.split()[1] for line in lines}, {f"{name}.jsonl" for name in SETS})

    def test_schema(self):
        for name, rows in self.rows.items():
            self.assertEqual(len({r["id"] for r in rows}), len(rows), f"{name}: ids are not unique")
            for row in rows:
                self.assertEqual(set(row), {"id", "domain", "mode", "ids", "role_mask", "source", "licence"})
                self.assertIn(row["domain"], DOMAINS)
                self.assertIn(row["mode"], {"raw", "chat", "think"})
                self.assertEqual(len(row["ids"]), len(row["role_mask"]))
                self.assertTrue(64 <= len(row["ids"]) <= 1024, row["id"])
                self.assertTrue(all(isinstance(i, int) and 0 <= i < self.vocab for i in row["ids"]), row["id"])
                self.assertEqual(row["ids"][0], 0, f"{row['id']}: does not begin with BOS")
                self.assertNotIn(0, row["ids"][1:], f"{row['id']}: holds a second BOS")
                self.assertTrue(row["licence"])

    def test_roles(self):
        user, assistant = self.special["<｜User｜>"], self.special["<｜Assistant｜>"]
        close, eos = self.special["</think>"], self.special["<｜end▁of▁sentence｜>"]
        for rows in self.rows.values():
            for row in rows:
                roles, ids = row["role_mask"], row["ids"]
                if row["mode"] == "raw":
                    self.assertEqual(set(roles), {3}, row["id"])
                    continue
                self.assertLessEqual(set(roles), {0, 1, 2}, row["id"])
                self.assertEqual(1 in roles, row["mode"] == "think", row["id"])
                self.assertEqual(ids[-1], eos, row["id"])
                for token, role in zip(ids, roles):
                    if token in (user, assistant):
                        self.assertEqual(role, 0, row["id"])
                    if token == eos:
                        self.assertEqual(role, 2, row["id"])
                self.assertEqual(sum(1 for t, r in zip(ids, roles) if t == close and r == 1), sum(
                    1 for i in range(1, len(ids)) if roles[i - 1] == 0 and roles[i] == 1), row["id"])

    def test_sizes_and_domains(self):
        wanted = {"calibration": 131072, "panel": 65536, "sensitivity": 16384, "shifted": 16384}
        for name, rows in self.rows.items():
            total = sum(len(r["ids"]) for r in rows)
            self.assertTrue(wanted[name] <= total <= 1.06 * wanted[name], f"{name}: {total} tokens, expected about {wanted[name]}")
            self.assertEqual({r["domain"] for r in rows}, DOMAINS, name)
            self.assertTrue(any(len(r["ids"]) == 1024 for r in rows), f"{name}: no row of 1024 tokens")
            for mode in ("chat", "think"):
                self.assertTrue(any(r["mode"] == mode for r in rows), f"{name}: no row in mode {mode}")
        for domain in DOMAINS:
            self.assertGreaterEqual(sum(r["domain"] == domain for r in self.rows["panel"]), 20, domain)
        languages = {r["source"] for r in self.rows["panel"] if r["domain"] == "multi"}
        self.assertGreaterEqual(len(languages), 4)

    def test_documents_are_disjoint(self):
        owner = {}
        for name, rows in self.rows.items():
            for document in {document_of(r) for r in rows}:
                self.assertNotIn(document, owner, f"{document} is in {name} and {owner.get(document)}")
                owner[document] = name

    def test_shifted_sources_occur_nowhere_else(self):
        for name, rows in self.rows.items():
            sources = {r["source"] for r in rows} - {"dialogue"}
            if name == "shifted":
                self.assertEqual(sources, SHIFTED_SOURCES)
            else:
                self.assertFalse(sources & SHIFTED_SOURCES, name)

    def test_no_shared_13_gram(self):
        user, dsml = self.special["<｜User｜>"], self.special["｜DSML｜"]
        owner = {}
        for name, rows in self.rows.items():
            for row in rows:
                for gram in content_grams(row, user, dsml):
                    self.assertEqual(owner.setdefault(gram, name), name, f"{row['id']} shares a 13-gram with {owner[gram]}")
        self.assertGreater(len(owner), 150_000)

    def test_licences_are_listed(self):
        table = {}
        for line in (ROOT / "models/pocket/LICENCES.md").read_text(encoding="utf-8").splitlines():
            cells = [c.strip() for c in line.strip("|").split("|")]
            if len(cells) == 9 and cells[5].isdigit():
                table[cells[1]] = (cells[3], [int(c) for c in cells[5:9]])
        for column, name in enumerate(["calibration", "sensitivity", "panel", "shifted"]):
            counts = dict.fromkeys(table, 0)
            for row in self.rows[name]:
                self.assertEqual(table[row["source"]][0], row["licence"], row["id"])
                counts[row["source"]] += 1
            self.assertEqual(counts, {source: entry[1][column] for source, entry in table.items()}, name)

    def test_fits(self):
        self.assertLess(sum(p.stat().st_size for p in DATA.iterdir()), 2_000_000)
        self.assertTrue(np.mean([len(r["ids"]) for r in self.rows["calibration"]]) > 512)


if __name__ == "__main__":
    unittest.main()
