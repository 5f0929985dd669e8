"""`espalier plan` through the real binary on the pocket model: the plan keeps its limits, predicts what the tables' formula gives, is
read by `quantize`, and what does not fit is refused with the contract's exit codes.

The tables are made here, from a seed; the prediction and the sizes are computed a second time in Python.
Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import hashlib
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

BIN = os.environ["ESPALIER_BIN"]
LAYERS, EXPERTS, ACTIVE = 8, 16, 3
DOMAINS = ["prose", "code", "dialogue"]
BITS = {**{str(k): k for k in range(1, 9)}, "a": 1.5, "b": 2.5, "c": 3.5, "n": 4.25}


def run(*args):
    return subprocess.run([BIN, "plan", *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def write_safetensors(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, (shape, values) in tensors.items():
        blob = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def as_f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


class Tables:
    def __init__(self, folder):
        rng = random.Random(7)
        self.folder = pathlib.Path(folder)
        (self.folder / "stats").mkdir()
        self.slopes = [[math.exp(rng.gauss(-1, 0.7)) for _ in DOMAINS] for _ in range(LAYERS)]
        self.reads, self.shares = [], []
        for _ in range(LAYERS):
            q = [math.exp(rng.gauss(0, 0.8)) for _ in range(EXPERTS)]
            # At most one read per token and expert.
            reads = [min(1, ACTIVE * x / sum(q)) for x in q]
            self.reads += [as_f32(x) for x in reads]
            for x in q:
                self.shares += [as_f32(0.9 * x / sum(q) * math.exp(rng.gauss(0, 0.3))) for _ in DOMAINS]
        write_safetensors(
            self.folder / "stats/routing.safetensors",
            {"share": ([LAYERS, EXPERTS, len(DOMAINS)], self.shares), "reads_routed": ([LAYERS, EXPERTS], self.reads)},
            {"schema": "espalier-routing-1", "domains": json.dumps(DOMAINS), "calibration_sha256": "c" * 64})
        self.table = {
            "schema": "espalier-sensitivity-1", "model": {"layers": LAYERS, "experts": EXPERTS}, "method": "swap",
            "domains": [{"name": n, "weight": w, "floor": 1e-4 * (i + 1), "additivity": 0.9 + 0.1 * i}
                        for i, (n, w) in enumerate(zip(DOMAINS, [1, 1, 0.5]))],
            "layers": [{"floor": [0] * 3, "slope": s, "slope_se": [0.01] * 3} for s in self.slopes],
            "matrix_factors": {"w1": 1, "w3": 1, "w2": 1.37},
            "routing_sha256": hashlib.sha256((self.folder / "stats/routing.safetensors").read_bytes()).hexdigest()}
        self.write()

    def write(self):
        (self.folder / "S.json").write_text(json.dumps(self.table))

    def args(self, out, *more):
        return ["pocket", "--stats", self.folder / "stats", "--sensitivity", self.folder / "S.json", "--out", self.folder / out, *more]

    def widths(self, plan):
        for layer in range(LAYERS):
            whole = plan["layers"].get(str(layer))
            parts = plan.get("matrices", {}).get(str(layer), {"w1": whole, "w3": whole, "w2": whole})
            for e in range(EXPERTS):
                yield layer, e, [parts[m][e] for m in ("w1", "w3", "w2")]

    def predicted(self, plan):
        def phi(c):
            return 0 if c == "n" else (0.292 * 1.96 ** (2 - BITS[c])) ** 2
        k = [1, 1, 1.37]
        kl = [d["floor"] for d in self.table["domains"]]
        for layer, e, chars in self.widths(plan):
            error = sum(f * phi(c) for f, c in zip(k, chars)) / sum(k)
            for d, domain in enumerate(self.table["domains"]):
                kl[d] += domain["additivity"] * self.slopes[layer][d] * self.shares[(layer * EXPERTS + e) * 3 + d] * error
        return kl

    def bits(self, plan):
        stored = read = reads = 0
        for layer, e, chars in self.widths(plan):
            bits = sum(BITS[c] for c in chars) / 3
            f = self.reads[layer * EXPERTS + e]
            stored, read, reads = stored + bits, read + f * bits, reads + f
        return stored / (LAYERS * EXPERTS), read / reads


class Plan(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.TemporaryDirectory()
        self.addCleanup(self.tmp.cleanup)
        self.tables = Tables(self.tmp.name)

    def plan(self, *more, out="P.json"):
        done = run(*self.tables.args(out, "--json", *more))
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout), json.loads((self.tables.folder / out).read_text())

    def check(self, report, plan):
        kl = self.tables.predicted(plan)
        for name, value in zip(DOMAINS, kl):
            self.assertAlmostEqual(report["domains"][name], value, delta=1e-9)
        self.assertAlmostEqual(report["predicted_kl"], (kl[0] + kl[1] + 0.5 * kl[2]) / 2.5, delta=1e-9)
        stored, read = self.tables.bits(plan)
        self.assertAlmostEqual(report["bpw"], stored, delta=1e-9)
        self.assertAlmostEqual(report["read_bpw"], read, delta=1e-6)
        self.assertLessEqual(report["bound"], report["predicted_kl"])
        self.assertAlmostEqual(report["gap"], 1 - report["bound"] / report["predicted_kl"], delta=1e-9)
        return stored, read

    def test_plan_keeps_storage_read_cap_and_guard(self):
        free, plan = self.plan("--bpw", "2.8", "--read-cap", "3", "--super-share", "0")
        self.assertLessEqual(self.check(free, plan)[0], 2.8 + 1e-12)
        limit = free["domains"]["dialogue"] * 0.998
        report, plan = self.plan("--bpw", "2.8", "--read-cap", "3", "--guard", f"dialogue={limit}", "--super-share", "0")
        stored, read = self.check(report, plan)
        self.assertLessEqual(stored, 2.8 + 1e-12)
        self.assertLessEqual(read, 3 + 1e-6)
        self.assertLessEqual(report["domains"]["dialogue"], limit)
        self.assertGreater(report["multipliers"]["storage"] + report["multipliers"]["read"], 0)
        self.assertGreater(report["multipliers"]["guards"]["dialogue"], 0)
        self.assertGreaterEqual(report["predicted_kl"], free["predicted_kl"])
        self.assertEqual(plan["inputs"]["routing_sha256"], self.tables.table["routing_sha256"])
        self.assertEqual(plan["inputs"]["calibration_sha256"], "c" * 64)

    def test_more_bits_never_predict_more_and_rules_are_no_better(self):
        before = math.inf
        for bpw in ("2.3", "2.6", "2.9", "3.4"):
            report, plan = self.plan("--bpw", bpw, "--super-share", "0")
            self.check(report, plan)
            self.assertLessEqual(report["predicted_kl"], before)
            before = report["predicted_kl"]
            for rule in ("uniform", "ends-first", "frequency", "layer"):
                simple, text = self.plan("--bpw", bpw, "--rule", rule, "--super-share", "0", out="R.json")
                self.assertLessEqual(self.check(simple, text)[0], float(bpw) + 1e-12)
                self.assertGreaterEqual(simple["predicted_kl"], simple["bound"])
                self.assertAlmostEqual(simple["predicted_kl"], report["rules"][rule]["predicted_kl"], delta=1e-12)

    def test_same_input_same_bytes_and_matrices_with_native_experts(self):
        flags = ("--bpw", "3", "--granularity", "matrix", "--widths", "2,2.5,3,3.5,4,5,native", "--min", "6-7=3")
        report, plan = self.plan(*flags)
        self.check(report, plan)
        first = (self.tables.folder / "P.json").read_bytes()
        self.plan(*flags, out="P2.json")
        self.assertEqual((self.tables.folder / "P2.json").read_bytes(), first)
        for layer, _, chars in self.tables.widths(plan):
            self.assertEqual(chars[0], chars[1])
            self.assertIn(chars.count("n"), (0, 3))
            if layer >= 6:
                self.assertGreaterEqual(min(BITS[c] for c in chars), 3)

    def test_quantize_reads_the_plan(self):
        report, plan = self.plan("--bpw", "2.8", "--bpw-of", "card", "--dense-bits", "4", "--head-bits", "6", "--drafter-bits", "4")
        done = subprocess.run([BIN, "quantize", "pocket", "--plan", self.tables.folder / "P.json", "--dry-run", "--json"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        predicted = json.loads(done.stdout)
        self.assertEqual({k: v for k, v in predicted["widths"]["routed"].items()}, report["widths"])
        self.assertAlmostEqual(predicted["bpw"], report["card_bpw"], delta=1e-9)
        self.assertLessEqual(report["card_bpw"], 2.8)

    def test_report_folder_has_text_table_and_figures(self):
        folder = self.tables.folder / "report"
        self.plan("--bpw", "2.8", "--report", folder)
        self.assertEqual(sorted(p.name for p in folder.iterdir()), ["budget.svg", "experts.csv", "report.html", "report.txt", "widths.svg", "widths_by_layer.svg"])
        for svg in folder.glob("*.svg"):
            self.assertTrue(xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg"))
        lines = (folder / "experts.csv").read_text().splitlines()
        self.assertEqual(len(lines), 1 + LAYERS * EXPERTS)
        # The next step of an expert that a price decided would save less per bit than the price, the last one more.
        for line in lines[1:]:
            cells = line.split(",")
            if cells[-1] == "price" and float(cells[7]) > 0:
                self.assertGreaterEqual(float(cells[7]) * 1.2, float(cells[9]), line)
                self.assertLessEqual(float(cells[8]), float(cells[9]) * 1.2, line)

    def test_report_page_stands_alone(self):
        page = self.tables.folder / "plan.html"
        report, _ = self.plan("--bpw", "2.8", "--report", page)
        text = page.read_text()
        for tag in ("src=", "href=", "url(", "<script", "nan"):
            self.assertNotIn(tag, text)
        self.assertEqual(text.count("<svg "), 3)
        for name, value in report["domains"].items():
            self.assertIn(f"<tr><td>{name}</td><td>{value:.6f}</td>", text)
        for c in report["ceilings"]:
            self.assertIn(f"<td>{c['ranks']} x {c['machine']}</td>", text)
            self.assertIn(f"<td>{c['tokens_per_second']:.1f}</td>", text)
        # Well-formed once the parts that only HTML leaves open are closed.
        body = text[text.index("<body>"):text.index("</html>")]
        xml.etree.ElementTree.fromstring(body)
        table = self.tables.folder / "S.json"
        (self.tables.folder / "S.html").write_bytes(table.read_bytes())
        again = self.tables.args("P.json", "--bpw", "2.8", "--report", self.tables.folder / "S.html")
        done = run(*[self.tables.folder / "S.html" if a == table else a for a in again])
        self.assertIn(done.returncode, (2, 3), done.stderr)
        self.assertEqual((self.tables.folder / "S.html").read_bytes(), table.read_bytes())

    def test_resampling_says_how_stable_the_widths_are(self):
        report, _ = self.plan("--bpw", "2.8", "--super-share", "0", "--resamples", "50")
        confidence = report["confidence"]
        self.assertEqual(confidence["from"], "standard errors")
        self.assertLess(confidence["kl_ci95"][0], report["predicted_kl"])
        self.assertGreater(confidence["kl_ci95"][1], report["predicted_kl"])
        self.assertTrue(0 < confidence["stable_share"] <= 1)
        again, _ = self.plan("--bpw", "2.8", "--super-share", "0", "--resamples", "50", "--threads", "1")
        self.assertEqual(again["confidence"], confidence)

    def test_second_table_around_a_plan_predicts_that_plan(self):
        self.plan("--bpw", "2.8", "--super-share", "0")
        digest = hashlib.sha256((self.tables.folder / "P.json").read_bytes()).hexdigest()
        around = dict(self.tables.table, base={"plan_sha256": digest, "kl": [0.02, 0.03, 0.04]})
        (self.tables.folder / "S2.json").write_text(json.dumps(around))
        report, _ = self.plan("--bpw", "2.8", "--super-share", "0", "--around", self.tables.folder / "S2.json",
                              "--present", self.tables.folder / "P.json", out="P2.json")
        # The same slopes: the same plan is near the best one, and its prediction is what was measured.
        self.assertAlmostEqual(report["domains"]["prose"], 0.02, delta=2e-3)

    def test_what_does_not_fit_is_refused_with_the_right_code(self):
        cases = [
            (("--bpw", "1.5"), 3, "the narrowest widths"),
            (("--bpw", "2.1", "--min", "0-5=4"), 3, "the pins alone take"),
            (("--bpw", "2.8", "--guard", "prose=0.0001"), 3, "guard 'prose'"),
            (("--bpw", "2.8", "--guard", "poetry=1"), 2, "one of prose, code, dialogue"),
            (("--bpw", "2.8", "--guard", "prose="), 2, "expected DOMAIN=NUMBER"),
            (("--bpw", "2.8", "--min", "9=3"), 2, "expected LAYERS"),
            (("--bpw", "2.8", "--widths", "2,9"), 2, "found '9'"),
            (("--bpw", "2.8", "--bpw-of", "card"), 2, "expected --dense-bits"),
            (("--bpw", "2.8", "--reads", "served"), 3, "no read frequencies as served"),
            (("--bpw", "2.8", "--present", self.tables.folder / "S.json"), 2, "together"),
        ]
        for flags, code, message in cases:
            done = run(*self.tables.args("no.json", *flags))
            self.assertEqual(done.returncode, code, (flags, done.stderr))
            self.assertIn(message, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)
            self.assertFalse((self.tables.folder / "no.json").exists())

    def test_inputs_are_never_overwritten(self):
        before = (self.tables.folder / "S.json").read_bytes()
        done = run(*self.tables.args("S.json", "--bpw", "2.8"))
        self.assertIn(done.returncode, (2, 3), done.stderr)
        self.assertEqual((self.tables.folder / "S.json").read_bytes(), before)
        (self.tables.folder / "report").mkdir()
        done = run(*self.tables.args("P.json", "--bpw", "2.8", "--report", self.tables.folder / "report"))
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertFalse((self.tables.folder / "P.json").exists())

    def test_tables_that_do_not_belong_together_are_refused(self):
        self.tables.table["routing_sha256"] = "0" * 64
        self.tables.write()
        done = run(*self.tables.args("no.json", "--bpw", "2.8"))
        self.assertEqual(done.returncode, 3)
        self.assertIn("routing.safetensors: the sensitivity table was measured with 000", done.stderr)
        self.tables.table["routing_sha256"] = None
        self.tables.table["layers"].pop()
        self.tables.write()
        done = run(*self.tables.args("no.json", "--bpw", "2.8"))
        self.assertEqual(done.returncode, 3)
        self.assertIn("'layers': expected a list of 8 layers", done.stderr)
        os.remove(self.tables.folder / "stats/routing.safetensors")
        self.assertEqual(run(*self.tables.args("no.json", "--bpw", "2.8")).returncode, 3)


if __name__ == "__main__":
    unittest.main(verbosity=2)
