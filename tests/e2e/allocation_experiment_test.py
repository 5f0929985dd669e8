"""bench/allocation_experiment.py on a small checkpoint, from calibration to the table, and once more from what it left.

Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import small_checkpoint as small

ROOT = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"])
SIDES = {"measured 2.8": 2.8, "uniform 2.9": 2.9, "uniform 2.8": 2.8, "ends-first 2.8": 2.8, "frequency 2.8": 2.8, "layer 2.8": 2.8}


class AllocationExperiment(unittest.TestCase):
    def test_table_has_every_side_within_its_budget_and_resuming_repeats_it(self):
        with tempfile.TemporaryDirectory() as tmp:
            root = pathlib.Path(tmp)
            model = small.write_checkpoint(ROOT / "tests/golden/model/tiny-a", root / "model")
            for k, (name, n_rows) in enumerate({"calibration": 3, "sensitivity": 2, "panel": 2, "shifted": 2}.items()):
                (root / f"{name}.jsonl").write_text("".join(
                    small.data_line(f"{name}-{i}", small.token_row(10 * k + i, 40), "ab"[i % 2]) for i in range(n_rows)))
            command = [sys.executable, ROOT / "bench/allocation_experiment.py", os.environ["ESPALIER_BIN"], root / "work", "--checkpoint", model,
                       "--data", root, "--seeds", "0", "--library-widths", "2,3", "--wide", "3", "--resamples", "20", "--jobs", "2", "--threads", "1"]
            first = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
            self.assertEqual(first.returncode, 0, first.stderr[-2000:])
            for side, budget in SIDES.items():
                found = re.findall(rf"^{re.escape(side)} +(\d+\.\d+) +(\d+\.\d+) ", first.stdout, re.M)
                self.assertEqual(len(found), 2, first.stdout)  # panel and shifted panel
                for bits, kl in found:
                    self.assertLessEqual(float(bits), budget)
                    self.assertGreater(float(kl), 0)
            again = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
            self.assertEqual(again.stdout, first.stdout, again.stderr[-2000:])


if __name__ == "__main__":
    unittest.main(verbosity=2)
