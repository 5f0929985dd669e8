"""`espalier calibrate` through the real binary on the tiny golden checkpoint: shares, frequencies and Hessians against numpy, which
recomputes them from the checkpoint's own bytes and from the exported inputs of one layer; the same files for any number of threads and
any memory limit that it accepts; what does not fit is refused; the arithmetic of the real shape.
Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

from small_checkpoint import data_line, read_tensors, token_row, write_tensors

BIN = os.environ["ESPALIER_BIN"]
ROOT = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"])
TINY = ROOT / "tests/golden/model/tiny-a"
LAYER, LAYERS, EXPERTS, ACTIVE, D, FF = 3, 8, 8, 2, 256, 128
STAGES = 2
LENGTHS = [("a", 150), ("b", 40), ("a", 17), ("b", 64), ("a", 97), ("b", 33)]
TOP_P, LEAST = 0.6, 1
TYPES = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def run(*args):
    return subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def arrays(path):
    return {name: np.frombuffer(blob, TYPES[dtype]).reshape(shape) for name, (dtype, shape, blob) in read_tensors(path).items()}


def mxfp4(tensors, stem):
    """[out, in] in fp64: two codes a byte, low nibble first; one power of two per 32 inputs."""
    _, (out, half), blob = tensors[stem + ".weight"]
    codes = np.frombuffer(blob, np.uint8).reshape(out, half)
    values = np.empty((out, 2 * half))
    values[:, 0::2], values[:, 1::2] = FP4[codes & 15], FP4[codes >> 4]
    scales = np.frombuffer(tensors[stem + ".scale"][2], np.uint8).reshape(out, -1).astype(int)
    return values * np.repeat(2.0 ** (scales - 127), 32, axis=1)


def number(tensors, name):
    dtype, shape, blob = tensors[name]
    if dtype == "BF16":
        return (np.frombuffer(blob, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape).astype(float)
    return np.frombuffer(blob, TYPES[dtype]).reshape(shape).astype(float)


def kept(weights):
    """As served: largest first until TOP_P of the sum is reached, at least LEAST."""
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order]) / weights.sum()
    n = max(LEAST, int(np.searchsorted(mass, TOP_P - 1e-9)) + 1)
    return order[:n]


class Calibrate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.dir = pathlib.Path(cls.tmp.name)
        cls.data = cls.dir / "data.jsonl"
        cls.data.write_text("".join(data_line(f"r{i}", token_row(i + 1, n), d) for i, (d, n) in enumerate(LENGTHS)))
        cls.args = ["calibrate", TINY, "--data", cls.data, "--expert-top-p", TOP_P, "--min-experts", LEAST, "--draft-stride", 8]
        done = run(*cls.args, "--out", cls.dir / "stats", "--export-layer", LAYER, "--out-x", cls.dir / "x.safetensors", "--json", "--quiet")
        assert done.returncode == 0, done.stderr
        cls.json = json.loads(done.stdout)
        cls.stats = arrays(cls.dir / "stats/routing.safetensors")
        cls.x = arrays(cls.dir / "x.safetensors")
        cls.weights = {}
        for path in sorted(TINY.glob("*.safetensors")):
            cls.weights.update(read_tensors(path))
        cls.domain = np.concatenate([[0 if d == "a" else 1] * n for d, n in LENGTHS])

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    def experts(self):
        prefix = f"layers.{LAYER}.ffn.experts."
        return [[mxfp4(self.weights, f"{prefix}{e}.{m}") for m in ("w1", "w3", "w2")] for e in range(EXPERTS)]

    def hidden(self, expert, x):
        gate = np.minimum(x @ expert[0].T, 2.5)
        up = np.clip(x @ expert[1].T, -2.5, 2.5)
        return gate / (1 + np.exp(-gate)) * up

    def routing(self):
        """ids and weights [tokens, ACTIVE] from the exported inputs and the checkpoint's router."""
        x = self.x["x"].astype(float)
        logits = x @ number(self.weights, f"layers.{LAYER}.ffn.gate.weight").T / json.loads((TINY / "config.json").read_text())["text_config"].get("gate_temp", 1.0)
        scores = np.sqrt(np.logaddexp(0, logits))
        ids = np.sort(np.argsort(-(scores + number(self.weights, f"layers.{LAYER}.ffn.gate.bias")), axis=1, kind="stable")[:, :ACTIVE], axis=1)
        chosen = np.take_along_axis(scores, ids, axis=1)
        return ids, chosen / chosen.sum(axis=1, keepdims=True) * 1.5

    def test_routing_counts_shares_and_reads_equal_numpy(self):
        ids, g = self.routing()
        np.testing.assert_array_equal(ids, self.x["ids"])
        np.testing.assert_allclose(g, self.x["weights"], rtol=1e-5)
        x, experts = self.x["x"].astype(float), self.experts()
        energy, y = np.zeros((EXPERTS, 2)), np.zeros_like(x)
        tokens, weight, square, served = np.zeros((EXPERTS, 2), int), np.zeros((EXPERTS, 2)), np.zeros((EXPERTS, 2)), np.zeros(EXPERTS)
        for e in range(EXPERTS):
            rows, places = np.nonzero(ids == e)
            out = g[rows, places, None] * (self.hidden(experts[e], x[rows]) @ experts[e][2].T)
            y[rows] += out
            for d in range(2):
                mine = self.domain[rows] == d
                energy[e, d] = (out[mine] ** 2).sum()
                tokens[e, d], weight[e, d], square[e, d] = mine.sum(), g[rows, places][mine].sum(), (g[rows, places][mine] ** 2).sum()
        for t in range(len(x)):
            served[ids[t, kept(g[t])]] += 1
        total = np.array([(y[self.domain == d] ** 2).sum() for d in range(2)])
        np.testing.assert_array_equal(self.stats["tokens"][LAYER], tokens)
        np.testing.assert_allclose(self.stats["weight"][LAYER], weight, rtol=1e-5)
        np.testing.assert_allclose(self.stats["weight_square"][LAYER], square, rtol=1e-5)
        np.testing.assert_allclose(self.stats["share"][LAYER], energy / total, rtol=1e-4)
        np.testing.assert_allclose(self.stats["output_energy"][LAYER], total, rtol=1e-4)
        np.testing.assert_allclose(self.stats["reads_routed"][LAYER], tokens.sum(axis=1) / len(x), rtol=1e-6)
        np.testing.assert_allclose(self.stats["reads_served"][LAYER], served / len(x), rtol=1e-6)
        self.assertLess(served.sum(), ACTIVE * len(x))  # something was pruned

    def test_hessians_equal_x_transposed_x(self):
        ids, g, x = self.x["ids"], self.x["weights"].astype(float), self.x["x"].astype(float)
        n_dense = 0
        for name, h in self.x.items():
            if not name.startswith("hessian.layers."):
                continue
            seen = self.x["input." + name[len("hessian."):]].astype(float)
            np.testing.assert_allclose(h, seen.T @ seen, rtol=0, atol=1e-6 * np.abs(h).max(), err_msg=name)
            n_dense += 1
        self.assertGreaterEqual(n_dense, 7)
        for e, expert in enumerate(self.experts()):
            rows, places = np.nonzero(ids == e)
            w = g[rows, places, None]
            for name, seen in (("w1", x[rows]), ("w2", self.hidden(expert, x[rows]))):
                h = self.x[f"hessian.experts.{e}.{name}"]
                np.testing.assert_allclose(h, (w * seen).T @ (w * seen), rtol=0, atol=2e-5 * np.abs(h).max(), err_msg=f"{e} {name}")

    def test_sums_and_the_drafter(self):
        tokens, s = sum(n for _, n in LENGTHS), self.stats
        self.assertEqual((self.json["tokens"], self.json["rows"], self.json["domains"]), (tokens, len(LENGTHS), ["a", "b"]))
        np.testing.assert_array_equal(s["tokens"].sum(axis=1), ACTIVE * s["positions"])
        np.testing.assert_array_equal(s["positions"], [[sum(n for d, n in LENGTHS if d == k) for k in "ab"]] * LAYERS)
        np.testing.assert_allclose(s["reads_routed"].sum(axis=1), ACTIVE, rtol=1e-6)
        calls = {k: sum((n - 1) // 8 for d, n in LENGTHS if d == k) for k in "ab"}  # one after every eighth position that has a next
        self.assertEqual(self.json["draft_calls"], sum(calls.values()))
        self.assertEqual(s["drafter_tokens"].shape[0], STAGES)
        block = s["drafter_positions"][0, 0] // calls["a"]
        np.testing.assert_array_equal(s["drafter_positions"], [[block * calls["a"], block * calls["b"]]] * STAGES)
        self.assertTrue((s["drafter_output_energy"] > 0).all())

    def test_the_audit_lists_experts_by_name_and_strict_fails(self):
        counts = {f"layers.{l}.ffn.experts.{e}": int(self.stats["tokens"][l, e].sum()) for l in range(LAYERS) for e in range(EXPERTS)}
        drafter = self.stats["drafter_tokens"]
        counts.update({f"mtp.{k}.ffn.experts.{e}": int(drafter[k, e].sum()) for k in range(drafter.shape[0]) for e in range(drafter.shape[1])})
        self.assertEqual(self.json["experts_without_tokens"], [n for n, c in counts.items() if c == 0])
        self.assertEqual(self.json["experts_below_width"], [{"name": n, "tokens": c, "w2": c < FF} for n, c in counts.items() if 0 < c < D])
        least = min(counts.values())
        strict = run(*self.args, "--out", self.dir / "strict", "--strict", "--min-tokens", least + 1, "--quiet")
        self.assertEqual(strict.returncode, 1, strict.stderr)
        self.assertIn("coverage does not hold", strict.stdout)
        if least > 0:
            held = run(*self.args, "--out", self.dir / "held", "--strict", "--min-tokens", least, "--quiet")
            self.assertEqual(held.returncode, 0, held.stderr)

    def estimate(self, limit):
        done = run(*self.args, "--dry-run", "--memory-limit", limit / 2**30, "--json", "--quiet")
        return json.loads(done.stdout)["estimate"] if done.returncode == 0 else None

    def test_files_do_not_depend_on_threads_or_memory(self):
        wide = self.estimate(2**33)
        self.assertTrue(wide["unpacked_experts"] and wide["passes"] == 1)
        limit = next(l for l in range(60_000_000, 2**31, 500_000) if self.estimate(l))  # the least that is accepted
        tight = self.estimate(limit)
        self.assertTrue(not tight["unpacked_experts"] and tight["passes"] > 1, tight)
        expected = [(self.dir / "stats" / name).read_bytes() for name in ("routing.safetensors", "calibration.json")]
        for threads, more in ((1, []), (3, ["--memory-limit", limit / 2**30])):
            out = self.dir / f"threads{threads}"
            done = run(*self.args, "--out", out, "--threads", threads, "--quiet", *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([(out / name).read_bytes() for name in ("routing.safetensors", "calibration.json")], expected, threads)
        refused = run(*self.args, "--out", self.dir / "small", "--memory-limit", 0.05, "--quiet")
        self.assertEqual(refused.returncode, 4, refused.stderr)
        self.assertIn("MB of memory for the longest row of 150 tokens", refused.stderr)
        self.assertFalse((self.dir / "small").exists())

    def test_outputs_and_flags_are_refused(self):
        self.assertEqual(run(*self.args, "--out", self.dir / "stats").returncode, 3)
        self.assertEqual(run(*self.args, "--out", TINY / "inside").returncode, 3)
        self.assertEqual(run("calibrate", TINY, "--out", self.dir / "no").returncode, 2)
        self.assertEqual(run(*self.args, "--out", self.dir / "no", "--export-layer", 8, "--out-x", self.dir / "y").returncode, 2)

    def test_rows_that_overflow_are_counted_and_too_many_end_the_run(self):
        folder = self.dir / "overflow"
        folder.mkdir()
        for path in TINY.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        for path in folder.glob("*.safetensors"):
            tensors = read_tensors(path)
            if "embed.weight" in tensors:
                dtype, shape, blob = tensors["embed.weight"]
                blob = bytearray(blob)
                blob[500 * D * 2:501 * D * 2] = (b"\x7e\x7f\x7e\xff" * (D // 2))  # +-3.4e38: the stream's norm is infinite
                tensors["embed.weight"] = (dtype, shape, bytes(blob))
                write_tensors(path, tensors)
        rows = [token_row(i + 1, 20) for i in range(20)]
        for n_bad, code in ((2, 0), (3, 3)):
            data = self.dir / f"bad{n_bad}.jsonl"
            data.write_text("".join(data_line(f"r{i}", ids[:10] + [500] * (i < n_bad) + ids[10:]) for i, ids in enumerate(rows)))
            out = self.dir / f"bad{n_bad}"
            done = run("calibrate", folder, "--data", data, "--out", out, "--json", "--quiet")
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertEqual(out.exists(), code == 0)
            if code == 0:
                found = json.loads(done.stdout)
                self.assertEqual(found["broken_sequences"], n_bad)
                self.assertGreater(found["dropped_tokens"], 0)
                self.assertTrue(all(np.isfinite(a).all() for a in arrays(out / "routing.safetensors").values()))
            else:
                self.assertIn("not finite in 3 of 20 sequences", done.stderr)

    def test_plan_reads_the_folder(self):
        data = ROOT / "models/pocket/data/sensitivity.jsonl"
        done = run("calibrate", "pocket", "--data", data, "--rows", 6, "--out", self.dir / "pocket", "--json", "--quiet")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        domains = found["domains"]
        table = {"schema": "espalier-sensitivity-1", "model": {"layers": 8, "experts": 16}, "method": "swap",
                 "domains": [{"name": n, "weight": 1, "floor": 0, "additivity": 1} for n in domains],
                 "layers": [{"floor": [0] * len(domains), "slope": [1.0] * len(domains), "slope_se": [0.01] * len(domains)}] * 8,
                 "matrix_factors": {"w1": 1, "w3": 1, "w2": 1}, "routing_sha256": found["routing_sha256"]}
        (self.dir / "S.json").write_text(json.dumps(table))
        plan = run("plan", "pocket", "--stats", self.dir / "pocket", "--sensitivity", self.dir / "S.json", "--bpw", 2.8, "--super-share", 0, "--out",
                   self.dir / "plan.json", "--json", "--quiet")
        self.assertEqual(plan.returncode, 0, plan.stderr)
        self.assertEqual(json.loads((self.dir / "plan.json").read_text())["inputs"]["routing_sha256"], found["routing_sha256"])

    def test_the_arithmetic_of_the_real_shape(self):
        """The figures of the specification's tables, from the full checkpoint's config."""
        official = self.dir / "official"
        subprocess.run([sys.executable, ROOT / "tools/full_scale/make.py", "official", official], check=True, capture_output=True)
        done = run("calibrate", official, "--dry-run", "--json", "--quiet")
        self.assertEqual(done.returncode, 0, done.stderr)
        first, second = json.loads(done.stdout)["streaming"]
        self.assertEqual((first["tokens"], second["tokens"]), (853106, 1406759))
        carried, giga = first["carried"], lambda b, digits: round(b / 1e9, digits)
        self.assertEqual((giga(carried["residual streams"], 1), giga(carried["residual streams, fp32"], 1)), (34.9, 69.9))
        self.assertEqual(round(carried["collapse weights, fp32"] / 1e6, 1), 13.6)
        self.assertEqual([giga(carried[f"compressed KV of layer {n}"], 2) for n in (2, 8, 14, 20)], [0.44, 0.44, 0.44, 0.87])
        self.assertEqual(giga(carried["selected entries, int32"], 2), 1.75)
        self.assertEqual(giga(carried["candidate blocks, int32"], 1), 7.0)
        self.assertEqual(round(carried["token ids, int32"] / 1e6, 1), 3.4)
        self.assertEqual((giga(first["spilled"]["FFN inputs"], 1), round(first["spilled"]["routing, int32 and fp32"] / 1e6)), (8.7, 41))
        h = first["hessians"]
        self.assertEqual((round(h["w1 and w3 of one expert"] / 1e6, 1), round(h["w2 of one expert"] / 1e6, 1)), (104.9, 21.2))
        self.assertEqual((giga(h["all experts of a layer"], 1), giga(h["all experts of a layer, packed triangles"], 1)), (48.4, 24.2))
        self.assertEqual(round(h["inputs of one expert, bf16"] / 1e6), 136)
        self.assertEqual((round(first["tokens_per_expert"]), round(first["thin_below"], 2), round(first["gram_flop"] / 1e15, 1)), (13330, 0.38, 12.9))
        self.assertEqual((round(second["tokens_per_expert"] / 10), round(second["thin_below"], 2)), (2198, 0.23))


if __name__ == "__main__":
    unittest.main(verbosity=2)
