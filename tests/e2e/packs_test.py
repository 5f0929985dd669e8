"""Packs through the real binary: convert between all layouts, verify, inspect, and every kind of damage refused by name.

One pack of a small checkpoint is encoded once. Oracles: an independent parse of every shard (small_checkpoint.py) and sha256sum;
tests/oracle/packs_oracle.py has the official safetensors library and exllamav3 read such packs, quantize_pocket_test.py has a pack of the
pocket model go through all layouts.
ESPALIER_POCKET_FULL=1 uses the bundled pocket model instead of the small checkpoint. Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR;
ESPALIER_MAKER: another build that encodes the pack (a sanitized one takes minutes for what a release build does in seconds).
"""
import hashlib
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import tempfile
import unittest

import small_checkpoint as small

BIN = os.environ["ESPALIER_BIN"]
MAKER = os.environ.get("ESPALIER_MAKER", BIN)
SOURCE = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"])
GOLDEN = SOURCE / "tests/golden/model/tiny-a"
FULL = os.environ.get("ESPALIER_POCKET_FULL") == "1"
LAYOUTS = ("exllamav3", "vllm", "tensorfold")


def run(*arguments, program=BIN):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=900)


def result(*arguments, code=0, program=BIN):
    r = run(*arguments, "--json", "--quiet", program=program)
    assert r.returncode == code, f"{arguments}: exit code {r.returncode}: {r.stderr}{r.stdout}"
    return json.loads(r.stdout)


def tensors_of(pack):
    out = {}
    for path in sorted(pack.glob("*.safetensors")):
        for name, value in small.read_tensors(path).items():
            assert name not in out, f"{name} is stored twice"
            out[name] = value
    return out


class Shared:
    """The folder of this run, the model, its calibration rows and the one pack that is encoded; each test damages copies."""


def setUpModule():
    Shared.tmp = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(Shared.tmp.cleanup)
    root = Shared.root = pathlib.Path(Shared.tmp.name)
    Shared.b = root / "b"
    if FULL:
        Shared.model = SOURCE / "models/pocket"
        Shared.data = Shared.model / "data/calibration.jsonl"
        result("quantize", Shared.model, "--bits", "3", "--head-bits", "4", "--data", Shared.data, "--rows", "8", "--out", Shared.b,
               program=MAKER)
        return
    Shared.model = small.write_checkpoint(GOLDEN, root / "model")
    Shared.data = root / "data.jsonl"
    Shared.data.write_text("".join(small.data_line(f"r{i}", small.token_row(i, n), "ab"[i % 2]) for i, n in enumerate([64, 33])))
    result("quantize", Shared.model, "--bits", "2", "--dense-bits", "3", "--head-bits", "4", "--drafter-bits", "2.5", "--data", Shared.data,
           "--out", Shared.b, program=MAKER)


class Packs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root, cls.model, cls.data, cls.b = Shared.root, Shared.model, Shared.data, Shared.b

    def copy(self, name, pack=None):
        """A copy that may be damaged: real files, no links to the original."""
        to = self.root / name
        if to.exists():
            shutil.rmtree(to)
        shutil.copytree(pack or self.b, to)
        return to

    def converted(self, layout):
        """The pack in another layout, made once."""
        to = self.root / f"as-{layout}"
        if not to.exists():
            result("convert", self.b, "--layout", layout, "--out", to)
        return to


