"""Averages two checkpoints of the run and packs the best average as the start point of train_final.py.

Multi-epoch training overfits the small prose and table sources during the decay; an average of a plateau
checkpoint and the decayed one generalises better.  The share is chosen on held-out rows, native rounding on.
Usage: train_blend.py --plateau STEM --decayed STEM --pack FILE [--share X] <arguments of train.py>
"""
import argparse
import os
import sys

import torch

import train
import train_state


def blended(first, second, share):
    return {n: first[n] * (1 - share) + second[n] * share for n in first}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--plateau", required=True)
    parser.add_argument("--decayed", required=True)
    parser.add_argument("--pack", required=True)
    parser.add_argument("--shares", default="0,0.2,0.4,0.6,0.8,1")
    own, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    args = train.arguments()
    first, second = (train_state.load_compact(*os.path.split(stem))[1] for stem in (own.plateau, own.decayed))
    trainer, best = train.Trainer(args), None
    for share in [float(s) for s in own.shares.split(",")]:
        trainer.params = blended(first, second, share)
        trainer.step = args.dense_steps + 1
        with torch.no_grad():
            dev = trainer.evaluate(True)
        domains = [v for k, v in dev.items() if k != "dialogue_answer"]
        mean = sum(domains) / len(domains)
        trainer.write(blend=share, dev_native=dev, mean=mean)
        if best is None or mean < best[0]:
            best = (mean, share)
        train_state.save_packed(own.pack, blended(first, second, best[1]), {"root": trainer.root, "blend": best[1]})
    trainer.write(chosen_blend=best[1], mean=best[0])


if __name__ == "__main__":
    main()
