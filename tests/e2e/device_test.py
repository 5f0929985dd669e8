"""`--device` through the real binary: a GPU gives the CPU's bytes; without one the command says why and exits with 4.

Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

BIN = os.environ["ESPALIER_BIN"]
MODEL = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tests/golden/model/tiny-a"


def run(*args):
    return subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL)


class Device(unittest.TestCase):
    def logits(self, folder, device):
        tokens, out = pathlib.Path(folder, "tokens.json"), pathlib.Path(folder, device.replace(":", "_"))
        tokens.write_text(json.dumps([[0, 5, 9, 33, 120, 7], [1, 2, 3]]))
        return run("logits", MODEL, "--tokens", tokens, "--out", out, "--quiet", "--device", device), out

    def test_a_gpu_gives_the_bytes_of_the_cpu_or_its_absence_is_explained(self):
        with tempfile.TemporaryDirectory() as tmp:
            on_cpu, expected = self.logits(tmp, "cpu")
            self.assertEqual(on_cpu.returncode, 0, on_cpu.stderr)
            on_gpu, got = self.logits(tmp, "cuda")
            if on_gpu.returncode == 0:
                self.assertEqual(got.read_bytes(), expected.read_bytes())
                return
            self.assertEqual(on_gpu.returncode, 4)
            self.assertRegex(on_gpu.stderr, r"^espalier: error: --device cuda: .*CUDA.*\n$")
            self.assertFalse(got.exists())

    def test_what_is_no_device_is_wrong_usage(self):
        for device in ("gpu", "cuda:x", "cuda:", "cuda:1x"):
            with tempfile.TemporaryDirectory() as tmp:
                done, _ = self.logits(tmp, device)
            self.assertEqual(done.returncode, 2, device)
            self.assertIn(f"found '{device}'", done.stderr)

    def test_a_command_of_the_cpu_refuses_a_gpu(self):
        done = run("tokenize", MODEL, "a", "--device", "cuda")
        self.assertEqual(done.returncode, 4)
        self.assertIn("runs on the CPU only; use --device cpu", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