class Conversion(Packs):
    def greedy(self, pack):
        return result("generate", pack, "--prompt", "The capital", "--max-tokens", "24")["token_ids"]

    def test_round_trip_through_all_layouts(self):
        original = tensors_of(self.b)
        answer = self.greedy(self.b)
        at = self.b
        for step, layout in enumerate(("vllm", "exllamav3", "tensorfold", "vllm", "tensorfold", "exllamav3")):
            to = self.root / f"step{step}"
            report = result("convert", at, "--layout", layout, "--out", to)
            self.assertEqual(report["tensors"], len(original))
            self.assertEqual(report["bytes"], sum(f.stat().st_size for f in to.rglob("*") if f.is_file()))
            self.assertEqual(tensors_of(to), original, f"step {step} to {layout}")
            self.assertEqual(result("inspect", to)["family"], layout)
            self.assertEqual(self.greedy(to), answer)
            verified = result("verify", to)
            self.assertEqual((verified["ok"], verified["problems"]), (True, []))
            self.assertEqual(verified["digests"], verified["matrices"])
            subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "MANIFEST.sha256"], cwd=to, check=True)
            at = to
        # Back in its first layout the pack is the one that was encoded, file for file; only convert.json tells of the way.
        for name in sorted(p.name for p in self.b.iterdir()):
            if name != "MANIFEST.sha256":
                self.assertEqual((at / name).read_bytes(), (self.b / name).read_bytes(), name)
        self.assertEqual([s["to"] for s in json.loads((at / "convert.json").read_text())["steps"]][-1], "exllamav3")
        self.assertEqual(sorted(set(p.name for p in at.iterdir()) - set(p.name for p in self.b.iterdir())), ["convert.json"])

    def test_file_names_and_side_files_of_each_layout(self):
        n_layers = json.loads((self.b / "config.json").read_text())["text_config"]["num_hidden_layers"]
        vllm = self.converted("vllm")
        names = {p.name for p in vllm.iterdir()}
        for layer in range(n_layers):
            self.assertLessEqual({f"model-exl3-L{layer:02d}-p0.safetensors", f"model-exl3-L{layer:02d}-p1.safetensors",
                                  f"model-exl3-dense-L{layer:02d}.safetensors"}, names)
        self.assertLessEqual({"model-exl3-head.safetensors", "model-exl3-mtp.safetensors", "model-exl3-mtp-experts.safetensors",
                              "exl3_moe_plan.json"}, names)
        block = json.loads((vllm / "config.json").read_text())["quantization_config"]
        self.assertEqual(block["quant_method"], "deepseek_v41_exl3")
        self.assertEqual((block["exl3_moe"]["tp_layout"], block["exl3_moe"]["head"], block["exl3_moe"]["head_k"]), ("channels", "exl3", 4))
        headers = {n: e for p in vllm.glob("*.safetensors") for n, e in small.read_header(p)[0].items()}
        for module, bits in block["exl3_moe"]["dense"].items():
            trellis = headers.get(module + ".trellis") or headers[module + ".slice.0.trellis"]
            self.assertEqual(trellis["shape"][2], 16 * bits, module)
        plan = json.loads((vllm / "exl3_moe_plan.json").read_text())
        for layer, text in plan["layers"].items():
            for expert, width in enumerate(text):
                for w in ("w1", "w2", "w3"):
                    shape = headers[f"layers.{layer}.ffn.experts.{expert}.{w}.trellis"]["shape"]
                    self.assertEqual(shape[2], 16 * int(width))
        fold = self.converted("tensorfold")
        names = {p.name for p in fold.iterdir()}
        self.assertLessEqual({f"layer-{layer:02d}.safetensors" for layer in range(n_layers)} | {"head-mtp.safetensors", "native.safetensors"}, names)
        self.assertTrue(all(n.rsplit(".", 1)[1] in ("trellis", "suh", "svh", "mul1") for n in small.read_header(fold / "head-mtp.safetensors")[0]))
        self.assertEqual(json.loads((fold / "config.json").read_text())["quantization_config"]["quant_method"], "fp8")
        for pack in (vllm, fold):
            for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE", "run.json", "matrices.jsonl", "source.lock.json"):
                self.assertEqual((pack / name).read_bytes(), (self.b / name).read_bytes(), name)

    def test_files_that_stay_the_same_are_linked_or_copied_on_demand(self):
        again = self.root / "again"
        report = result("convert", self.b, "--layout", "exllamav3", "--out", again)
        self.assertEqual(report["written_files"], 0)
        shard = "model-00002-of-" + sorted(p.name for p in self.b.glob("model-*"))[0][-17:]
        self.assertTrue((again / shard).samefile(self.b / shard))
        copied = self.root / "copied"
        report = result("convert", self.b, "--layout", "exllamav3", "--out", copied, "--copy")
        self.assertEqual(report["linked_files"], 0)
        self.assertFalse((copied / shard).samefile(self.b / shard))
        self.assertEqual((copied / "MANIFEST.sha256").read_text(), (again / "MANIFEST.sha256").read_text())

    def test_tables_elsewhere_and_biases_from_the_checkpoint(self):
        lean = self.root / "lean"
        result("convert", self.b, "--layout", "tensorfold", "--out", lean, "--leave-engram")
        self.assertEqual(list(lean.glob("engram-*")), [])
        r = run("generate", lean, "--prompt", "The capital", "--max-tokens", "2", "--quiet")
        self.assertEqual(r.returncode, 3)
        self.assertIn("engram.embed", r.stderr)
        self.assertEqual(sorted(result("inspect", lean)["missing"]), sorted(n for n in tensors_of(self.b) if ".engram.embed." in n))
        self.assertEqual(result("inspect", lean, "--engram", self.model)["missing"], [])
        back = self.root / "lean-back"
        result("convert", lean, "--layout", "exllamav3", "--engram", self.model, "--out", back)
        self.assertEqual(tensors_of(back), tensors_of(self.b))

        # A pack without image router biases, as some public ones are.
        bare = self.copy("bare")
        biases = {}
        for path in bare.glob("*.safetensors"):
            tensors = small.read_tensors(path)
            biases.update({n: t for n, t in tensors.items() if n.endswith("bias_vl")})
            small.write_tensors(path, {n: t for n, t in tensors.items() if not n.endswith("bias_vl")})
        index = json.loads((bare / "model.safetensors.index.json").read_text())
        for name in biases:
            del index["weight_map"][name]
        index["metadata"]["total_size"] -= sum(len(t[2]) for t in biases.values())
        (bare / "model.safetensors.index.json").write_text(json.dumps(index))
        (bare / "quantization_config.json").unlink()
        (bare / "MANIFEST.sha256").unlink()
        report = result("inspect", bare)
        self.assertEqual((report["missing"], report["unexpected"]), ([], []))
        self.assertEqual(sum("bias_vl" in note for note in report["notes"]), len(biases))
        filled = self.root / "filled"
        result("convert", bare, "--layout", "exllamav3", "--checkpoint", self.model, "--out", filled)
        self.assertEqual(tensors_of(filled), tensors_of(self.b))
        # The same as a side file beside an untouched pack.
        small.write_tensors(bare / "bias_vl.safetensors", biases)
        self.assertEqual(sum("bias_vl" in note for note in result("inspect", bare)["notes"]), 0)
        # Another snapshot's checkpoint is refused.
        other = self.copy("other-snapshot", self.model)
        for path in other.glob("*.safetensors"):
            tensors = small.read_tensors(path)
            for name in [n for n in tensors if n.endswith("ffn.gate.bias")]:
                dtype, shape, blob = tensors[name]
                tensors[name] = (dtype, shape, blob[:-4] + struct.pack("<f", 0.25))
            small.write_tensors(path, tensors)
        (bare / "bias_vl.safetensors").unlink()
        r = run("convert", bare, "--layout", "exllamav3", "--checkpoint", other, "--out", self.root / "refused", "--quiet")
        self.assertEqual(r.returncode, 3)
        self.assertIn("another snapshot", r.stderr)
        self.assertFalse((self.root / "refused").exists())

    def test_refusals(self):
        for arguments, code, expected in (((self.model, "--layout", "vllm", "--out", self.root / "x"), 3, "without EXL3 matrices"),
                                          ((self.b, "--layout", "vllm", "--out", self.b), 3, "is the pack itself"),
                                          ((self.b, "--layout", "vllm", "--out", self.b / "inside"), 3, "lies inside"),
                                          ((self.b, "--layout", "zip", "--out", self.root / "x"), 2, "--layout"),
                                          ((self.root / "none", "--layout", "vllm", "--out", self.root / "x"), 3, "none")):
            r = run("convert", *arguments, "--quiet")
            self.assertEqual((r.returncode, len(r.stderr.strip().splitlines())), (code, 1), r.stderr)
            self.assertIn(expected, r.stderr)
            self.assertFalse((self.root / "x").exists())


