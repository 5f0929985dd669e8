"""`espalier quantize --resume` through the real binary: killed with SIGKILL at random moments, stopped, damaged, changed.

Oracle: MANIFEST.sha256 of a run that nobody disturbed. Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR, ESPALIER_KILLS (default 3).
"""
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import small_checkpoint as small

BIN = os.environ["ESPALIER_BIN"]
GOLDEN = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tests/golden/model/tiny-a"
KILLS = int(os.environ.get("ESPALIER_KILLS", "3"))
LIMITS = (60, 70, 80, 100, 150)


class Resume(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        cls.model = small.write_checkpoint(GOLDEN, cls.root / "model")
        cls.data = cls.root / "data.jsonl"
        cls.data.write_text("".join(small.data_line(f"r{i}", small.token_row(i, n), "ab"[i % 2]) for i, n in enumerate([96, 33, 64])))
        started = time.time()
        done = cls.run_quantize("whole")
        assert done.returncode == 0, done.stderr
        cls.seconds = time.time() - started
        cls.manifest = (cls.root / "whole/MANIFEST.sha256").read_bytes()

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    @classmethod
    def command(cls, name, *more):
        flags = [] if "--bits" in more or "--plan" in more else ["--bits", "3"]
        return [BIN, "quantize", str(cls.model), *flags, "--data", str(cls.data), "--out", str(cls.root / name), "--quiet", *map(str, more)]

    @classmethod
    def run_quantize(cls, name, *more, **kwargs):
        return subprocess.run(cls.command(name, *more), capture_output=True, text=True, timeout=600, **kwargs)

    def stop_when(self, name, is_there, which=signal.SIGKILL, *more):
        process = subprocess.Popen(self.command(name, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not is_there():
            time.sleep(0.002)
        self.assertIsNone(process.poll(), "ended before it could be stopped")
        process.send_signal(which)
        return process.communicate(timeout=300)[1], process.returncode

    def check_finished(self, name, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.root / name / "MANIFEST.sha256").read_bytes(), self.manifest)
        self.assertEqual([p.name for p in self.root.glob(name + "*")], [name], "something was left behind")

    def test_killed_at_random_moments(self):
        rng = random.Random(6)
        kills = 0
        for _ in range(4 * KILLS):
            process = subprocess.Popen(self.command("random", "--resume"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                process.communicate(timeout=rng.uniform(0.05, 0.3) * self.seconds)
                self.assertEqual(process.returncode, 0)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
                self.assertFalse((self.root / "random").exists(), "kill -9 left the final name")
            if kills == KILLS:
                process = self.run_quantize("random", "--resume")
                break
        self.check_finished("random", process)
        print(f"killed {kills} times: one sha256", flush=True)

    def test_goes_on_at_the_first_missing_matrix(self):
        units = self.root / "first.work/units"
        self.stop_when("first", lambda: (units / "layers.1.ffn.experts.1").exists())
        kept = {p.name: p.stat().st_mtime_ns for p in units.iterdir() if ".partial-" not in p.name}
        self.assertIn("layers.1.attn.wq_a", kept)
        self.assertFalse([n for n in kept if n.startswith("layers.0.")], "a finished layer keeps its units")
        seen = lambda: {p.name: p.stat().st_mtime_ns for p in units.iterdir() if ".partial-" not in p.name}
        self.stop_when("first", lambda: len(set(seen()) - set(kept)) >= 1, signal.SIGKILL, "--resume")
        self.assertEqual({n: t for n, t in seen().items() if n in kept}, {n: t for n, t in kept.items() if n in seen()}, "encoded twice")
        self.check_finished("first", self.run_quantize("first", "--resume"))

    def test_damage_is_made_again(self):
        work = self.root / "damage.work"
        self.stop_when("damage", lambda: (work / "units/layers.1.ffn.experts.1").exists())
        for path in [work / "units/layers.1.attn.wq_a", work / "coverage-layers.1.json"]:
            blob = bytearray(path.read_bytes())
            blob[len(blob) // 2] ^= 1
            path.write_bytes(blob)
        stream = work / "stream-0001"
        blob = bytearray(stream.read_bytes())
        blob[1000] ^= 4
        stream.write_bytes(blob)
        done = self.run_quantize("damage", "--resume")
        self.assertIn("sha256", done.stderr)
        self.check_finished("damage", done)

    def test_another_run_is_refused_by_name(self):
        work = self.root / "other.work"
        self.stop_when("other", lambda: (work / "units/layers.0.ffn.experts.1").exists())
        before = self.data.read_text()
        for flags, expected in ((("--bits", "4"), ("option bits", "expected 3, found 4")), (("--seed", "7"), ("option seed", "expected 0, found 7")),
                                (("--draft-stride", "4"), ("option draft_stride",))):
            r = self.run_quantize("other", "--resume", *flags)
            self.assertEqual(r.returncode, 3, r.stderr)
            for text in expected:
                self.assertIn(text, r.stderr)
        rows = [json.loads(line) for line in before.splitlines()]
        rows[1]["ids"][5] ^= 1
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            r = self.run_quantize("other", "--resume")
            self.assertEqual(r.returncode, 3, r.stderr)
            self.assertIn("data (sha256 of its rows): expected", r.stderr)
        finally:
            self.data.write_text(before)
        generation = self.model / "config.json"
        text = generation.read_text()
        generation.write_text(text + "\n")
        try:
            r = self.run_quantize("other", "--resume")
            self.assertEqual(r.returncode, 3, r.stderr)
            self.assertIn("checkpoint file config.json: expected", r.stderr)
        finally:
            generation.write_text(text)
        self.check_finished("other", self.run_quantize("other", "--resume"))

    def test_interrupted_and_work_dir(self):
        scratch = self.root / "scratch"
        scratch.mkdir(exist_ok=True)
        err, code = self.stop_when("int", lambda: (self.root / "int.work/units/layers.0.ffn.experts.1").exists(), signal.SIGINT, "--work-dir", scratch)
        self.assertEqual(code, 4, err)
        self.assertIn("--resume", err)
        self.assertTrue(list((scratch / "int.work").glob("stream-*")))
        self.check_finished("int", self.run_quantize("int", "--resume", "--work-dir", scratch))
        self.assertEqual(list(scratch.iterdir()), [])

    def test_full_disk_by_a_file_size_limit(self):
        """No mount is needed: RLIMIT_FSIZE makes write fail with EFBIG, which takes the same way as ENOSPC."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        r = self.run_quantize("full", preexec_fn=limit)
        self.assertEqual(r.returncode, 4, r.stderr)
        self.assertIn("free disk space", r.stderr)
        self.assertIn("--resume", r.stderr)
        self.assertFalse((self.root / "full").exists())
        self.check_finished("full", self.run_quantize("full", "--resume"))

    def test_out_of_memory(self):
        """By RLIMIT_AS, at several limits: exit code 4 and one line, or done; resumable either way."""
        codes = []
        for mib in LIMITS:
            limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
            r = self.run_quantize("oom", "--resume", "--threads", "1", preexec_fn=limit)
            codes.append(r.returncode)
            self.assertIn(r.returncode, (0, 4), r.stderr)
            if r.returncode == 0:
                break
            self.assertEqual(len(r.stderr.strip().splitlines()), 1, r.stderr)
            self.assertFalse((self.root / "oom").exists())
        self.assertIn(4, codes)
        self.check_finished("oom", self.run_quantize("oom", "--resume") if codes[-1] else r)

    def test_read_only_folder_and_output_that_is_the_input(self):
        link, hard = self.root / "link", self.root / "hard"
        link.symlink_to(self.model)
        hard.mkdir()
        for path in self.model.iterdir():
            os.link(path, hard / path.name)
        for out in (self.model, link, hard, self.model / "inner", link / "inner"):
            before = sorted(p.name for p in self.model.iterdir())
            r = subprocess.run([BIN, "quantize", str(self.model), "--bits", "3", "--data", str(self.data), "--out", str(out), "--quiet"], capture_output=True, text=True)
            self.assertEqual(r.returncode, 3, r.stderr)
            self.assertEqual(len(r.stderr.strip().splitlines()), 1)
            self.assertEqual(sorted(p.name for p in self.model.iterdir()), before)
        link.unlink()
        shutil.rmtree(hard)
        if os.geteuid() == 0:
            out = "/proc/espalier-pack"  # nobody can make a folder there, root neither
        else:
            closed = self.root / "closed"
            closed.mkdir(mode=0o555)
            out = str(closed / "pack")
        r = subprocess.run([BIN, "quantize", str(self.model), "--bits", "3", "--data", str(self.data), "--out", out, "--quiet"], capture_output=True, text=True)
        self.assertEqual(r.returncode, 3, r.stderr)
        self.assertIn("cannot create", r.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
