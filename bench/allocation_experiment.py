#!/usr/bin/env python3
"""Plans from measured sensitivity against simpler rules, on the pocket model (docs/decisions/allocation-primary-comparison.md):

    bench/allocation_experiment.py ESPALIER WORK [--jobs 8] [--threads 2] [--seeds 0 1 2] [--until STEP] [--checkpoint DIR --data DIR]

Does everything from the checkpoint to the table, in steps whose results stay in WORK: run it again and it goes on. Steps: stats, library,
sensitivity, variants, panel. Prints the table; progress goes to stderr. Standard library only.
"""
import argparse
import array
import concurrent.futures
import json
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = ["stats", "library", "sensitivity", "variants", "panel"]
RULES = ["uniform", "ends-first", "frequency", "layer"]
OTHERS = ["--dense-bits", 3, "--head-bits", 6, "--drafter-bits", 3]
NATIVE = ["--stream", "native", "--w2-input", "native"]


def tensors(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    out = {}
    for name, e in header.items():
        values = array.array({"F32": "f", "I32": "i", "U8": "B"}[e["dtype"]])
        values.frombytes(data[8 + size + e["data_offsets"][0]:8 + size + e["data_offsets"][1]])
        out[name] = values
    return out, metadata


class Experiment:
    def __init__(self, a):
        self.a, self.work = a, pathlib.Path(a.work)
        self.work.mkdir(parents=True, exist_ok=True)
        data = pathlib.Path(a.data)
        self.calibration, self.sensitivity, self.panel, self.shifted = (data / f"{n}.jsonl" for n in ("calibration", "sensitivity", "panel", "shifted"))
        self.start = time.time()
        whole = ",".join(w for w in a.library_widths.split(",") if "." not in w)
        self.widths = {"whole": whole, "halves": a.library_widths, "native": a.library_widths + ",native"}
        if whole == a.library_widths:
            del self.widths["halves"]

    def say(self, text):
        print(f"[{time.time() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def run(self, *arguments, threads=None):
        command = [self.a.espalier, *map(str, arguments), "--quiet", "--json", "--threads", str(threads or self.a.threads)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def parallel(self, jobs):
        with concurrent.futures.ThreadPoolExecutor(self.a.jobs) as pool:
            return list(pool.map(lambda job: job(), jobs))

    @property
    def all_threads(self):
        return self.a.jobs * self.a.threads

    def stats(self):
        if not (self.work / "stats/routing.safetensors").exists():
            self.run("calibrate", self.a.checkpoint, "--data", self.calibration, "--out", self.work / "stats", threads=self.all_threads)

    def library_of(self, seed):
        return self.work / f"library-{seed}"

    def library(self):
        for seed in self.a.seeds:
            done = self.work / f"library-{seed}.done"
            if not done.exists():
                self.run("library", self.a.checkpoint, "--data", self.calibration, "--widths", self.a.library_widths, "--out", self.library_of(seed), "--seed", seed,
                         *OTHERS, threads=self.all_threads)
                done.touch()
                self.say(f"library of seed {seed}")
        errors = self.work / "stats/errors.safetensors"
        if not errors.exists():
            errors.write_bytes((self.library_of(self.a.seeds[0]) / "errors.safetensors").read_bytes())

    def realise(self, plan, seed, name):
        out = self.work / "packs" / name
        out.parent.mkdir(exist_ok=True)
        if not out.exists():
            self.run("quantize", self.a.checkpoint, "--data", self.calibration, "--plan", plan, "--bits", 3, *OTHERS, *NATIVE, "--seed", seed,
                     "--library", self.library_of(seed), "--out", out)
        return out

    def experts_only(self, width, others_native=True):
        """A plan with every routed expert at a width and the rest native, for exchanges; or the experts native and the rest not."""
        config = json.loads((pathlib.Path(self.a.checkpoint) / "config.json").read_text())
        config = config.get("text_config", config)
        drafters = config.get("num_nextn_predict_layers", 0)
        dense = {part: "native" for part in ["attention", "shared", "index", "engram", "head", "drafter_dense"] if others_native}
        path = self.work / f"experts-{width}.json"
        path.write_text(json.dumps({"format": "exl3_moe_plan", "version": 1, "granularity": "expert", "dense": dense,
                                    "layers": {str(l): str(width) * config["n_routed_experts"] for l in range(config["num_hidden_layers"])},
                                    "drafter": {f"mtp.{s}": "n" * config["dspark_n_routed_experts"] for s in range(drafters)}}))
        return path

    def add_floors(self, path):
        """What the other matrices cost, with native experts, is a part that no plan changes."""
        costs = self.kl(self.realise(self.experts_only("n", others_native=False), self.a.seeds[0], "others"), self.sensitivity, "others")["domains"]
        table = json.loads(path.read_text())
        for domain in table["domains"]:
            domain["floor"] += costs[domain["name"]]["kl_mean"]
        path.write_text(json.dumps(table, indent=1))

    def sensitivity_tables(self):
        packs = {w: self.realise(self.experts_only(w), self.a.seeds[0], f"experts-{w}") for w in (2, self.a.wide)}
        table = ["sensitivity", self.a.checkpoint, "--data", self.sensitivity, "--stats", self.work / "stats"]
        if not (self.work / "layer.done").exists():
            self.run(*table, "--swap-pack", packs[2], "--swap-pack", packs[self.a.wide], "--out", self.work / "layer.json", threads=self.all_threads)
            self.add_floors(self.work / "layer.json")
            (self.work / "layer.done").touch()
            self.say("exchanges of layers")
        if not (self.work / "expert.done").exists():
            self.run(*table, "--swap-pack", packs[2], "--per", "expert", "--stats-out", self.work / "stats-by-expert", "--out", self.work / "expert.json",
                     threads=self.all_threads)
            self.add_floors(self.work / "expert.json")
            (self.work / "expert.done").touch()
            self.say("exchanges of experts")

    def plan(self, name, bpw, rule="measured", estimator="layer", widths="whole", granularity="expert", seed=0):
        out = self.work / "plans" / f"{name}.json"
        out.parent.mkdir(exist_ok=True)
        table = self.work / ("expert.json" if estimator == "expert" else "layer.json")
        stats = self.work / ("stats-by-expert" if estimator == "expert" else "stats")
        weights = [x for d in json.loads(table.read_text())["domains"] for x in ("--weight", f"{d['name']}={d['positions']}")]
        measured = ["--granularity", granularity] if rule == "measured" else []
        result = self.run("plan", self.a.checkpoint, "--stats", stats, "--sensitivity", table, "--bpw", bpw, "--bpw-of", "card", "--rule", rule,
                          "--widths", self.widths[widths], "--super-share", 0, *weights, *measured, *OTHERS, "--seed", seed, "--out", out)
        return out, result

    def kl(self, pack, panel, name, rows=0):
        out = self.work / "results" / name
        if not (out / "result.json").exists():
            out.mkdir(parents=True, exist_ok=True)
            result = self.run("eval", "kl", "--reference", self.a.checkpoint, "--candidate", pack, "--panel", panel, "--rows", rows, "--out", out / "eval")
            (out / "result.json").write_text(json.dumps(result))
        return json.loads((out / "result.json").read_text())

    @staticmethod
    def card_bpw(plan):
        return json.loads(plan.read_text())["budget"]["card_bpw"]

    def variants(self):
        chosen = self.work / "chosen.json"
        if not chosen.exists():
            todo = [(e, w, g) for e in ("layer", "expert") for w in self.widths for g in ("expert", "matrix")]

            def one(variant):
                name = "-".join(variant)
                plan, predicted = self.plan(name, 2.8, estimator=variant[0], widths=variant[1], granularity=variant[2])
                pack = self.realise(plan, self.a.seeds[0], name)
                return {"variant": variant, "kl": self.kl(pack, self.calibration, f"calibration-{name}", rows=48)["kl_mean"], "predicted": predicted["predicted_kl"],
                        "bpw": self.card_bpw(plan)}

            results = self.parallel([lambda v=v: one(v) for v in todo])
            chosen.write_text(json.dumps(sorted(results, key=lambda r: r["kl"])))
        return json.loads(chosen.read_text())

    def sides(self):
        estimator, widths, granularity = self.variants()[0]["variant"]
        out = []
        for seed in self.a.seeds:
            out.append(("measured 2.8", seed, dict(bpw=2.8, estimator=estimator, widths=widths, granularity=granularity)))
            if (widths, granularity) != ("whole", "expert"):
                # The same options as the simple rules have, so that what they gain is told from what measuring gains.
                out.append(("measured 2.8 plain", seed, dict(bpw=2.8, estimator=estimator)))
            out.append(("uniform 2.9", seed, dict(bpw=2.9, rule="uniform", seed=seed)))
            out += [(f"{rule} 2.8", seed, dict(bpw=2.8, rule=rule, seed=seed)) for rule in RULES]
        return out

    def panel_results(self):
        def one(side, seed, how):
            name = f"{side.replace(' ', '-')}-{seed}"
            plan, predicted = self.plan(name, **how)
            pack = self.realise(plan, seed, name)
            result = {"side": side, "seed": seed, "predicted": predicted["predicted_kl"], "bpw": self.card_bpw(plan)}
            for set_name, path in (("panel", self.panel), ("shifted", self.shifted)):
                self.kl(pack, path, f"{set_name}-{name}")
                sidecar, metadata = tensors(next((self.work / "results" / f"{set_name}-{name}" / "eval").glob("*.safetensors")))
                rows, domains = {}, {}
                for row, domain, kl in zip(sidecar["row"], sidecar["domain"], sidecar["kl"]):
                    total, count = rows.get(row, (0.0, 0))
                    rows[row] = (total + kl, count + 1)
                    domains[row] = domain
                names = json.loads(metadata["domains"])
                result[set_name] = {"rows": rows, "domains": {r: names[d] for r, d in domains.items()}}
            self.say(name)
            return result

        return self.parallel([lambda s=s: one(*s) for s in self.sides()])

    def report(self, results):
        names = list(dict.fromkeys(r["side"] for r in results))
        sums = {}  # (set, side, seed) -> {row: (kl, n)}
        for r in results:
            for set_name in ("panel", "shifted"):
                sums[set_name, r["side"], r["seed"]] = r[set_name]["rows"]

        def mean(set_name, side, rows, seeds):
            values = []
            for seed in seeds:
                of = sums[set_name, side, seed]
                values.append(sum(of[r][0] for r in rows) / sum(of[r][1] for r in rows))
            return sum(values) / len(values)

        print("variants of the measured plan, KL on 48 calibration rows (seed 0):")
        for v in self.variants():
            print(f"  {v['kl']:.5f}  slopes and shares by {v['variant'][0]:7} widths {v['variant'][1]:7} per {v['variant'][2]:7} {v['bpw']:.4f} bits, predicted {v['predicted']:.5f}")
        for set_name in ("panel", "shifted"):
            rows = sorted(sums[set_name, names[0], self.a.seeds[0]])
            rng = random.Random(20261201)
            draws = [([rng.choice(rows) for _ in rows], [rng.choice(self.a.seeds) for _ in self.a.seeds]) for _ in range(self.a.resamples)]
            base = [mean(set_name, names[0], *d) for d in draws]
            measured = mean(set_name, names[0], rows, self.a.seeds)
            print(f"\n{set_name}: {len(rows)} rows, seeds {self.a.seeds}; KL in nats, numerics kvq")
            print(f"{'plan':18} {'bits':>7} {'KL':>9} {'by seed':27} {'predicted':>9}  measured - it, 95 %              measured / it")
            for side in names:
                of = [r for r in results if r["side"] == side]
                kl = mean(set_name, side, rows, self.a.seeds)
                by_seed = " ".join(f"{mean(set_name, side, rows, [s]):.5f}" for s in self.a.seeds)
                line = f"{side:18} {of[0]['bpw']:7.4f} {kl:9.5f} {by_seed:27} {of[0]['predicted']:9.5f}"
                if side != names[0]:
                    differences = sorted(b - mean(set_name, side, *d) for b, d in zip(base, draws))
                    low, high = differences[int(0.025 * len(draws))], differences[int(0.975 * len(draws)) - 1]
                    line += f"  {measured - kl:+.5f} [{low:+.5f}, {high:+.5f}]  {measured / kl:.3f}"
                print(line)
            one = results[0][set_name]
            print("by domain:")
            for domain in sorted(set(one["domains"].values())):
                of_domain = [r for r in rows if one["domains"][r] == domain]
                print(f"  {domain}: " + ", ".join(f"{side} {mean(set_name, side, of_domain, self.a.seeds):.5f}" for side in names))

    def main(self):
        for step in STEPS:
            if step == "panel":
                self.report(self.panel_results())
            else:
                {"stats": self.stats, "library": self.library, "sensitivity": self.sensitivity_tables, "variants": self.variants}[step]()
            self.say(step)
            if step == self.a.until:
                return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("espalier")
    parser.add_argument("work")
    parser.add_argument("--checkpoint", default=str(ROOT / "models/pocket"))
    parser.add_argument("--data", default=str(ROOT / "models/pocket/data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--library-widths", default="2,2.5,3,3.5,4,5")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--wide", type=int, default=4, help="width of the second pack of exchanges")
    parser.add_argument("--until", choices=STEPS)
    Experiment(parser.parse_args()).main()
