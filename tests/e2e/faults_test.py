"""Faults around the program: outputs that cannot be written, streams that are full, limits of the system. Each case once went wrong.

Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import stat
import subprocess
import tempfile
import unittest

BIN = os.environ["ESPALIER_BIN"]
GOLDEN = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tests/golden"
TINY = GOLDEN / "model/tiny-a"


class Faults(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.tmp.name)
        self.tokens = self.root / "t.json"
        self.tokens.write_text("[[0, 5, 9]]")

    def tearDown(self):
        self.tmp.cleanup()

    def run_shell(self, command, code, part=""):
        environment = dict(os.environ, BIN=BIN, TINY=str(TINY), ROOT=str(self.root), EXL3=str(GOLDEN / "exl3/mul1_128.safetensors"))
        r = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
        self.assertEqual(r.returncode, code, f"{command}: {r.stderr}")
        lines = [line for line in r.stderr.splitlines() if line.startswith("espalier: error: ")]
        self.assertEqual(len(lines), 1, r.stderr)
        self.assertIn(part, lines[0])

    def test_outputs_never_replace_devices_links_folders_or_inputs(self):
        decode = '"$BIN" exl3 decode "$EXL3" --name mul1_128x128_k3 --quiet --out '
        self.run_shell(decode + "/dev/null", 3, "/dev/null")
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        (self.root / "link").symlink_to(self.root / "target")
        self.run_shell(decode + '"$ROOT/link"', 3, "symbolic link")
        self.run_shell(decode + '"$ROOT"', 3, "folder")
        self.run_shell(decode + '"$ROOT/none/x"', 3, "does not exist")
        self.run_shell('"$BIN" logits "$TINY" --quiet --tokens "$ROOT/t.json" --out "$ROOT/t.json"', 3, "is the input")
        self.assertEqual(json.loads(self.tokens.read_text()), [[0, 5, 9]])

    def test_an_error_that_quotes_a_damaged_file_is_plain_text(self):
        for name, part in ((b"p.\xactrellis", "not valid JSON"), (b"p\\n\\u001b[31m\\u007f.x", "I16")):
            header = b'{"' + name + b'":{"dtype":"I16","shape":[1],"data_offsets":[0,4]}}'
            (self.root / "bad.st").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
            r = subprocess.run([BIN, "exl3", "decode", self.root / "bad.st", "--name", "p", "--out", self.root / "o", "--quiet"],
                               capture_output=True, timeout=60)
            line = r.stderr.decode("utf-8")  # strict
            self.assertEqual(r.returncode, 3, line)
            self.assertIn(part, line)
            self.assertTrue(line.startswith("espalier: error: ") and line.endswith("\n"), line)
            self.assertEqual([c for c in line[:-1] if ord(c) < 32 or ord(c) == 127], [], line)

    def test_a_full_standard_output_is_an_error(self):
        self.run_shell('"$BIN" inspect "$TINY" --json > /dev/full', 4, "standard output")
        self.run_shell('"$BIN" tokenize "$TINY" hello > /dev/full', 4, "standard output")

    def test_threads_that_cannot_be_started_are_an_error_not_a_hang(self):
        self.run_shell('ulimit -v 300000; "$BIN" logits "$TINY" --quiet --threads 512 --tokens "$ROOT/t.json" --out "$ROOT/l"', 4)

    def test_a_file_size_limit_is_an_error_and_leaves_nothing(self):
        self.run_shell('ulimit -f 4; "$BIN" exl3 decode "$EXL3" --name mul1_128x128_k3 --quiet --out "$ROOT/big"', 4, "big")
        self.assertEqual(sorted(p.name for p in self.root.iterdir()), ["t.json"])

    def test_a_pipe_in_place_of_a_shard_is_refused(self):
        model = self.root / "model"
        model.mkdir()
        for item in TINY.iterdir():
            (model / item.name).symlink_to(item)
        (model / "model-00003-of-00008.safetensors").unlink()
        os.mkfifo(model / "model-00003-of-00008.safetensors")
        self.run_shell('"$BIN" inspect "$ROOT/model"', 3, "not a regular file")

    def test_a_file_that_memory_cannot_map_is_a_missing_resource(self):
        self.run_shell('truncate -s 8G "$ROOT/large.safetensors"; ulimit -v 4000000; "$BIN" exl3 decode "$ROOT/large.safetensors" --name m '
                       '--out "$ROOT/x" --threads 1', 4, "cannot map")

    def test_numbers_that_are_not_numbers_and_folders_that_are_not_there(self):
        self.run_shell('"$BIN" generate "$TINY" --prompt a --max-tokens 1 --temperature nan', 2, "NaN")
        self.run_shell('"$BIN" inspect "$TINY" --engram /nonexistent', 3, "/nonexistent")
        self.run_shell('"$BIN" inspect "$TINY" --seed 18446744073709551616', 2, "18446744073709551615")


if __name__ == "__main__":
    unittest.main(verbosity=2)
