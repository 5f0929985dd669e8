"""`espalier exl3 decode` and `exl3 encode` on the golden EXL3 data, through the real binary, all figures computed here in fp64.

Oracle: tests/golden/exl3 (made by exllamav3 itself, see its README); the larger files beside the tree are used when they are there.
Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR. Bounds: `inner` bit for bit; `weight` is the exact value rounded once to fp32 (plus the
worst case of an fp64 summation), so at most one step from `dec`; true error of `encode`, mean of 5 sign seeds, over the recorded
rel_err_H: geometric mean of all cases with a Hessian at most 1.01; the program's own figure agrees to 1e-9.
"""
import decimal
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import numpy as np

BIN = os.environ["ESPALIER_BIN"]
SOURCE = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"])
TREE, SHARED = SOURCE / "tests/golden/exl3", SOURCE.parent / "shared/golden/exl3"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16}
SAME_WEIGHT = {"mul1_256x384_k3": "mul1_256x384_k2"}  # stores neither weight nor H: those of the other case (README, notes)
N_LINEARS = {"mul1_128": 7, "mul1_larger": 4, "other_and_special": 15}
MOE = "moe_8x256x128_k3"
HAD = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)])  # Sylvester


def load(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    return {n: np.frombuffer(data[slice(*e["data_offsets"])], DTYPES[e["dtype"]]).reshape(e["shape"])
            for n, e in header.items() if n != "__metadata__"}


def save(path, weight, hessian):
    header = {"weight": {"dtype": "F16", "shape": weight.shape, "data_offsets": [0, weight.nbytes]},
              "H": {"dtype": "F32", "shape": hessian.shape, "data_offsets": [weight.nbytes, weight.nbytes + hessian.nbytes]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + weight.tobytes() + hessian.tobytes())


def readme_table():  # the rows of 'Linear cases' by name, each a dict from column title to text
    lines = (TREE / "README.md").read_text().split("## Linear cases")[1].split("\n##")[0].splitlines()
    rows = [[c.strip() for c in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}


def exl3(*arguments):
    command = [BIN, "exl3", *map(str, arguments), "--threads", "1", "--quiet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"exl3 {arguments}: exit {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def true_error(weight, decoded, hessian):
    w = weight.astype(np.float64)
    e = w - decoded.astype(np.float64)
    return np.sum(e * (hessian @ e)) / np.sum(w * (hessian @ w))


class Golden(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.table = readme_table()
        paths = [TREE / "mul1_128.safetensors", SHARED / "mul1_larger.safetensors", SHARED / "other_and_special.safetensors"]
        if absent := [p.name for p in paths[1:] if not p.exists()]:
            print(f"NOT CHECKED, not beside the tree (../shared/golden/exl3): {', '.join(absent)}", flush=True)
        cls.files = {p: load(p) for p in paths if p.name not in absent}
        cls.cases = {n: (p, t) for p, t in cls.files.items() for n in cls.table if n + ".trellis" in t}
        if (len(cls.table), len(cls.cases)) != (26, sum(N_LINEARS[p.stem] for p in cls.files)):
            raise AssertionError(f"{len(cls.table)} table rows, cases found: {sorted(cls.cases)}")
        tmp = tempfile.TemporaryDirectory()
        cls.addClassCleanup(tmp.cleanup)
        cls.out = pathlib.Path(tmp.name)

    def decode(self, path, name, bits, codebook):
        told = exl3("decode", path, "--name", name, "--out", self.out / "decoded")
        self.assertEqual((told["bits"], told["codebook"]), (float(bits), codebook), name)
        return load(self.out / "decoded")

    def test_decode_is_exllamav3s(self):
        for name, (path, t) in self.cases.items():
            got = self.decode(path, name, self.table[name]["K"], self.table[name]["codebook"])
            inner, dec, suh, svh = (t[f"{name}.{part}"] for part in ("inner", "dec", "suh", "svh"))
            self.assertEqual((got["inner"].dtype, got["weight"].dtype, got["inner"].shape), (np.float16, np.float32, inner.shape), name)
            np.testing.assert_array_equal(got["inner"].view(np.uint16), inner.view(np.uint16), name)
            # Had * inner * Had with entries +-1 and the / 128 at the end is exact in fp64; the program's and exllamav3's fp64 sums
            # take at most 2 * 128 + 8 roundings of terms of |inner| / 128. Then each is rounded once to fp32.
            (k, n), scale = inner.shape, np.outer(suh.astype(np.float64), svh.astype(np.float64))
            blocks = inner.astype(np.float64).reshape(k // 128, 128, n // 128, 128)
            exact = np.einsum("ab,ibjc,cd->iajd", HAD, blocks, HAD, optimize=True).reshape(k, n) / 128 * scale
            sums = 264 * 2.0**-53 * np.abs(scale) * np.abs(blocks).sum((1, 3)).repeat(128, 0).repeat(128, 1) / 128
            step = np.spacing(np.maximum(np.abs(got["weight"]), np.abs(dec))).astype(np.float64)
            error, off = (np.abs(got["weight"].astype(np.float64) - w) for w in (dec, exact))
            print(f"decode {name}: inner equal; weight differs from dec in {int((error > 0).sum())} of {k * n}, worst "
                  f"{np.max(error / step):.0f} fp32 step, from the exact value by at most {np.max(off / step):.4f} step")
            self.assertTrue((error <= step + 2 * sums).all() and (off <= step / 2 + sums).all(), name)
        for path, t in self.files.items():
            if MOE + ".selected" in t:  # in mul1_larger
                self.check_mixture_of_experts(path, t)

    def check_mixture_of_experts(self, path, t):
        expert = lambda e, p: self.decode(path, f"{MOE}.experts.{e}.{p}_proj", 3, "mul1")["weight"].astype(np.float64)
        experts = [[expert(e, p) for p in ("gate", "up", "down")] for e in range(8)]
        want, x, got = t[MOE + ".y_ref"].astype(np.float64), t[MOE + ".x"].astype(np.float64), np.zeros((4, 256))
        for (row, slot), e in np.ndenumerate(t[MOE + ".selected"]):
            g, u = x[row] @ experts[e][0], x[row] @ experts[e][1]
            got[row] += float(t[MOE + ".routing_weights"][row, slot]) * ((g / (1 + np.exp(-g)) * u) @ experts[e][2])
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        print(f"decode {MOE}: 24 matrices, relative difference of the layer's output {error:.1e}")
        self.assertLessEqual(error, 4 * 2.0**-24)  # three weights and the output, each rounded once to fp32

    def test_encode_is_closer_than_exllamav3(self):
        ratios, made = [], self.out / "m"
        print(f"{'encode':32s}{'exllamav3':>11s}{'mean of 5':>11s}{'ratio':>8s}  the five seeds")
        for name, (path, t) in self.cases.items():
            row, stored = self.table[name], SAME_WEIGHT.get(name, name)
            if row["Hessian (rows)"].startswith("none"):
                continue
            weight, source = t[stored + ".weight"], [path, "--weight", stored + ".weight"]
            if stored + ".H" in t:
                hessian, source = t[stored + ".H"].astype(np.float64), source + ["--hessian", stored + ".H"]
            elif stored + ".calib_x" in t:
                x = t[stored + ".calib_x"].astype(np.float64)
                hessian, source = x.T @ x / len(x), source + ["--calib", stored + ".calib_x"]
            else:
                self.assertTrue(row["Hessian (rows)"].startswith("identity"), name)
                hessian, source = np.eye(len(weight)), [self.out / "in", "--weight", "weight", "--hessian", "H"]
                save(self.out / "in", weight, hessian.astype(np.float32))
            recorded = float(row["rel_err_H"])  # as printed; what is measured here on exllamav3's own result must round to it
            last_digit = 10.0 ** decimal.Decimal(row["rel_err_H"]).as_tuple().exponent
            self.assertAlmostEqual(true_error(weight, t[name + ".dec"], hessian), recorded, delta=0.501 * last_digit, msg=name)
            errors = []
            for seed in range(1, 6):
                told = exl3("encode", *source, "--bits", row["K"], "--codebook", row["codebook"], "--seed", seed, "--name", "m", "--out", made)
                errors.append(true_error(weight, self.decode(made, "m", row["K"], row["codebook"])["weight"], hessian))
                self.assertAlmostEqual(told["true_error"], errors[-1], delta=1e-9 * errors[-1], msg=f"{name} seed {seed}")
            ratios.append(np.mean(errors) / recorded)
            print(f"{name:32s}{recorded:11.3e}{np.mean(errors):11.3e}{ratios[-1]:8.3f}  {' '.join(f'{e:.3e}' for e in errors)}")
            self.assertEqual(len(set(errors)), 5, f"{name}: the seed does not change the result")
        mean = np.exp(np.mean(np.log(ratios)))
        print(f"encode: geometric mean of {len(ratios)} cases {mean:.4f} of exllamav3's error (bound 1.01), worst case {max(ratios):.3f}")
        self.assertLessEqual(mean, 1.01)


if __name__ == "__main__":
    unittest.main(verbosity=2)
