#!/usr/bin/env python3
"""Holds a GPU to the CPU through the real binary, from the root of the repository, on a machine with a GPU:

    tests/gpu/agreement.py ESPALIER [--bits 3 | --pack FOLDER] [--prompts 20] [--rows 0] [--products exact int8r]

Quantizes the pocket model on the CPU (or takes a pack of it), then
- measures KL(native || pack) over the panel on the CPU in exact products and on the GPU in each of `--products`: they agree to 1 %, and in
  exact products every position's values are the same bytes;
- generates greedily from prompts of the panel on both: the tokens are equal, except that in other products than exact a reply may part at
  a token whose margin on the CPU (largest minus second largest logit) is below twice the largest difference of the two logits there.
Exit code 0 when all of that holds, else 1.
"""
import argparse
import array
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile

POCKET = pathlib.Path("models/pocket")


def run(binary, *arguments):
    done = subprocess.run([binary, *map(str, arguments), "--quiet"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def kl(binary, folder, pack, device, products, rows):
    out = folder / f"kl-{device}-{products}"
    text = run(binary, "eval", "kl", "--reference", POCKET, "--candidate", pack, "--panel", POCKET / "data/panel.jsonl", "--rows", rows,
               "--device", device, "--products", products, "--out", out, "--json")
    return json.loads(text), tensors(out / "sidecar.safetensors")


def tensors(path):
    """The tensors of a safetensors file as raw bytes."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    return {k: data[8 + size + v["data_offsets"][0]:8 + size + v["data_offsets"][1]] for k, v in header.items() if k != "__metadata__"}


def generate(binary, folder, model, ids, name, device, products, n):
    tokens = folder / f"{name}-{device}-{products}.json"
    tokens.write_text(json.dumps(ids))
    return json.loads(run(binary, "generate", model, "--tokens", tokens, "--max-tokens", n, "--temperature", 0, "--json", "--device", device,
                          "--products", products, "--threads", 2))["token_ids"]


def last_logits(binary, folder, model, ids, name, device, products):
    tokens, out = folder / f"{name}.{device}.json", folder / f"{name}.{device}.safetensors"
    tokens.write_text(json.dumps([ids]))
    run(binary, "logits", model, "--tokens", tokens, "--out", out, "--device", device, "--products", products, "--numerics", "kvq")
    values = next(v for k, v in tensors(out).items() if "logits" in k)
    return array.array("f", values[-len(values) // len(ids):])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--bits", default="3")
    parser.add_argument("--pack", type=pathlib.Path, help="a pack of the pocket model, made before")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", default="0", help="of the panel; 0: all")
    parser.add_argument("--calibration-rows", default="48")
    parser.add_argument("--products", nargs="*", default=["exact", "int8r"])
    flags = parser.parse_args()
    binary = str(pathlib.Path(flags.binary).resolve())
    good = True
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp)
        pack = flags.pack or folder / "pack"
        if flags.pack is None:
            run(binary, "quantize", POCKET, "--bits", flags.bits, "--data", POCKET / "data/calibration.jsonl", "--rows", flags.calibration_rows, "--out", pack,
                "--device", "cpu")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            work = {("cpu", "exact"): pool.submit(kl, binary, folder, pack, "cpu", "exact", flags.rows)}
            for p in flags.products:
                work["cuda", p] = pool.submit(kl, binary, folder, pack, "cuda", p, flags.rows)
            results = {key: future.result() for key, future in work.items()}
        expected, expected_values = results["cpu", "exact"]
        for (device, products), (record, values) in results.items():
            difference = record["kl_mean"] / expected["kl_mean"] - 1
            same = values.keys() == expected_values.keys() and all(values[k] == expected_values[k] for k in values)
            print(f"KL(native || pack), {record['positions']} positions, {device} {products}: {record['kl_mean']:.9f} "
                  f"({100 * difference:+.4f} % of the CPU's), top-1 {record['top1']:.6f}, every position's values "
                  f"{'the same bytes' if same else 'not all the same bytes'}", flush=True)
            good = good and abs(difference) <= 0.01 and (same or products != "exact")

        rows = [json.loads(line) for line in (POCKET / "data/panel.jsonl").read_text().splitlines()]
        rows = [r for r in rows if len(r["ids"]) >= 40]
        prompts = [rows[i * len(rows) // flags.prompts]["ids"][:24 + i] for i in range(flags.prompts)]
        for model, products in [(POCKET, "exact")] + [(pack, p) for p in flags.products]:
            name = "native" if model == POCKET else "pack"
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                cpu = list(pool.map(lambda i: generate(binary, folder, model, prompts[i], f"p{i}", "cpu", "exact", flags.new_tokens), range(len(prompts))))
                gpu = list(pool.map(lambda i: generate(binary, folder, model, prompts[i], f"p{i}", "cuda", products, flags.new_tokens), range(len(prompts))))
            equal = sum(a == b for a, b in zip(cpu, gpu))
            print(f"greedy, {name}, {len(prompts)} prompts, up to {flags.new_tokens} tokens, cpu exact and cuda {products}: {equal} replies equal, "
                  f"{sum(map(len, cpu))} tokens", flush=True)
            for i, (a, b) in enumerate(zip(cpu, gpu)):
                if a == b:
                    continue
                at = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                ids = prompts[i] + a[:at]
                x = last_logits(binary, folder, model, ids, f"m{i}", "cpu", "exact")
                y = last_logits(binary, folder, model, ids, f"m{i}", "cuda", products)
                second, first = sorted(x)[-2:]
                margin, tolerance = first - second, 2 * max(abs(u - v) for u, v in zip(x, y))
                print(f"  prompt {i} parts at token {at}: margin {margin:.3g}, twice the largest difference of the logits {tolerance:.3g}", flush=True)
                good = good and products != "exact" and margin <= tolerance
    print("agreement holds" if good else "AGREEMENT DOES NOT HOLD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
