"""The real shape: skeletons of the full checkpoint and of public packs (tools/full_scale/make.py, sparse files) through inspect and the dry
run of quantize. The skeletons are written from the published tables, so totals that agree here check this program's own lists of names and
shapes. Environment: ESPALIER_BIN, ESPALIER_SOURCE_DIR.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = os.environ["ESPALIER_BIN"]
MAKE = pathlib.Path(os.environ["ESPALIER_SOURCE_DIR"]) / "tools/full_scale/make.py"
GIB = 2**30
EXPERT = 5120 * 2304  # weights of one matrix of a routed expert

# Shapes (in, out) of the matrices of each part, from the published table of modules; wo_a is stored as its eight groups.
ATTENTION = {"wq_a": [(5120, 1280)], "wkv": [(5120, 512)], "wq_b": [(1280, 32768)], "wo_a": [(4096, 1024)] * 8, "wo_b": [(8192, 5120)]}
FFN = [(5120, 2304), (2304, 5120), (5120, 2304)]
INDEX = {"compressor": [(5120, 512)] * 7, "wq_b": [(1280, 4096)] * 8, "wk": [(512, 128)] * 4}
ENGRAM, HEAD, MAIN_PROJ = (6144, 25600), (5120, 129280), (15360, 5120)
# Weights that the cards' bits per weight count, as published, and what is beside them.
COUNTED = {"routed": 543_581_798_400, "shared": 1_415_577_600, "attention": 5_064_622_080, "index": 60_555_264, "engram": 314_572_800}
EMBEDDING = 129280 * 5120 * 2
OTHER = 1_437_233_992  # norms, routers, mHC, sinks, Engram gates, drafter heads, vision tower: the checkpoint's bytes
BIASES_VL = 4 * (40 * 384 + 3 * 128)


def exl3(shapes, bits):
    """Bytes of trellis, scale vectors and markers."""
    return sum(i * o * bits // 8 + 2 * (i + o) + 4 for i, o in shapes)


def fp8(shapes):
    return sum(i * o + -(-i // 32) * -(-o // 32) for i, o in shapes)


def attention(bits, layers=40):
    """bits: of every matrix, or by name; a name that is not in it stays FP8."""
    of = bits if isinstance(bits, dict) else dict.fromkeys(ATTENTION, bits)
    return layers * sum(exl3(shapes, of[name]) if name in of else fp8(shapes) for name, shapes in ATTENTION.items())


def drafter(dense, experts, attention_bits=None):
    return (attention(attention_bits or dense, 3) + 3 * exl3(FFN, dense) + 3 * 128 * exl3(FFN, experts) + exl3([MAIN_PROJ], dense))


def parts_of(kind):
    """Bytes by part of the three public packs: the widths of their cards over the shapes above."""
    index = {bits: exl3(INDEX["compressor"] + INDEX["wq_b"], bits) + exl3(INDEX["wk"], 8) for bits in (5,)}
    routed = lambda counts: sum(n * exl3([FFN[0]], bits) for bits, n in counts.items())
    if kind == "exllamav3":
        return {"routed": routed({2: 5760, 3: 40320}), "shared": 21 * exl3(FFN, 5) + 18 * exl3(FFN, 4) + exl3(FFN[:1], 5) + 2 * exl3(FFN[:1], 4),
                "attention": attention(5), "index": index[5], "engram": exl3([ENGRAM], 5) + exl3([ENGRAM], 4), "head": exl3([HEAD], 6),
                "drafter": drafter(4, 4), "embedding": EMBEDDING, "other": OTHER - BIASES_VL}
    if kind == "vllm":
        kept = {"wq_a": 4, "wq_b": 4, "wo_b": 4, "wo_a": 5}
        native_index = 2 * sum(i * o for i, o in INDEX["compressor"] + INDEX["wk"]) + fp8(INDEX["wq_b"])
        return {"routed": routed({2: 3 * 6157, 3: 3 * 7689, 4: 3 * 1479, 5: 3 * 35}), "shared": 40 * exl3(FFN, 4), "attention": attention(kept),
                "index": native_index, "engram": 2 * fp8([ENGRAM]), "head": exl3([HEAD], 4),
                "drafter": drafter(5, 3, dict.fromkeys(kept, 5)), "embedding": EMBEDDING, "other": OTHER}
    five = sum(exl3(ATTENTION[name], 5) - exl3(ATTENTION[name], 4) for name in ("wq_a", "wkv", "wo_a", "wkv", "wo_a", "wkv"))
    return {"routed": routed({2: 17848, 3: 20998, 4: 6787, 5: 447}), "shared": 4 * exl3(FFN, 5) + 36 * exl3(FFN, 6), "attention": attention(4) + five,
            "index": index[5], "engram": 2 * exl3([ENGRAM], 5), "head": exl3([HEAD], 6), "drafter": drafter(4, 4), "embedding": EMBEDDING, "other": OTHER}


def result(*arguments):
    """JSON of a command; inspect must stay below 500 MB."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([BIN, *map(str, arguments), "--json", "--quiet"], stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        assert process.returncode == 0, err.read()
        print(f"{arguments[0]} {pathlib.Path(arguments[1]).name}: {usage.ru_utime + usage.ru_stime:.1f} s of CPU, {usage.ru_maxrss // 1000} MB", flush=True)
        assert arguments[0] != "inspect" or usage.ru_maxrss < 500_000, f"inspect took {usage.ru_maxrss} KB"
        return json.loads(out.read())


