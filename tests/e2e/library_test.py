"""`espalier library` and `quantize --library` through the real binary: a plan realised by lookup is the pack that encoding it gives, a
library that was killed goes on, and what does not belong together is refused by name.

Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import hashlib
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import small_checkpoint as small

BIN = os.environ["ESPALIER_BIN"]
GOLDEN = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tests/golden/model/tiny-a"
NATIVE = ["--stream", "native", "--w2-input", "native"]
OTHERS = ["--dense-bits", 4, "--head-bits", 3, "--drafter-bits", 2]


def run(*arguments):
    return subprocess.run([BIN, *map(str, arguments), "--quiet"], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


class Library(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        cls.model = small.write_checkpoint(GOLDEN, cls.root / "model")
        cls.data = cls.root / "data.jsonl"
        cls.data.write_text("".join(small.data_line(f"r{i}", small.token_row(i, n)) for i, n in enumerate([80, 33])))
        text = json.loads((cls.model / "config.json").read_text())
        text = text.get("text_config", text)
        cls.layers, cls.experts = text["num_hidden_layers"], text["n_routed_experts"]
        cls.library = cls.root / "library"
        cls.command = ["library", cls.model, "--data", cls.data, "--widths", "2,3", *OTHERS, "--out"]
        done = cls.build_with_a_kill()
        if done.returncode != 0:
            raise AssertionError(done.stderr)

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    @classmethod
    def build_with_a_kill(cls):
        """Killed once some of it is there, then finished."""
        process = subprocess.Popen([BIN, *map(str, cls.command), str(cls.library), "--quiet"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 300
        while len(list(cls.library.glob("block-*"))) < 3 and process.poll() is None and time.time() < deadline:
            time.sleep(0.01)
        cls.was_killed = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        return run(*cls.command, cls.library)

    def plan(self, name, widths):
        """widths(layer, expert) -> character."""
        path = self.root / name
        path.write_text(json.dumps({
            "format": "exl3_moe_plan", "version": 1, "granularity": "expert",
            "layers": {str(l): "".join(widths(l, e) for e in range(self.experts)) for l in range(self.layers)}}))
        return path

    def quantize(self, out, *more):
        done = run("quantize", self.model, "--data", self.data, "--bits", 3, *OTHERS, *NATIVE, "--out", self.root / out, *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return digests(self.root / out)

    def test_a_killed_build_goes_on_and_gives_what_one_build_gives(self):
        self.assertTrue(self.was_killed, "the first build ended before it could be killed")
        whole = self.root / "whole"
        done = run(*self.command, whole, "--threads", 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(digests(whole), {n: d for n, d in digests(self.library).items() if "partial" not in n})

    def test_a_plan_by_lookup_is_the_plan_encoded(self):
        mixed = self.plan("mixed.json", lambda l, e: "23n"[(l + e) % 3])
        encoded = self.quantize("encoded", "--plan", mixed)
        before = digests(self.library)
        looked_up = self.quantize("looked-up", "--plan", mixed, "--library", self.library)
        self.assertEqual(encoded, looked_up)
        self.assertEqual(digests(self.library), before)
        verified = run("verify", self.root / "looked-up", "--rederive", 3, "--checkpoint", self.model, "--data", self.data)
        self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)

    def test_what_the_library_lacks_is_encoded_and_added(self):
        other = self.root / "other"
        shutil.copytree(self.library, other)
        four = self.plan("four.json", lambda l, e: "4" if l == 1 and e < 2 else "2")
        first = self.quantize("four-a", "--plan", four, "--library", other)
        self.assertTrue((other / "block-0001-k2-08.safetensors").exists())
        self.assertEqual(self.quantize("four-b", "--plan", four, "--library", other), first)

    def test_errors_are_those_of_the_records(self):
        blob = (self.library / "errors.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8:8 + size])
        self.assertEqual(json.loads(header["__metadata__"]["widths"]), [4, 6])
        self.assertEqual(header["error"]["shape"], [self.layers, self.experts, 3, 2])
        begin, end = header["error"]["data_offsets"]
        values = struct.unpack(f"<{(end - begin) // 4}f", blob[8 + size + begin:8 + size + end])
        self.quantize("three", "--library", self.library)
        records = {r["name"]: r for r in map(json.loads, (self.root / "three/matrices.jsonl").read_text().splitlines())}
        for l in range(self.layers):
            for e in range(self.experts):
                for m, name in enumerate(["w1", "w3", "w2"]):
                    at = ((l * self.experts + e) * 3 + m) * 2
                    true_error = records[f"layers.{l}.ffn.experts.{e}.{name}"]["true_error"]
                    self.assertAlmostEqual(values[at + 1], true_error, delta=1e-6 * true_error)
                    self.assertGreater(values[at], values[at + 1])

    def refused(self, code, text, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertIn(text, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)

    def test_other_inputs_and_damage_are_refused_by_name(self):
        self.refused(3, "seed = 0, this run has 1", *self.command, self.library, "--seed", 1)
        self.refused(3, "encoder.cuts = 1, this run has 4", *self.command, self.library, "--preset", "best")
        data = self.root / "other.jsonl"
        data.write_text(small.data_line("x", small.token_row(9, 40)))
        self.refused(3, "calibration_content_sha256", "library", self.model, "--data", data, "--widths", "2", "--out", self.library)
        pack = ["quantize", self.model, "--data", self.data, "--bits", 3, "--library", self.library, "--out", self.root / "never"]
        self.refused(2, "--stream native", *pack)
        self.refused(2, "--w2-input native", *pack, "--stream", "native")
        self.refused(2, "--widths", "library", self.model, "--data", self.data, "--widths", "2.25", "--out", self.root / "x")
        damaged = self.root / "damaged"
        shutil.copytree(self.library, damaged)
        file = damaged / "block-0001-k2-06.safetensors"
        blob = bytearray(file.read_bytes())
        blob[-3] ^= 1
        file.write_bytes(blob)
        self.refused(3, "block-0001-k2-06.safetensors", *pack[:-3], damaged, "--out", self.root / "never", *OTHERS, *NATIVE)
        self.assertFalse((self.root / "never").exists())
        (damaged / "library.json").write_text("{}")
        self.refused(3, "library.json", *self.command, damaged)


if __name__ == "__main__":
    unittest.main(verbosity=2)
