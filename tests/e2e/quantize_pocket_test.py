"""The bundled pocket model at 2, 3, 4 and 6 bits, every quantized matrix, through the real binary.

KL(native || quantized) falls three to five times per bit from 2 to 4 and is lower still at 6; KL(native, native) is 0. Prints the table.
The law is checked in `full` numerics: in kvq a width-independent floor is added (single roundings of the cache formats flip, and with them
selections and experts), which at 4 bits is already a tenth of the KL. kvq is printed beside it.
The short form uses a part of the calibration set and of the panel. ESPALIER_POCKET_FULL=1 uses all of both, and shows that the pack's
bytes are the same for one and two threads (test_stages shows that on a smaller checkpoint every time).
Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import subprocess
import tempfile
import time
import unittest

BIN = os.environ["ESPALIER_BIN"]
POCKET = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "models/pocket"
FULL = os.environ.get("ESPALIER_POCKET_FULL") == "1"
ROWS, PANEL_ROWS = ("0", "0") if FULL else ("24", "30")  # 0: all


def run(*arguments):
    r = subprocess.run([BIN, *map(str, arguments), "--json", "--quiet"], capture_output=True, text=True)
    if r.returncode != 0:
        raise AssertionError(f"{arguments}: exit code {r.returncode}: {r.stderr}")
    return json.loads(r.stdout)


class Pocket(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

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
            pack = self.quantize(bits, f"k{bits}", 2)
            for numerics in ("kvq", "full"):
                result = self.kl(pack, numerics)
                kl[bits] = result["kl_mean"]  # of the last: full
                print(f"K={bits} {numerics}: KL {result['kl_mean']:.5f} (domains {result['kl_domain_mean']:.5f}), top-1 {100 * result['top1']:.2f} %, "
                      f"ppl {result['ppl']:.4f} beside native {result['ppl_reference']:.4f}, {result['positions']} positions", flush=True)
        print(f"KL falls {kl[2] / kl[3]:.2f}x from 2 to 3 bits, {kl[3] / kl[4]:.2f}x from 3 to 4, {kl[4] / kl[6]:.2f}x from 4 to 6", flush=True)
        if FULL:
            one = self.quantize(2, "k2-one", 1)
            self.assertEqual((one / "MANIFEST.sha256").read_text(), (self.root / "k2/MANIFEST.sha256").read_text())
        for low, high in ((2, 3), (3, 4)):
            self.assertGreater(kl[low] / kl[high], 3)
            self.assertLess(kl[low] / kl[high], 5)
        self.assertLess(kl[6], kl[4])


if __name__ == "__main__":
    unittest.main(verbosity=2)