class Damage(Packs):
    """Every damage: `verify` says what is wrong and ends with 1 (never by a signal), and what cannot be loaded is refused with 3."""

    def problems(self, pack, *expected, loads=None, manifest=True):
        """manifest=False: as in a public pack that has none, so that the other checks must find it."""
        if not manifest:
            for name in ("MANIFEST.sha256",):
                (pack / name).unlink(missing_ok=True)
        found = result("verify", pack, code=1)
        self.assertFalse(found["ok"])
        for part in expected:
            self.assertTrue(any(part in line for line in found["problems"]), f"{part!r} not in {found['problems'][:5]}")
        if loads is None:
            return
        r = run("generate", pack, "--prompt", "a", "--max-tokens", "1", "--quiet")
        if loads:
            self.assertEqual(r.returncode, 0, r.stderr)
        else:
            self.assertEqual((r.returncode, len(r.stderr.strip().splitlines())), (3, 1), r.stderr)
            for part in expected:
                self.assertIn(part, r.stderr)

    def shard(self, pack, tensor):
        return next(p for p in sorted(pack.glob("*.safetensors")) if tensor in small.read_header(p)[0])

    def rewrite(self, pack, tensor, change):
        """Replaces one tensor of one shard; change(dtype, shape, blob) -> {name: (dtype, shape, blob)}."""
        path = self.shard(pack, tensor)
        tensors = small.read_tensors(path)
        dtype, shape, blob = tensors.pop(tensor)
        tensors.update(change(dtype, shape, blob))
        small.write_tensors(path, tensors)
        return path.name

    EXPERT = "layers.1.ffn.experts.2.w3"

    def test_one_bit_anywhere_is_found(self):
        rng = random.Random(7)
        pack = self.copy("bit")
        manifest = (pack / "MANIFEST.sha256").read_bytes()
        trellises = sorted(n for n in tensors_of(self.b) if n.endswith(".trellis"))
        for name in rng.sample(trellises, 4):
            path = self.shard(pack, name)
            header, _, base = small.read_header(path)
            begin, end = header[name]["data_offsets"]
            at, bit = base + rng.randrange(begin, end), 1 << rng.randrange(8)
            with open(path, "r+b") as f:
                for expected in ((path.name, "manifest says"), (name[:-8], "not those that were encoded")):
                    f.seek(at)
                    byte = f.read(1)[0]
                    f.seek(at)
                    f.write(bytes([byte ^ bit]))
                    f.flush()
                    self.problems(pack, *expected, manifest=expected[1] == "manifest says")
                    f.seek(at)
                    f.write(bytes([byte]))
                    f.flush()
            (pack / "MANIFEST.sha256").write_bytes(manifest)

    def test_truncated_padded_and_empty_files(self):
        pack = self.copy("cut")
        path = self.shard(pack, self.EXPERT + ".trellis")
        blob = path.read_bytes()
        path.write_bytes(blob[:-1000])
        self.problems(pack, path.name, "data_offsets", loads=False)
        path.write_bytes(blob + b"\0" * 8)
        self.problems(pack, path.name, "padded", loads=False)
        path.write_bytes(b"")
        self.problems(pack, path.name, "0 bytes", loads=False)
        path.unlink()
        self.problems(pack, path.name, "is missing", loads=False)

    def test_files_that_changed_places(self):
        """Two shards under each other's names: refused by the index, and without an index nothing is wrong but the manifest."""
        for layout in LAYOUTS:
            pack = self.copy("places", self.converted(layout) if layout != "exllamav3" else self.b)
            a, b = self.shard(pack, "layers.0.attn.wq_a.trellis"), self.shard(pack, "layers.1.attn.wq_a.trellis")
            a.rename(pack / "aside")
            b.rename(a)
            (pack / "aside").rename(b)
            self.problems(pack, a.name, b.name, "has no tensor 'layers.0.")
            self.problems(pack, a.name, "has no tensor 'layers.0.", loads=False, manifest=False)
            for name in ("model.safetensors.index.json", "quantization_config.json"):
                (pack / name).unlink(missing_ok=True)
            self.assertTrue(result("verify", pack)["ok"])

    def test_files_of_no_length_and_no_files(self):
        """Every side file empty, and things that are not files where a file should be."""
        for layout in LAYOUTS:
            original = self.converted(layout) if layout != "exllamav3" else self.b
            pack = self.copy("empty", original)
            (pack / "MANIFEST.sha256").unlink()
            for name in ("config.json", "model.safetensors.index.json", "quantization_config.json", "exl3_moe_plan.json", "exl3_pack.json",
                         "tokenizer.json"):
                if (pack / name).exists():
                    content = (pack / name).read_bytes()
                    (pack / name).write_bytes(b"")
                    self.problems(pack, name)
                    (pack / name).write_bytes(content)
            content = (pack / "matrices.jsonl").read_bytes()
            (pack / "matrices.jsonl").write_bytes(content[:len(content) // 2])
            self.problems(pack, "matrices.jsonl")
            (pack / "matrices.jsonl").write_bytes(content)
            self.assertTrue(result("verify", pack)["ok"])
        pack = self.copy("kinds")
        path = self.shard(pack, self.EXPERT + ".trellis")
        path.unlink()
        path.mkdir()
        self.problems(pack, path.name, loads=False)
        path.rmdir()
        os.mkfifo(path)
        self.problems(pack, path.name, loads=False)
        path.unlink()
        for name in ("config.json", "model.safetensors.index.json", "MANIFEST.sha256", "matrices.jsonl"):
            pack = self.copy("kinds")
            (pack / name).unlink()
            (pack / name).symlink_to(name)
            self.problems(pack, name)
        (self.root / "round").symlink_to("round")
        self.assertEqual(run("verify", self.root / "round").returncode, 3)

    def test_swapped_matrices_and_renamed_tensors(self):
        pack = self.copy("swap")
        a, b = self.EXPERT + ".trellis", "layers.1.ffn.experts.1.w3.trellis"
        path = self.shard(pack, a)
        tensors = small.read_tensors(path)
        tensors[a], tensors[b] = tensors[b], tensors[a]
        small.write_tensors(path, tensors)
        self.problems(pack, a[:-8], b[:-8], "not those that were encoded", manifest=False)
        pack = self.copy("rename")
        self.rewrite(pack, self.EXPERT + ".trellis", lambda *t: {"layers.1.ffn.experts.77.w3.trellis": t})
        self.problems(pack, self.EXPERT + ".trellis", loads=False)
        (pack / "model.safetensors.index.json").unlink()
        (pack / "quantization_config.json").unlink()
        self.problems(pack, "layers.1.ffn.experts.77.w3.trellis", manifest=False)

    def test_wrong_shapes_scales_and_markers(self):
        cases = (("shape", ".trellis", lambda d, s, b: {self.EXPERT + ".trellis": (d, [s[1], s[0], s[2]], b)}, ("expected I16 [",), False),
                 ("dtype", ".suh", lambda d, s, b: {self.EXPERT + ".suh": ("BF16", s, b)}, ("expected F16 [", "found BF16"), False),
                 ("nan", ".suh", lambda d, s, b: {self.EXPERT + ".suh": (d, s, b[:10] + b"\x00\x7e" + b[12:])}, ("element 5 is NaN",), False),
                 ("inf", ".svh", lambda d, s, b: {self.EXPERT + ".svh": (d, s, b"\x00\xfc" + b[2:])}, ("element 0 is NaN or infinite",), False),
                 ("marker", ".mul1", lambda d, s, b: {self.EXPERT + ".mul1": (d, s, struct.pack("<I", 0x83D6B12D))}, ("multiplier", "2211885357"), False),
                 ("codebook", ".mul1", lambda d, s, b: {self.EXPERT + ".mcg": (d, s, struct.pack("<I", 0xCBAC1FED))}, (self.EXPERT,), False))
        for name, part, change, expected, loads in cases:
            with self.subTest(name):
                pack = self.copy("wrong")
                file = self.rewrite(pack, self.EXPERT + part, change)
                if name == "codebook":  # the index names the old marker; without it the declared codebook speaks
                    (pack / "model.safetensors.index.json").unlink()
                    (pack / "quantization_config.json").unlink()
                    expected = (self.EXPERT, "declared mul1, stored mcg")
                self.problems(pack, file, *expected, loads=loads, manifest=False)

    def test_widths_that_side_files_do_not_say(self):
        """A trellis of another width than the plan, the dense map, or the pack's own facts give it, in each layout."""
        for layout, expected in (("vllm", "exl3_moe_plan.json"), ("exllamav3", "bits_per_weight 2"), ("tensorfold", "not those that were encoded")):
            pack = self.copy("wide", self.converted(layout) if layout != "exllamav3" else self.b)
            file = self.rewrite(pack, self.EXPERT + ".trellis",
                                lambda d, s, b: {self.EXPERT + ".trellis": (d, [s[0], s[1], 48], b + b"\0" * (len(b) // 2))})
            self.problems(pack, expected, file, self.EXPERT, manifest=False)
        fold = self.copy("facts", self.converted("tensorfold"))
        facts = json.loads((fold / "exl3_pack.json").read_text())
        for key, value, found in (("head_bits", 7, "declared width 7, stored 4"), ("codebook", "mcg", "declared mcg, stored mul1")):
            (fold / "exl3_pack.json").write_text(json.dumps(dict(facts, **{key: value})))
            self.problems(fold, "exl3_pack.json", found, loads=False)

    def test_both_markers_are_one_too_many(self):
        pack = self.copy("both")
        (pack / "model.safetensors.index.json").unlink()
        self.rewrite(pack, self.EXPERT + ".mul1", lambda d, s, b: {self.EXPERT + ".mul1": (d, s, b), self.EXPERT + ".mcg": (d, s, struct.pack("<I", 0xCBAC1FED))})
        self.problems(pack, self.EXPERT, "at most one", loads=False, manifest=False)

    def test_nan_in_a_native_tensor(self):
        pack = self.copy("native-nan")
        file = self.rewrite(pack, "layers.0.attn_norm.weight", lambda d, s, b: {"layers.0.attn_norm.weight": (d, s, b[:6] + b"\xc0\x7f" + b[8:])})
        self.problems(pack, file, "layers.0.attn_norm.weight", "element 3", loads=False, manifest=False)
        scale = "layers.0.engram.embed.scale"
        file = self.rewrite(pack, scale, lambda d, s, b: {scale: (d, s, b[:7] + b"\xff" + b[8:])})
        self.problems(pack, file, scale, "element 7")

    def test_side_files_that_contradict_the_shards(self):
        vllm = self.copy("plan", self.converted("vllm"))
        plan = json.loads((vllm / "exl3_moe_plan.json").read_text())
        width = plan["layers"]["1"]
        for text, expected in ((width[:2] + "7" + width[3:], ("layers.1.ffn.experts.2.w1", "declared width 7")),
                               (width[:-1], ("layers.1", "characters")), (width[:-1] + "x", ("layers.1", "'x'"))):
            plan["layers"]["1"] = text
            (vllm / "exl3_moe_plan.json").write_text(json.dumps(plan))
            self.problems(vllm, "exl3_moe_plan.json", *expected, loads=False)
        vllm = self.copy("dense", self.converted("vllm"))
        config = json.loads((vllm / "config.json").read_text())
        config["quantization_config"]["exl3_moe"]["dense"]["layers.0.attn.wq_a"] = 8
        config["quantization_config"]["exl3_moe"]["head_k"] = 5
        (vllm / "config.json").write_text(json.dumps(config))
        self.problems(vllm, "layers.0.attn.wq_a", "declared width 8")
        self.problems(vllm, "head_k", "declared width 5, stored 4")
        config["quantization_config"]["exl3_moe"]["plan"] = "../../etc/plan"
        (vllm / "config.json").write_text(json.dumps(config))
        self.problems(vllm, "../../etc/plan")

        pack = self.copy("storage")
        full = json.loads((pack / "quantization_config.json").read_text())
        entry = full["tensor_storage"][self.EXPERT]
        entry["bits_per_weight"] = 8
        entry["stored_tensors"][self.EXPERT + ".suh"]["shape"] = [1]
        entry["mul1_multiplier"] = 7
        del full["tensor_storage"]["layers.0.attn_norm"]
        (pack / "quantization_config.json").write_text(json.dumps(full))
        self.problems(pack, "bits_per_weight 8", self.EXPERT + ".suh", "mul1_multiplier 7", "does not list 'layers.0.attn_norm.weight'", loads=True)
        index = json.loads((pack / "model.safetensors.index.json").read_text())
        index["metadata"]["total_size"] += 1
        (pack / "model.safetensors.index.json").write_text(json.dumps(index))
        self.problems(pack, "total_size")

    def test_paths_that_leave_the_folder_and_loops_of_links(self):
        pack = self.copy("paths")
        index = json.loads((pack / "model.safetensors.index.json").read_text())
        for bad in ("../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", ""):
            index["weight_map"]["embed.weight"] = bad
            (pack / "model.safetensors.index.json").write_text(json.dumps(index))
            self.problems(pack, "embed.weight", loads=False)
        pack = self.copy("loop")
        path = self.shard(pack, "embed.weight")
        path.unlink()
        path.symlink_to(path.name)
        self.problems(pack, path.name, "loop of symbolic links", loads=False)
        pack = self.copy("manifest-paths")
        manifest = (pack / "MANIFEST.sha256").read_text()
        for bad in ("../b/config.json", "/etc/passwd", "x//y"):
            (pack / "MANIFEST.sha256").write_text(manifest + "0" * 64 + "  " + bad + "\n")
            self.problems(pack, "MANIFEST.sha256: line", bad)
        (pack / "MANIFEST.sha256").write_text(manifest)
        (pack / "stray.txt").write_text("x")
        self.problems(pack, "'stray.txt' is not listed", loads=True)
        (pack / "link").symlink_to(pack)  # a folder that contains itself is not entered
        self.problems(pack, "'stray.txt' is not listed")

    def test_tensors_twice_and_outside_the_index(self):
        pack = self.copy("twice")
        (pack / "model.safetensors.index.json").unlink()
        shutil.copyfile(self.shard(pack, "norm.weight"), pack / "zz.safetensors")
        self.problems(pack, "zz.safetensors'; remove one of the files", loads=False)
        pack = self.copy("unmapped")
        path = self.shard(pack, "norm.weight")
        tensors = small.read_tensors(path)
        tensors["norm.extra"] = ("BF16", [1], b"\0\0")
        small.write_tensors(path, tensors)
        self.problems(pack, path.name + ": norm.extra", loads=True)

    def test_native_copies_and_engram_left_overs_are_ignored(self):
        """packs.md 7, item 28: slice names, FP8 left-overs of engram.wkv, bf16 copies; all of them load."""
        pack = self.copy("leftovers")
        (pack / "model.safetensors.index.json").unlink()
        native = tensors_of(self.model)
        extra = {n: native[n] for n in native if ".engram.wkv." in n or ".compressor.wkv." in n or ".compressor.wgate." in n}
        small.write_tensors(pack / "zz-leftovers.safetensors", extra)
        for path in pack.glob("*.safetensors"):
            tensors = small.read_tensors(path)
            renamed = {n.replace(".wo_a.slice.", ".wo_a."): t for n, t in tensors.items()}
            if renamed.keys() != tensors.keys():
                small.write_tensors(path, renamed)
        report = result("inspect", pack)
        self.assertEqual((report["missing"], report["unexpected"]), ([], []))
        self.assertEqual(sum("is ignored" in note for note in report["notes"]), len(extra))
        same = [result("generate", p, "--prompt", "The capital", "--max-tokens", "8")["token_ids"] for p in (self.b, pack)]
        self.assertEqual(same[0], same[1])
        (pack / "MANIFEST.sha256").unlink()
        (pack / "quantization_config.json").unlink()
        to = self.root / "clean"
        result("convert", pack, "--layout", "exllamav3", "--out", to)
        self.assertEqual(tensors_of(to), tensors_of(self.b))

    def test_other_tokenizer_and_other_config(self):
        pack = self.copy("tokenizer")
        tokenizer = json.loads((pack / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = tokenizer["added_tokens"][:-1]
        (pack / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.problems(pack, "Engram token classes", loads=False)
        pack = self.copy("config")
        config = json.loads((pack / "config.json").read_text())
        config["text_config"]["engram_num_embeddings"][0] += 1
        (pack / "config.json").write_text(json.dumps(config))
        self.problems(pack, "sum of the layer's primes")
        pack = self.copy("config")
        (pack / "MANIFEST.sha256").unlink()
        config = json.loads((pack / "config.json").read_text())
        (pack / "config.json").write_text(json.dumps({**{k: v for k, v in config.items() if k != "text_config"}, **config["text_config"]}))
        self.assertTrue(result("verify", pack)["ok"])  # text keys at the top, as some packs have them
        for key in ("engram_layer_ids", "n_routed_experts"):
            text = {k: v for k, v in config["text_config"].items() if k != key}
            (pack / "config.json").write_text(json.dumps(dict(config, text_config=text)))
            self.problems(pack, "config.json", key, loads=False)
        (pack / "config.json").write_text('{"text_config": [')
        self.problems(pack, "config.json", loads=False)
        (pack / "config.json").unlink()
        self.problems(pack, "config.json", loads=False)

    def test_lock(self):
        lock = self.b / "source.lock.json"
        self.assertTrue(result("verify", self.model, "--lock", lock)["ok"])
        other = self.copy("locked", self.model)
        path = next(other.glob("*.safetensors"))
        blob = bytearray(path.read_bytes())
        blob[-1] ^= 1
        path.write_bytes(blob)
        found = result("verify", other, "--lock", lock, code=1)
        self.assertTrue(any(path.name in p and "sha256" in p for p in found["problems"]), found)
        path.write_bytes(blob[:-2])
        self.assertTrue(any("the lock says" in p for p in result("verify", other, "--lock", lock, code=1)["problems"]))
        path.unlink()
        (other / "new.safetensors").write_bytes(b"")
        found = result("verify", other, "--lock", lock, code=1)["problems"]
        self.assertTrue(any("cannot be read" in p for p in found) and any("not in the lock" in p for p in found), found)
        for text in ("{}", "[", '{"files":[{"name":"../x","size":1,"sha256":"' + "0" * 64 + '"}]}', '{"files":[{"name":"x","size":-1,"sha256":""}]}'):
            (self.root / "bad.lock").write_text(text)
            r = run("verify", self.model, "--lock", self.root / "bad.lock", "--quiet")
            self.assertEqual((r.returncode, len(r.stderr.strip().splitlines())), (3, 1), r.stderr)
            self.assertIn("bad.lock", r.stderr)


class Making(Packs):
    """Plans, native experts, other layouts straight from the quantizer, the dry run, and encoding again."""

    def quantize(self, name, *flags):
        pack = self.root / name
        return pack, result("quantize", self.model, "--data", self.data, *(("--rows", "8") if FULL else ()), "--out", pack, *flags)

    def dry_run(self, *flags):
        return result("quantize", self.model, "--data", self.data, *(("--rows", "8") if FULL else ()), "--dry-run", *flags)

    def test_dry_run_predicts_a_real_run(self):
        flags = ("--bits", "3", "--head-bits", "4") if FULL else ("--bits", "2", "--dense-bits", "3", "--head-bits", "4", "--drafter-bits", "2.5")
        said = self.dry_run(*flags)
        real = sum(f.stat().st_size for f in self.b.rglob("*") if f.is_file())
        print(f"dry run: {said['bytes']} bytes, really {real}: {100 * (said['bytes'] / real - 1):+.4f} %", flush=True)
        self.assertLess(abs(said["bytes"] - real), real / 1000)
        tensors = tensors_of(self.b)
        self.assertEqual((said["tensors"], said["tensor_bytes"]), (len(tensors), sum(len(t[2]) for t in tensors.values())))
        self.assertEqual(said["files"], len(list(self.b.iterdir())))
        self.assertEqual(said["matrices"], sum(n.endswith(".trellis") for n in tensors))
        self.assertEqual(sum(g["tensors"] for g in said["native"]),
                         sum(not n.endswith((".trellis", ".suh", ".svh", ".mul1")) for n in tensors))

    def test_a_plan_with_half_steps_native_experts_and_ragged_widths(self):
        """Straight into the vllm layout; the plan that the pack carries is the plan that was given."""
        config = json.loads((self.model / "config.json").read_text())["text_config"]
        n, layers, stages = config["n_routed_experts"], config["num_hidden_layers"], config["num_nextn_predict_layers"]
        plan = {"granularity": "matrix",
                "layers": {str(layer): ("2b3a" * n)[:n] for layer in range(layers) if layer != 1},
                "matrices": {"1": {"w1": "n" + "2" * (n - 1), "w2": "n" + "3" * (n - 1), "w3": "n" + "2" * (n - 1)}},
                "drafter": {f"mtp.{k}": "2" * config["dspark_n_routed_experts"] for k in range(stages)},
                "dense": {"attention": 2, "attn.wq_a": 3, "shared": 2.5, "index": "native", "engram": 2, "head": 3, "drafter_dense": 2}}
        file = self.root / "plan.json"
        file.write_text(json.dumps(plan))
        said = self.dry_run("--plan", file, "--layout", "vllm")
        pack, report = self.quantize("planned", "--plan", file, "--layout", "vllm")
        self.assertEqual((said["tensors"], said["matrices"], said["bpw"]), (len(tensors_of(pack)), report["matrices"], report["bpw"]))
        self.assertLess(abs(said["bytes"] - report["bytes"]), report["bytes"] / 1000)
        carried = json.loads((pack / "exl3_moe_plan.json").read_text())
        self.assertEqual((carried["layers"], carried["matrices"]["1"], carried["drafter"]), (plan["layers"], plan["matrices"]["1"], plan["drafter"]))
        verified = result("verify", pack)
        self.assertTrue(verified["ok"], verified["problems"])
        native = tensors_of(self.model)
        stored = tensors_of(pack)
        for name in (f"layers.1.ffn.experts.0.{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight", "scale")):
            self.assertEqual(stored[name], native[name])
        self.assertEqual(stored["layers.0.ffn.experts.1.w2.trellis"][1][2], 40)  # b: 2.5 bits
        inspected = result("inspect", pack)
        self.assertEqual(inspected["native"]["routed"], {"mxfp4": 3})
        halves = sum(t[1][2] % 16 == 8 for n, t in stored.items() if n.endswith(".trellis"))
        self.assertEqual([note for note in inspected["notes"] if "ours only" in note],
                         [f"{halves} matrices have half-step widths: ours only, besides exllamav3 1.6 with mul1",
                          "3 routed expert matrices are native MXFP4: ours only"])
        self.assertEqual(inspected["widths_by_layer"]["layers.1.ffn.experts.w2"], {"3": n - 1})
        self.assertIsNotNone(inspected["bpw"]["routed_read"])
        answers = [result("generate", p, "--prompt", "The capital", "--max-tokens", "8")["token_ids"] for p in (pack, self.converted_from(pack))]
        self.assertEqual(answers[0], answers[1])
        if FULL:
            return
        found = result("verify", pack, "--rederive", "6", "--checkpoint", self.model, "--data", self.data)
        self.assertEqual((found["ok"], found["rederived"]), (True, 6))

    def converted_from(self, pack):
        to = self.root / (pack.name + "-fold")
        result("convert", pack, "--layout", "tensorfold", "--out", to)
        self.assertTrue(result("verify", to)["ok"])
        return to

    def test_plans_that_do_not_fit(self):
        for plan, expected in (({"layers": {}}, "no width"), ({"layers": {"99": "2"}}, "layers.99"), ([], "entries"), ("x", "list of layers")):
            (self.root / "bad.json").write_text(json.dumps(plan))
            r = run("quantize", self.model, "--plan", self.root / "bad.json", "--dry-run", "--quiet")
            self.assertEqual((r.returncode, len(r.stderr.strip().splitlines())), (3, 1), r.stderr)
            self.assertIn(expected, r.stderr)
        for flags, expected in ((("--dry-run",), "--bits"), (("--bits", "2"), "--data"),
                                (("--bits", "2", "--dry-run", "--keep-native", "attn.nothing"), "attn.nothing")):
            r = run("quantize", self.model, *flags, "--quiet")
            self.assertEqual(r.returncode, 2, r.stderr)
            self.assertIn(expected, r.stderr)
        r = run("quantize", self.model, "--bits", "2", "--dry-run", "--keep-native", "ffn.experts.w1", "--quiet")
        self.assertIn("native or none", r.stderr)

    def test_random_matrices_encoded_again_give_the_same_bytes(self):
        wanted = 20
        found = result("verify", self.b, "--rederive", wanted, "--checkpoint", self.model, "--data", self.data)
        self.assertEqual((found["ok"], found["rederived"], found["problems"]), (True, wanted, []))
        # The same of a converted pack, other matrices.
        found = result("verify", self.converted("tensorfold"), "--rederive", 3, "--checkpoint", self.model, "--data", self.data, "--seed", 5)
        self.assertEqual((found["ok"], found["rederived"]), (True, 3))

    def test_a_matrix_that_was_not_encoded_so_is_found(self):
        """A pack that is consistent in itself, with one bit changed and every digest made anew: only encoding it again tells."""
        pack = self.copy("forged")
        name = "mtp.0.ffn.shared_experts.w2"  # the rows stream through the pack's own layers; nothing reads this one's outputs
        path = next(p for p in pack.glob("*.safetensors") if name + ".trellis" in small.read_header(p)[0])
        tensors = small.read_tensors(path)
        dtype, shape, blob = tensors[name + ".trellis"]
        tensors[name + ".trellis"] = (dtype, shape, bytes([blob[0] ^ 4]) + blob[1:])
        small.write_tensors(path, tensors)
        digest = hashlib.sha256(b"".join(tensors[name + part][2] for part in (".trellis", ".suh", ".svh"))).hexdigest()
        lines = [json.loads(line) for line in (pack / "matrices.jsonl").read_text().splitlines()]
        for line in lines:
            if line["name"] == name:
                line["sha256"] = digest
        (pack / "matrices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (pack / "MANIFEST.sha256").unlink()
        self.assertTrue(result("verify", pack)["ok"])
        found = result("verify", pack, "--rederive", 100000, "--checkpoint", self.model, "--data", self.data, code=1) if not FULL else None
        if found:  # this one, and every other matrix of the pack came out the same
            self.assertEqual(len(found["problems"]), 1, found["problems"])
            self.assertIn(name + ".trellis", found["problems"][0])

    def test_inputs_that_are_not_those_of_the_run(self):
        other = self.copy("other", self.model)
        path = next(other.glob("*.safetensors"))
        small.write_tensors(path, dict(small.read_tensors(path), **{"vision.extra": ("BF16", [1], b"\0\0")}))
        data = self.root / "other.jsonl"
        data.write_text(small.data_line("r0", small.token_row(9, 40)))
        for checkpoint, rows, expected in ((other, self.data, "not the checkpoint"), (self.model, data, "content sha256")):
            r = run("verify", self.b, "--rederive", "1", "--checkpoint", checkpoint, "--data", rows, "--quiet")
            self.assertEqual(r.returncode, 3, r.stderr)
            self.assertIn(expected, r.stderr)
        r = run("verify", self.b, "--rederive", "1", "--quiet")
        self.assertEqual(r.returncode, 2, r.stderr)
        pack = self.copy("gpu")
        record = json.loads((pack / "run.json").read_text())
        record["backend"] = "cuda"
        (pack / "run.json").write_text(json.dumps(record))
        (pack / "MANIFEST.sha256").unlink()
        r = run("verify", pack, "--rederive", "1", "--checkpoint", self.model, "--data", self.data, "--quiet")
        self.assertEqual(r.returncode, 3, r.stderr)
        self.assertIn("'cuda'", r.stderr)

    def test_reproduce_names_commands_and_no_host(self):
        text = (self.b / "reproduce.md").read_text()
        for part in ("espalier quantize CHECKPOINT", "--head-bits 4", "sha256sum -c", "--rederive"):
            self.assertIn(part, text)
        for path in self.b.rglob("*"):
            if path.suffix in (".json", ".jsonl", ".md", ".sha256") and not path.name.startswith("LICEN"):
                for secret in (str(self.root), str(SOURCE), os.uname().nodename, "/tmp/", "/home/"):
                    self.assertNotIn(secret, path.read_text(), path.name)


if __name__ == "__main__":
    del Packs
    unittest.main(verbosity=2)
