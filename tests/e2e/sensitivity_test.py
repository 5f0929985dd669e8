"""`espalier sensitivity` through the real binary: what it measures is what `eval kl` measures of packs in which the same experts are
replaced and nothing else, native experts cost exactly nothing, and the table it writes is one that `plan` reads.

Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import small_checkpoint as small

BIN = os.environ["ESPALIER_BIN"]
GOLDEN = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tests/golden/model/tiny-a"
NATIVE = {part: "native" for part in ["attention", "shared", "index", "engram", "head", "drafter_dense"]}


def run(*arguments):
    return subprocess.run([BIN, *map(str, arguments), "--quiet"], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)


class Sensitivity(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        cls.model = small.write_checkpoint(GOLDEN, cls.root / "model")
        config = json.loads((cls.model / "config.json").read_text())
        config = config.get("text_config", config)
        cls.layers, cls.experts, cls.active = config["num_hidden_layers"], config["n_routed_experts"], config["num_experts_per_tok"]
        cls.data = cls.root / "data.jsonl"
        cls.data.write_text("".join(small.data_line(f"r{i}", small.token_row(i, n), "ab"[i % 2]) for i, n in enumerate([60, 33, 47])))
        cls.library = cls.root / "library"
        cls.uniform = {k: cls.pack(f"pack{k}", lambda l, e: str(k)) for k in (2, 4)}
        cls.stats = cls.root / "stats"
        cls.stats.mkdir()
        n = cls.layers * cls.experts
        cls.write(cls.stats / "routing.safetensors",
                  {"share": ([cls.layers, cls.experts, 2], [0.5 + 0.01 * (i % 7) for i in range(2 * n)]),
                   "reads_routed": ([cls.layers, cls.experts], [cls.active / cls.experts] * n)},
                  {"schema": "espalier-routing-1", "domains": '["a", "b"]'})

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    @staticmethod
    def write(path, tensors, metadata):
        header, data = {"__metadata__": metadata}, b""
        for name, (shape, values) in tensors.items():
            blob = struct.pack(f"<{len(values)}f", *values)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(blob)]}
            data += blob
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    @classmethod
    def pack(cls, name, width):
        """Everything native but the experts that width(layer, expert) gives a width."""
        plan = cls.root / f"{name}.json"
        mtp = len({t.split(".")[4] for t in small.small_tensors(GOLDEN) if t.startswith("mtp.0.ffn.experts.")})
        plan.write_text(json.dumps({
            "format": "exl3_moe_plan", "version": 1, "granularity": "expert", "dense": NATIVE,
            "layers": {str(l): "".join(width(l, e) for e in range(cls.experts)) for l in range(cls.layers)},
            "drafter": {"mtp.0": "n" * mtp}}))
        done = run("quantize", cls.model, "--data", cls.data, "--plan", plan, "--stream", "native", "--w2-input", "native", "--library", cls.library,
                   "--out", cls.root / name)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return cls.root / name

    def measure(self, *packs, more=(), code=0, out="s.json"):
        arguments = [x for p in packs for x in ("--swap-pack", p)]
        done = run("sensitivity", self.model, "--data", self.data, "--stats", self.stats, *arguments, "--out", self.root / out, "--json", *more)
        self.assertEqual(done.returncode, code, done.stderr)
        return json.loads(done.stdout) if code == 0 else done.stderr

    def kl(self, pack):
        done = run("eval", "kl", "--reference", self.model, "--candidate", pack, "--panel", self.data, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return {name: d["kl_mean"] for name, d in json.loads(done.stdout)["domains"].items()}

    def test_layers_and_all_of_them_are_what_eval_measures(self):
        table = self.measure(self.uniform[2], self.uniform[4], more=["--memory-gib", 0.01])
        self.assertEqual(table, self.measure(self.uniform[2], self.uniform[4], more=["--threads", 1]))
        self.assertEqual([d["name"] for d in table["domains"]], ["a", "b"])
        for layer in range(self.layers):
            single = self.kl(self.pack(f"only{layer}", lambda l, e: "2" if l == layer else "n"))
            swaps = next(v for k, v in table["layers"][layer]["swap"].items() if k.startswith("pack2"))
            for d, name in enumerate("ab"):
                self.assertAlmostEqual(swaps["mean"][d], single[name], delta=1e-6 * single[name] + 1e-12)
                self.assertGreater(single[name], 0)
        whole = self.kl(self.uniform[2])
        self.assert_predicts(table, whole, 0.05)  # a line through two points that may not begin below 0
        self.assert_predicts(self.measure(self.uniform[2], out="one.json"), whole, 1e-5)
        self.assertTrue((self.root / "s.blocks.safetensors").exists())

    def assert_predicts(self, table, whole, tolerance):
        for d, name in enumerate("ab"):
            slopes = [layer["slope"][d] for layer in table["layers"]]
            shares = [sum(0.5 + 0.01 * (((l * self.experts + e) * 2 + d) % 7) for e in range(self.experts)) for l in range(self.layers)]
            error = (0.292 ** 2)
            predicted = table["domains"][d]["floor"] + table["domains"][d]["additivity"] * sum(a * s * error for a, s in zip(slopes, shares))
            self.assertAlmostEqual(predicted, whole[name], delta=tolerance * whole[name])

    def test_native_experts_cost_exactly_nothing(self):
        native = self.pack("native", lambda l, e: "n")
        table = self.measure(native)
        for layer in table["layers"]:
            self.assertEqual(layer["slope"], [0, 0])
            self.assertEqual([s["mean"] for s in layer["swap"].values()], [[0, 0]])

    def test_noise_is_as_strong_as_the_errors_it_is_made_of(self):
        native = self.measure(self.pack("no-noise", lambda l, e: "n"), more=["--method", "noise"])
        for layer in native["layers"]:
            self.assertEqual([s["mean"] for s in layer["swap"].values()], [[0, 0], [0, 0]])
        swap = self.measure(self.uniform[2])
        for shape in ("shaped", "white"):
            more = ["--method", "noise", "--noise", shape, "--draws", 1]
            table = self.measure(self.uniform[2], more=[*more, "--memory-gib", 0.01])
            self.assertEqual(table, self.measure(self.uniform[2], more=[*more, "--threads", 1]))
            self.assertNotEqual(table["layers"], self.measure(self.uniform[2], more=[*more, "--seed", 1])["layers"])
            for noisy, swapped in zip(table["layers"], swap["layers"]):
                whole, half = (next(v["mean"] for k, v in noisy["swap"].items() if k.endswith(end)) for end in (" x 1", " x 0.5"))
                of_swap = next(iter(swapped["swap"].values()))["mean"]
                self.assertEqual(noisy["noise"], noisy["slope"])
                for d in range(2):
                    self.assertGreater(whole[d] / half[d], 2)  # 4 for small noise
                    self.assertLess(whole[d] / half[d], 8)
                    self.assertGreater(whole[d] / of_swap[d], 0.1)
                    self.assertLess(whole[d] / of_swap[d], 10)

    def test_around_a_plan_one_layer_is_restored(self):
        table = self.measure(self.uniform[2], more=["--plan", self.root / "pack2.json"], out="around.json")
        whole = self.kl(self.uniform[2])
        for d, name in enumerate("ab"):
            self.assertAlmostEqual(table["base"]["kl"][d], whole[name], delta=1e-6 * whole[name])
        for layer in range(self.layers):
            without = self.kl(self.pack(f"without{layer}", lambda l, e: "n" if l == layer else "2"))
            saved = next(iter(table["layers"][layer]["swap"].values()))["mean"]
            for d, name in enumerate("ab"):
                self.assertAlmostEqual(saved[d], max(0, whole[name] - without[name]), delta=1e-6 * whole[name])
        self.measure(self.uniform[2])
        plan = ["plan", self.model, "--stats", self.stats, "--sensitivity", self.root / "s.json", "--around", self.root / "around.json", "--bpw", 2.5,
                "--super-share", 0, "--out", self.root / "p2.json", "--json", "--present"]
        done = run(*plan, self.root / "pack2.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(run(*plan, self.root / "pack4.json").returncode, 3)
        self.assertIn("made from this plan", self.measure(self.uniform[4], more=["--plan", self.root / "pack2.json"], code=3))
        self.assertIn("one pack", self.measure(self.uniform[2], self.uniform[4], more=["--plan", self.root / "pack2.json"], code=2))
        self.assertIn("--plan", self.measure(self.uniform[2], more=["--plan", self.root / "pack2.json", "--method", "noise"], code=2))

    def test_single_experts_are_what_eval_measures(self):
        out = self.root / "by-expert"
        table = self.measure(self.uniform[2], more=["--per", "expert", "--stats-out", out], out="e.json")
        blob = (out / "routing.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8:8 + size])
        begin, end = header["share"]["data_offsets"]
        share = struct.unpack(f"<{(end - begin) // 4}f", blob[8 + size + begin:8 + size + end])
        for layer, expert in ((0, 1), (self.layers - 1, 0)):
            single = self.kl(self.pack(f"only{layer}.{expert}", lambda l, e: "2" if (l, e) == (layer, expert) else "n"))
            for d, name in enumerate("ab"):
                cost = table["layers"][layer]["slope"][d] * share[(layer * self.experts + expert) * 2 + d] * 0.292 ** 2
                self.assertAlmostEqual(cost, single[name], delta=1e-4 * single[name] + 1e-9)
        done = run("plan", self.model, "--stats", out, "--sensitivity", self.root / "e.json", "--bpw", 2.5, "--super-share", 0, "--out", self.root / "p.json", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLessEqual(json.loads(done.stdout)["bpw"], 2.5)

    def test_what_does_not_belong_together_is_refused(self):
        self.assertIn("same widths", self.measure(self.uniform[2], self.uniform[2], code=3))
        self.assertIn("one or two packs", self.measure(*[self.uniform[2]] * 3, code=2))
        self.assertIn("--stats-out", self.measure(self.uniform[2], more=["--per", "expert"], code=2))
        self.assertIn("--swap-pack", self.measure(code=2))
        self.assertIn("shape", self.measure(pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "models/pocket", code=3))
        other = self.root / "other.jsonl"
        other.write_text(small.data_line("x", small.token_row(9, 40), "c"))
        done = run("sensitivity", self.model, "--data", other, "--stats", self.stats, "--swap-pack", self.uniform[2], "--out", self.root / "x.json")
        self.assertEqual(done.returncode, 3)
        self.assertIn("no domain 'c'", done.stderr)
        done = subprocess.run([BIN, "sensitivity", self.model, "--data", self.data, "--stats", self.stats, "--swap-pack", self.uniform[2], "--out", self.root / "w.json"],
                              capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("domain 'b' has one row", done.stderr)
        self.assertNotIn("domain 'a'", done.stderr)
        self.assertFalse((self.root / "x.json").exists())


if __name__ == "__main__":
    unittest.main(verbosity=2)