class FullScale(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.tmp.name)
        for kind in ("official", "exllamav3", "vllm", "tensorfold"):
            subprocess.run([sys.executable, MAKE, kind, cls.root / kind], check=True, capture_output=True)

    @classmethod
    def tearDownClass(cls):
        cls.tmp.cleanup()

    def test_the_official_checkpoint(self):
        found = result("inspect", self.root / "official")
        self.assertEqual((found["family"], found["n_tensors"], found["n_files"], found["bytes"]), ("official", 96085, 48, 510_286_023_000))
        self.assertEqual((found["missing"], found["unexpected"], found["notes"], found["problems"]), ([], [], [], []))
        self.assertEqual(found["n_matrices"], 47900)
        self.assertEqual(found["native"]["routed"], {"mxfp4": 46080})
        self.assertEqual(found["bytes_by_part"]["engram tables"], 264 * (384006168 + 384016682))
        self.assertEqual((found["bytes_by_part"]["attention"], found["bytes_by_part"]["other"]), (attention({}), OTHER))

    def pack(self, kind, n_tensors, card, stored, routed_widths, routed_gb, card_gb, gigabytes, rank_gib):
        """The numbers of the public cards. Every part to the byte; trellis bytes as published, to the last digit of the card; the folder
        without Engram to 0.15 % of the published sum, memory per rank of two to 1 % of it."""
        found = result("inspect", self.root / kind, "--plan-memory", "--ranks", "2", "--context", "262144", "--slots", "2")
        self.assertEqual((found["family"], found["n_tensors"], found["unexpected"], found["problems"]), (kind, n_tensors, [], []))
        self.assertEqual(sorted(found["missing"]), [f"layers.{n}.engram.embed.{p}" for n in (1, 14) for p in ("scale", "weight")])
        self.assertEqual(found["widths"]["routed"], routed_widths)
        self.assertEqual(round(found["bpw"]["routed_stored"], 4), stored)
        if card:
            self.assertEqual(round(found["bpw"]["card"], 4), card)
        self.assertEqual(found["bytes_by_part"], parts_of(kind))
        self.assertEqual(found["bytes"], sum(parts_of(kind).values()))
        self.assertAlmostEqual(found["bytes"] / 1e9, gigabytes, delta=gigabytes * 0.0015)
        trellis = sum(float(k) * n for k, n in routed_widths.items()) * EXPERT / 8
        self.assertEqual(found["bytes_by_part"]["routed"], trellis + 46080 * (2 * (5120 + 2304) + 4))
        self.assertEqual(round(found["bpw"]["routed_stored"] * COUNTED["routed"] / 8 / 1e9, 2), routed_gb)
        if card:
            self.assertEqual(round(found["bpw"]["card"] * sum(COUNTED.values()) / 8 / 1e9, 2), card_gb)
        memory = found["memory"]
        # The published figures leave the vision tower out, which the first rank holds.
        self.assertAlmostEqual((memory["weight_bytes"] - memory["weights"]["vision"]) / GIB, rank_gib, delta=rank_gib / 100)
        self.assertEqual(memory["kv_bytes_per_token"], 1790)
        self.assertEqual(memory["kv_bytes"], 2 * 262144 * 1790)
        self.assertTrue(memory["fits"])
        with_tables = result("inspect", self.root / kind, "--engram", self.root / "official")
        self.assertEqual((with_tables["missing"], with_tables["unexpected"]), ([], []))
        return found

    def test_a_pack_of_the_exllamav3_layout(self):
        found = self.pack("exllamav3", 47900 * 4 + 852, 2.9, 2.875, {"2": 5760, "3": 40320}, 195.35, 199.53, 210.6, 98.1)
        self.assertEqual(sum("bias_vl" in note for note in found["notes"]), 43)

    def test_a_pack_of_the_vllm_layout(self):
        found = self.pack("vllm", 192356, None, 2.7, {"2": 3 * 6157, "3": 3 * 7689, "4": 3 * 1479, "5": 3 * 35}, 183.46, None, 196.35, 91.5)
        self.assertEqual(found["native"]["attention"], {"fp8": 40})

    def test_a_pack_of_the_tensorfold_layout(self):
        self.pack("tensorfold", 192495, 2.8003, 2.7794, {"2": 17848, "3": 20998, "4": 6787, "5": 447}, 188.85, 192.67, 203.67, 94.8)

    def test_dry_run_of_a_quantization(self):
        plain = result("quantize", self.root / "official", "--bits", "3", "--head-bits", "6", "--drafter-bits", "4", "--dry-run")
        self.assertEqual((plain["matrices"], plain["bpw"]), (47900, 3))
        self.assertEqual(plain["tensors"], 47900 * 4 + 852 + 43 + 4)
        native = {g["what"]: g for g in plain["native"]}
        tables = native["Engram tables"]["bytes"]
        self.assertEqual(tables, 264 * (384006168 + 384016682))
        self.assertEqual(sum(g["tensors"] for g in plain["native"]), 852 + 43 + 4)
        self.assertEqual(sum(g["bytes"] for g in plain["native"]), tables + EMBEDDING + OTHER)
        self.assertEqual(plain["tensor_bytes"], tables + EMBEDDING + OTHER + 15360 * exl3(FFN, 3) + 40 * exl3(FFN, 3) + attention(3) +
                         exl3(sum(INDEX.values(), []) + [ENGRAM] * 2, 3) + exl3([HEAD], 6) + drafter(4, 4))
        self.assertEqual((native["vision tower"]["tensors"], native["routers"]["tensors"]), (266, 129))
        self.assertTrue(all(g["reason"] for g in plain["native"]))
        self.assertLess(plain["bytes"] - plain["tensor_bytes"], 200_000_000)
        # The plan of a public pack, as the public pack is: the same tensors (its drafter and head are not in the file's map, so by hand).
        config = json.loads((self.root / "vllm/config.json").read_text())["quantization_config"]["exl3_moe"]
        plan = json.loads((self.root / "vllm/exl3_moe_plan.json").read_text())
        plan["dense"] = {**config["dense"], "head": 4, "attn.wkv": "native", "index": "native", "engram": "native"}
        plan["dense"].update({f"mtp.{k}.attn.wkv": "native" for k in range(3)})
        (self.root / "plan.json").write_text(json.dumps(plan))
        planned = result("quantize", self.root / "official", "--plan", self.root / "plan.json", "--layout", "vllm", "--dry-run")
        public = result("inspect", self.root / "vllm")
        self.assertEqual(planned["tensor_bytes"] - tables, public["bytes"])
        self.assertEqual((planned["matrices"], planned["widths"]["routed"]), (public["n_exl3"], public["widths"]["routed"]))

    def test_heat_map_and_layers(self):
        r = subprocess.run([BIN, "inspect", self.root / "vllm", "--heat-map", "--layers"], capture_output=True, text=True, timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        rows = [line.split() for line in r.stdout.splitlines() if line.startswith("layers.") and len(line.split()) == 3]
        self.assertEqual(len(rows), 40)
        self.assertTrue(all(len(cells) == 96 and set(cells) <= set("2345") for _, cells, _ in rows))
        self.assertGreaterEqual(min(float(mean) for _, _, mean in rows[37:]), 3)  # the layers that the drafter taps


if __name__ == "__main__":
    unittest.main(verbosity=2)
