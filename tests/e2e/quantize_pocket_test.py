"""The bundled pocket model at 2, 3, 4 and 6 bits, every quantized matrix, through the real binary.

KL(native || quantized) falls three to five times per bit from 2 to 4 and is lower still at 6; KL(native, native) is 0. Prints the table.
The law is checked in `full` numerics: in kvq a width-independent floor is added (single roundings of the cache formats flip, and with them
selections and experts), which at 4 bits is already a tenth of the KL. kvq is printed beside it.
The 2-bit pack then goes through all layouts and back, is read by each name, has matrices encoded again and single bits flipped.
The short form uses a part of the calibration set and of the panel. ESPALIER_POCKET_FULL=1 uses all of both, and shows that the pack's
bytes are the same for one and two threads (test_stages shows that on a smaller checkpoint every time).
Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import time
import unittest

import small_checkpoint as files

BIN = os.environ["ESPALIER_BIN"]
POCKET = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "models/pocket"
FULL = os.environ.get("ESPALIER_POCKET_FULL") == "1"
ROWS, PANEL_ROWS = ("0", "0") if FULL else ("24", "30")  # 0: all


def run(*arguments, code=0):
    r = subprocess.run([BIN, *map(str, arguments), "--json", "--quiet"], capture_output=True, text=True)
    if r.returncode != code:
        raise AssertionError(f"{arguments}: exit code {r.returncode}: {r.stderr}")
    return json.loads(r.stdout)


def tensors_of(pack):
    """{name: (dtype, shape, bytes)} of all its files; none twice."""
    out = {}
    for path in sorted(pack.glob("*.safetensors")):
        for name, value in files.read_tensors(path).items():
            assert name not in out, f"{name} is stored twice"
            out[name] = value
    return out


class Pocket(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        cls.made = {}

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    def pack(self, bits):
        """Made once."""
        if bits not in self.made:
            self.made[bits] = self.quantize(bits, f"k{bits}", 2)
        return self.made[bits]

    def quantize(self, bits, name, threads):
        started = time.time()
        report = run("quantize", POCKET, "--bits", bits, "--data", POCKET / "data/calibration.jsonl", "--rows", ROWS, "--threads", threads,
                     "--out", self.root / name)
        self.assertEqual(report["bpw"], bits)
        print(f"K={bits} threads={threads}: {report['bytes'] / 1e6:.2f} MB, {report['matrices']} matrices, {time.time() - started:.0f} s", flush=True)
        return self.root / name

    def kl(self, candidate, numerics):
        return run("eval", "kl", "--reference", POCKET, "--candidate", candidate, "--panel", POCKET / "data/panel.jsonl", "--rows", PANEL_ROWS,
                   "--numerics", numerics)

    def test_ladder_and_thread_identity(self):
        for numerics in ("full", "kvq"):
            same = self.kl(POCKET, numerics)
            self.assertEqual((same["kl_mean"], same["top1"]), (0, 1))
        kl = {}
        for bits in (2, 3, 4, 6):
            pack = self.pack(bits)
            for numerics in ("kvq", "full"):
                result = self.kl(pack, numerics)
                kl[bits] = result["kl_mean"]  # of the last: full
                print(f"K={bits} {numerics}: KL {result['kl_mean']:.5f} (domains {result['kl_domain_mean']:.5f}), top-1 {100 * result['top1']:.2f} %, "
                      f"ppl {result['ppl']:.4f} beside native {result['ppl_reference']:.4f}, {result['positions']} positions", flush=True)
        print(f"KL falls {kl[2] / kl[3]:.2f}x from 2 to 3 bits, {kl[3] / kl[4]:.2f}x from 3 to 4, {kl[4] / kl[6]:.2f}x from 4 to 6", flush=True)
        if FULL:
            one = self.quantize(2, "k2-one", 1)
            self.assertEqual((one / "MANIFEST.sha256").read_text(), (self.pack(2) / "MANIFEST.sha256").read_text())
        for low, high in ((2, 3), (3, 4)):
            self.assertGreater(kl[low] / kl[high], 3)
            self.assertLess(kl[low] / kl[high], 5)
        self.assertLess(kl[6], kl[4])

    def check_pack(self, pack, layout, tensors, answer):
        self.assertEqual(tensors_of(pack), tensors, layout)
        self.assertEqual(run("inspect", pack)["family"], layout)
        self.assertEqual(run("generate", pack, "--prompt", "The capital of", "--max-tokens", "32")["token_ids"], answer, layout)
        verified = run("verify", pack)
        self.assertEqual((verified["ok"], verified["problems"], verified["digests"]), (True, [], verified["matrices"]))
        subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "MANIFEST.sha256"], cwd=pack, check=True)

    def test_the_pack_in_every_layout_and_back(self):
        first = self.pack(2)
        tensors = tensors_of(first)
        answer = run("generate", first, "--prompt", "The capital of", "--max-tokens", "32")["token_ids"]
        self.assertEqual(len(answer), 32)
        self.check_pack(first, "exllamav3", tensors, answer)
        at, rng = first, random.Random(17)
        for layout in ("vllm", "tensorfold", "exllamav3"):
            to = self.root / f"as-{layout}"
            run("convert", at, "--layout", layout, "--out", to)
            self.check_pack(to, layout, tensors, answer)
            self.check_flipped_bits(to, rng)
            at = to
        for name in sorted(p.name for p in first.iterdir()):
            if name != "MANIFEST.sha256":  # convert.json is listed there
                self.assertEqual((at / name).read_bytes(), (first / name).read_bytes(), name)

    def check_flipped_bits(self, pack, rng):
        """One bit of a trellis anywhere: found by the manifest, and without one by the matrix's digest, with file and tensor."""
        damaged = self.root / "damaged"
        shutil.copytree(pack, damaged)
        places = [(path, name, base + entry["data_offsets"][0], base + entry["data_offsets"][1])
                  for path in sorted(damaged.glob("*.safetensors")) for header, _, base in [files.read_header(path)]
                  for name, entry in header.items() if name.endswith(".trellis")]
        for path, name, begin, end in rng.choices(places, weights=[end - begin for _, _, begin, end in places], k=6):
            at, bit = rng.randrange(begin, end), 1 << rng.randrange(8)
            manifest = (damaged / "MANIFEST.sha256").read_bytes()
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                for content in (byte ^ bit, byte):
                    file.seek(at)
                    file.write(bytes([content]))
                    file.flush()
                    if content == byte:
                        continue
                    problems = run("verify", damaged, code=1)["problems"]
                    self.assertTrue(any(path.name in p and "manifest says" in p for p in problems), problems)
                    (damaged / "MANIFEST.sha256").unlink()
                    problems = run("verify", damaged, code=1)["problems"]
                    self.assertEqual(len(problems), 1, problems)
                    self.assertIn(path.name, problems[0])
                    self.assertIn(f"'{name[:-8]}': its bytes are not those that were encoded", problems[0])
                    (damaged / "MANIFEST.sha256").write_bytes(manifest)
        self.assertTrue(run("verify", damaged)["ok"])
        shutil.rmtree(damaged)

    def test_twenty_matrices_encoded_again_and_the_size_said_before(self):
        data = ("--data", POCKET / "data/calibration.jsonl")
        found = run("verify", self.pack(2), "--rederive", 20, "--checkpoint", POCKET, *data)
        self.assertEqual((found["ok"], found["rederived"], found["problems"]), (True, 20, []))
        said = run("quantize", POCKET, "--bits", 2, *data, "--rows", ROWS, "--dry-run")
        real = sum(f.stat().st_size for f in self.pack(2).rglob("*") if f.is_file())
        print(f"dry run: {said['bytes']} bytes, really {real}: {100 * (said['bytes'] / real - 1):+.4f} %", flush=True)
        self.assertLess(abs(said["bytes"] - real), real / 1000)
        self.assertTrue(all(group["reason"] for group in said["native"]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
