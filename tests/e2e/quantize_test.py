"""`espalier quantize` and `eval` through the real binary on a small checkpoint cut out of the golden one.

Oracles: an independent parse of every shard (small_checkpoint.py), sha256sum, the native tensors. Environment: ESPALIER_BIN,
ESPALIER_SOURCE_DIR.
"""
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

import small_checkpoint as small

BIN = os.environ["ESPALIER_BIN"]
GOLDEN = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tests/golden/model/tiny-a"


def run(*arguments, **kwargs):
    return subprocess.run([BIN, *map(str, arguments)], capture_output=True, text=True, timeout=600, **kwargs)


class Folder(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        cls.model = small.write_checkpoint(GOLDEN, cls.root / "model")
        cls.data = cls.root / "data.jsonl"
        cls.data.write_text("".join(small.data_line(f"r{i}", small.token_row(i, n), "ab"[i % 2]) for i, n in enumerate([96, 33, 64])))

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()


class Pack(Folder):
    """A run is interrupted, then killed in the middle, then started again; the pack that comes out is looked at from all sides."""

    def quantize(self):
        return [BIN, "quantize", str(self.model), "--bits", "3", "--data", str(self.data), "--out", str(self.root / "pack"), "--json"]

    def start_and_signal(self, which):
        """Sends a signal once the first layer's shard is there; returns the exit code and stderr."""
        shards = self.root / "pack.work/shards"
        process = subprocess.Popen(self.quantize() + ["--quiet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.time() + 300
        while not list(shards.glob("model-00002-*")) and process.poll() is None and time.time() < deadline:
            time.sleep(0.02)
        self.assertIsNone(process.poll(), "ended before it could be stopped")
        process.send_signal(which)
        _, err = process.communicate(timeout=300)
        return process.returncode, err

    def test_interrupted_killed_then_whole(self):
        pack = self.root / "pack"
        code, err = self.start_and_signal(signal.SIGINT)
        self.assertEqual(code, 4, err)
        self.assertFalse(pack.exists(), "Ctrl-C left the final name")
        self.assertFalse((self.root / "pack.partial").exists(), "Ctrl-C left a partial folder")

        code, _ = self.start_and_signal(signal.SIGKILL)
        self.assertEqual(code, -signal.SIGKILL)
        self.assertFalse(pack.exists(), "kill -9 left the final name")

        done = subprocess.run(self.quantize(), capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual(report["bpw"], 3.0)
        self.assertEqual(report["bytes"], sum(f.stat().st_size for f in pack.rglob("*") if f.is_file()))
        self.assertGreater(report["seconds"], 0)
        self.assertIn("quantize: ", done.stderr)
        self.assertIn("ETA", done.stderr)
        self.check_layout(pack, report)
        self.check_quality(pack)
        again = subprocess.run(self.quantize(), capture_output=True, text=True, timeout=60)
        self.assertEqual(again.returncode, 3)
        self.assertIn("exists already", again.stderr)

    def check_layout(self, pack, report):
        headers = {p.name: small.read_header(p)[0] for p in sorted(pack.glob("*.safetensors"))}
        index = json.loads((pack / "model.safetensors.index.json").read_text())
        stored = {name: (file, entry) for file, header in headers.items() for name, entry in header.items()}
        self.assertEqual({name: file for name, (file, _) in stored.items()}, index["weight_map"])
        total = sum(e["data_offsets"][1] - e["data_offsets"][0] for _, e in stored.values())
        self.assertEqual(total, index["metadata"]["total_size"])
        self.assertEqual(sorted(headers), [f"model-{i:05d}-of-{len(headers):05d}.safetensors" for i in range(1, len(headers) + 1)])

        trellises = {n[:-8]: e for n, (_, e) in stored.items() if n.endswith(".trellis")}
        self.assertEqual(len(trellises), report["matrices"])
        native = small.small_tensors(GOLDEN)
        for stem, entry in trellises.items():
            rows, cols, words = entry["shape"]
            self.assertEqual((entry["dtype"], words), ("I16", 48), stem)
            self.assertEqual(stored[stem + ".suh"][1]["shape"], [16 * rows], stem)
            self.assertEqual(stored[stem + ".svh"][1]["shape"], [16 * cols], stem)
            self.assertEqual((stored[stem + ".mul1"][1]["dtype"], stored[stem + ".mul1"][1]["shape"]), ("I32", []), stem)
            self.assertNotIn(stem + ".weight", stored)
            if ".slice." not in stem:
                out, width = native[stem + ".weight"][1]
                width *= 2 if native[stem + ".weight"][0] == "I8" else 1
                self.assertEqual([16 * rows, 16 * cols], [width, out], stem)
        # Everything that is not replaced is there, byte for byte.
        now = {}
        for file in headers:
            now.update(small.read_tensors(pack / file))
        for name, (dtype, shape, blob) in native.items():
            stem = name.rsplit(".", 1)[0]
            if stem in trellises or stem.endswith("attn.wo_a"):
                continue
            self.assertEqual(now.get(name), (dtype, shape, blob), name)

        config = json.loads((pack / "config.json").read_text())
        self.assertEqual(config["quantization_config"]["quant_method"], "exl3")
        self.assertEqual(config["quantization_config"]["original_quantization_config"]["quant_method"], "fp8")
        full = json.loads((pack / "quantization_config.json").read_text())
        listed = {n: t for m in full["tensor_storage"].values() for n, t in m["stored_tensors"].items()}
        self.assertEqual({n: e["shape"] for n, (_, e) in stored.items()}, {n: t["shape"] for n, t in listed.items()})
        for stem in trellises:
            self.assertEqual(full["tensor_storage"][stem]["bits_per_weight"], 3)
        for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
            self.assertEqual((pack / name).read_bytes(), (self.model / name).read_bytes())

        check = subprocess.run(["sha256sum", "-c", "--quiet", "MANIFEST.sha256"], cwd=pack, capture_output=True, text=True)
        self.assertEqual(check.returncode, 0, check.stdout + check.stderr)
        names = [line.split("  ")[1] for line in (pack / "MANIFEST.sha256").read_text().splitlines()]
        self.assertEqual(names, sorted(names))
        self.assertEqual(set(names), {str(f.relative_to(pack)) for f in pack.rglob("*") if f.is_file()} - {"MANIFEST.sha256"})
        records = [json.loads(line) for line in (pack / "matrices.jsonl").read_text().splitlines()]
        self.assertEqual({r["name"] for r in records}, set(trellises))
        first = records[0]
        digest = hashlib.sha256(b"".join(now[first["name"] + part][2] for part in (".trellis", ".suh", ".svh"))).hexdigest()
        self.assertEqual(first["sha256"], digest)

    def check_quality(self, pack):
        def kl(candidate, *more):
            r = run("eval", "kl", "--reference", self.model, "--candidate", candidate, "--panel", self.data, "--json", "--quiet", *more)
            self.assertEqual(r.returncode, 0, r.stderr)
            return json.loads(r.stdout)

        same = kl(self.model)
        self.assertEqual((same["kl_mean"], same["kl_domain_mean"], same["top1"]), (0, 0, 1))
        self.assertEqual(same["positions"], 95 + 32 + 63)
        self.assertEqual(same["ppl"], same["ppl_reference"])
        quantized = kl(pack, "--out", self.root / "result")
        self.assertGreater(quantized["kl_mean"], 1e-4)
        self.assertLess(quantized["kl_mean"], 0.5)
        self.assertEqual({d: v["positions"] for d, v in quantized["domains"].items()}, {"a": 95 + 63, "b": 32})
        self.assertEqual(json.loads((self.root / "result/result.json").read_text())["kl_mean"], quantized["kl_mean"])
        sidecar = small.read_header(self.root / "result/sidecar.safetensors")[0]
        self.assertEqual(sidecar["kl"]["shape"], [190])
        self.assertIn("all", (self.root / "result/report.txt").read_text())
        ppl = run("eval", "ppl", pack, "--panel", self.data, "--json", "--quiet")
        self.assertEqual(json.loads(ppl.stdout)["ppl"], quantized["ppl"])


class Refusals(Folder):
    """Wrong input: one clear line on stderr, the contract's exit code, and nothing under the final name."""

    def refused(self, code, expected, model=None, data=None, flags=()):
        out = self.root / "refused"
        r = run("quantize", model or self.model, "--bits", "3", "--data", data or self.data, "--out", out, "--quiet", *flags)
        lines = r.stderr.strip().splitlines()
        self.assertEqual(len(lines), 1, r.stderr)
        self.assertTrue(lines[0].startswith("espalier: error: "), lines[0])
        for part in expected if isinstance(expected, tuple) else (expected,):
            self.assertIn(part, lines[0])
        self.assertEqual(r.returncode, code, lines[0])
        self.assertEqual(r.stdout, "")
        self.assertFalse(out.exists())
        self.assertFalse(pathlib.Path(str(out) + ".partial").exists())

    def changed(self, name, change=None, tensors=None, config=None):
        tensors = tensors if tensors is not None else small.small_tensors(GOLDEN)
        if change is not None:
            change(tensors)
        return small.write_checkpoint(GOLDEN, self.root / name, tensors, config)

    def test_truncated_shard(self):
        model = self.changed("truncated")
        shard = model / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        self.refused(3, "model.safetensors", model=model)

    def test_missing_tensor(self):
        self.refused(3, "layers.1.attn.wq_b.scale", model=self.changed("missing", lambda t: t.pop("layers.1.attn.wq_b.scale")))

    def test_wrong_dtype(self):
        def change(t):
            _, shape, blob = t["layers.2.attn.wkv.weight"]
            t["layers.2.attn.wkv.weight"] = ("I8", shape, blob)
        self.refused(3, ("layers.2.attn.wkv.weight", "I8"), model=self.changed("dtype", change))

    def test_wrong_shape(self):
        def change(t):
            dtype, shape, blob = t["layers.0.ffn.experts.1.w2.weight"]
            t["layers.0.ffn.experts.1.w2.weight"] = (dtype, [shape[0] // 2, shape[1] * 2], blob)
        self.refused(3, ("layers.0.ffn.experts.1.w2.weight", "[128, 128]"), model=self.changed("shape", change))

    def test_nan_weight(self):
        def change(t):
            dtype, shape, blob = t["layers.0.attn.wq_a.weight"]
            t["layers.0.attn.wq_a.weight"] = (dtype, shape, blob[:777] + b"\x7f" + blob[778:])
        self.refused(3, "layers.0.attn.wq_a.weight", model=self.changed("nan", change))

    def test_nan_scale(self):
        def change(t):
            dtype, shape, blob = t["layers.0.ffn.experts.2.w1.scale"]
            t["layers.0.ffn.experts.2.w1.scale"] = (dtype, shape, b"\xff" + blob[1:])
        self.refused(3, ("layers.0.ffn.experts.2.w1", "scale", "NaN"), model=self.changed("nan_scale", change))

    def test_unknown_config_value(self):
        config = small.small_config(GOLDEN)
        config["text_config"]["scoring_func"] = "softmax"
        self.refused(UNSUPPORTED, ("scoring_func", "softmax"), model=self.changed("config", config=config))

    def test_broken_config(self):
        model = self.changed("broken_config")
        (model / "config.json").write_text('{"text_config": ')
        self.refused(3, "config.json", model=model)

    def data_file(self, text):
        path = self.root / "bad.jsonl"
        path.write_text(text)
        return path

    def test_broken_json_line(self):
        self.refused(3, ("bad.jsonl", "line 2"), data=self.data_file(small.data_line("a", [1, 2]) + '{"id": "b", "ids": [1,\n'))

    def test_empty_row(self):
        self.refused(3, "row 'a' is empty", data=self.data_file(small.data_line("a", [])))

    def test_empty_file(self):
        self.refused(3, "has no rows", data=self.data_file(""))

    def test_missing_data_set(self):
        self.refused(3, "absent.jsonl", data=self.root / "absent.jsonl")

    def test_id_outside_the_vocabulary(self):
        self.refused(3, ("id 512 at position 2", "vocabulary of 512"), data=self.data_file(small.data_line("a", [1, 2, 512])))

    def test_missing_checkpoint(self):
        self.refused(3, "nowhere", model=self.root / "nowhere")

    def test_output_is_the_input(self):
        r = run("quantize", self.model, "--bits", "3", "--data", self.data, "--out", self.model, "--quiet")
        self.assertEqual(r.returncode, 3)
        self.assertIn("is the checkpoint itself", r.stderr)
        self.assertTrue((self.model / "model.safetensors").exists())

    def test_usage(self):
        for flags, expected in ((("--bits", "9"), "1 to 8"), (("--head-bits", "0.5"), "--head-bits"), (("--layout", "zip"), "--layout"),
                                (("--rows", "-3"), "--rows"), (("--head-bits", "12"), "--head-bits")):
            r = run("quantize", self.model, "--data", self.data, "--out", self.root / "u", "--quiet",
                    *(flags if flags[0] == "--bits" else ("--bits", "3", *flags)))
            self.assertEqual(r.returncode, 2, r.stderr)
            self.assertIn(expected, r.stderr)

    def test_eval_refuses_broken_panels_and_models(self):
        empty = self.data_file(small.data_line("a", [1, 2], mask=[0, 0]))
        for arguments, expected in ((("ppl", self.model, "--panel", empty), "no scored positions"),
                                    (("ppl", self.model, "--panel", self.root / "absent.jsonl"), "absent.jsonl"),
                                    (("kl", "--reference", self.model, "--candidate", self.root / "nowhere", "--panel", self.data), "nowhere")):
            r = run("eval", *arguments, "--quiet")
            self.assertEqual(r.returncode, 3, r.stderr)
            self.assertEqual(len(r.stderr.strip().splitlines()), 1, r.stderr)
            self.assertIn(expected, r.stderr)


UNSUPPORTED = 3  # a valid file that asks for something this program does not run

if __name__ == "__main__":
    unittest.main(verbosity=2)
