"""Last stage of the backbone: short fine-tune from a packed start point with native rounding throughout.

Usage: train_final.py --start FILE <arguments of train.py>.  The sources that repeat most are lowered in the
mixture, dialogues raised.  The saved weights lie on the stored grids, so exporting them loses nothing.
"""
import argparse
import sys

import torch

import mixture
import model
import model_ops
import train
import train_state
from model_config import parameters

FINE_WEIGHTS = {"austen": 2.0, "bible-web": 1.5, "spurgeon": 2.0, "mhcc": 1.5, "wn": 4.0, "cldr-xml": 0.8, "ucd": 0.8,
                "dialogue": 30.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--start", required=True)
    own, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    args = train.arguments()
    torch.backends.cuda.matmul.allow_tf32 = True
    mixture.WEIGHTS.update(FINE_WEIGHTS)
    if args.compile:
        model_ops.compile_ops()
    trainer = train.Trainer(args)
    values, extra = train_state.load_packed(own.start)
    with torch.no_grad():
        for n, p in trainer.params.items():
            p.copy_(values[n])
    trainer.write(start=extra["blend"], dev_native=trainer.evaluate(True), dev_float=trainer.evaluate(False))
    trainer.run()
    specs = parameters(trainer.cfg)
    on_grid = {n: model.rounded(p.detach(), specs[n].stored) for n, p in trainer.params.items()}
    train_state.save_compact(args.out, "backbone", trainer.step, on_grid, {"root": trainer.root})


if __name__ == "__main__":
    main()
