"""`--products` through the real binary: integer products keep every invariant of the exact ones and stay near them.

A small checkpoint is packed at 3 bits; then the same tokens are computed whole, one at a time, drafted, with other thread counts
and instruction sets, and must be equal bit for bit. Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
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
MODES = ("exact", "int8", "int8r")


def run(*arguments):
    return subprocess.run([BIN, *map(str, arguments)], capture_output=True, text=True, timeout=600)


class Products(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        model = small.write_checkpoint(GOLDEN, cls.root / "model")
        cls.data = cls.root / "data.jsonl"
        cls.data.write_text("".join(small.data_line(f"r{i}", small.token_row(i, n)) for i, n in enumerate([48, 33])))
        cls.pack = cls.root / "pack"
        made = run("quantize", model, "--bits", "3", "--data", cls.data, "--out", cls.pack, "--quiet")
        assert made.returncode == 0, made.stderr
        cls.tokens = cls.root / "tokens.json"
        cls.tokens.write_text(json.dumps([small.token_row(7, 40), small.token_row(8, 21)]))

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    def logits(self, mode, *flags):
        out = self.root / "logits.safetensors"
        out.unlink(missing_ok=True)
        made = run("logits", self.pack, "--tokens", self.tokens, "--out", out, "--products", mode, "--quiet", *flags)
        self.assertEqual(made.returncode, 0, made.stderr)
        return small.read_tensors(out)

    def test_rows_are_equal_alone_together_and_on_every_tier(self):
        for mode in MODES:
            whole = self.logits(mode)
            for flags in (("--decode-from", "0"), ("--chunk", "7"), ("--threads", "1"), ("--threads", "3"),
                          ("--numerics", "full", "--decode-from", "11", "--simd", "baseline")):
                self.assertEqual(self.logits(mode, *flags), whole, (mode, flags))
            kvq = self.logits(mode, "--numerics", "kvq")
            self.assertEqual(self.logits(mode, "--numerics", "kvq", "--decode-from", "3"), kvq, mode)

    def test_integer_products_are_near_and_the_residual_nearer(self):
        def values(tensors):
            data = b"".join(tensors[name][2] for name in sorted(tensors))
            return struct.unpack(f"<{len(data) // 4}f", data)

        exact = values(self.logits("exact"))
        scale = sum(v * v for v in exact) ** 0.5
        error = {mode: sum((a - b) ** 2 for a, b in zip(values(self.logits(mode)), exact)) ** 0.5 / scale for mode in MODES}
        print("relative error of the logits:", error)
        self.assertEqual(error["exact"], 0)
        # 0.006 and 0.0002 a product; a few dozen products in a row, of which the sum in the residual stream is part.
        self.assertTrue(0 < error["int8r"] < 0.005, error)
        self.assertTrue(error["int8r"] < error["int8"] < 0.1, error)

    def test_drafted_text_equals_serial_text(self):
        prompt = self.root / "prompt.json"
        for seed in (3, 4):
            prompt.write_text(json.dumps(small.token_row(seed, 12)))
            for mode in MODES:
                texts = []
                for draft in ("off", "on"):
                    made = run("generate", self.pack, "--tokens", prompt, "--max-tokens", "24", "--products", mode,
                               "--draft", draft, "--json", "--quiet")
                    self.assertEqual(made.returncode, 0, made.stderr)
                    texts.append(json.loads(made.stdout)["token_ids"])
                self.assertEqual(texts[0], texts[1], mode)

    def test_evaluation_says_which_products_it_used(self):
        for mode in ("exact", "int8r"):
            made = run("eval", "ppl", self.pack, "--panel", self.data, "--products", mode, "--json", "--quiet")
            self.assertEqual(made.returncode, 0, made.stderr)
            self.assertEqual(json.loads(made.stdout)["provenance"]["products"], mode)

    def test_other_names_are_usage_errors(self):
        made = run("logits", self.pack, "--tokens", self.tokens, "--out", self.root / "x.safetensors", "--products", "int4")
        self.assertEqual(made.returncode, 2, made.stderr)


if __name__ == "__main__":
    unittest.main()
