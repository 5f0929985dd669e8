"""Writes a training checkpoint as a model folder in the released layout and proves that it reads back.

Usage: export.py --backbone FOLDER/STEM [--drafter FOLDER/STEM] --out models/pocket
The stored values are the rounding of the trained weights; loading the folder must give exactly those values,
which is checked tensor by tensor.  Without a drafter its stages hold their initial values.
"""
import argparse
import os
import sys

import model
import native_checkpoint
import train_state
from model_config import Config, parameters


def gather(backbone, drafter, seed=1):
    """(root config, {name: float32 tensor}) from compact checkpoints."""
    folder, stem = os.path.split(backbone)
    _, values, extra = train_state.load_compact(folder, stem)
    cfg = Config.from_text(extra["root"]["text_config"])
    params = {n: v for n, v in model.initialise(cfg, seed).items() if n.startswith("mtp.")}
    if drafter:
        folder, stem = os.path.split(drafter)
        params = train_state.load_compact(folder, stem)[1]
    params.update(values)
    root = {}
    for key, value in extra["root"].items():
        root[key] = value
        if key == "pad_token_id" and "image_token_id" not in extra["root"]:
            root["image_token_id"] = cfg.vocab_size - 1
    return root, {n: params[n] for n in parameters(cfg)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--drafter", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    root, params = gather(args.backbone, args.drafter)
    for stale in os.listdir(args.out) if os.path.isdir(args.out) else []:
        if stale.startswith("model-") and stale.endswith(".safetensors"):
            os.remove(os.path.join(args.out, stale))
    total = native_checkpoint.save(args.out, root, params)
    cfg, loaded = native_checkpoint.load(args.out)
    wrong = [n for n, spec in parameters(cfg).items()
             if not (model.rounded(params[n], spec.stored) == loaded[n]).all()]
    if wrong:
        sys.exit(f"export: {len(wrong)} tensors do not read back, first {wrong[0]}")
    print(f"{len(loaded)} parameters, {total} tensor bytes, every value reads back")


if __name__ == "__main__":
    main()
