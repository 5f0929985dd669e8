"""Compares the Triton kernels with the plain torch forms: check_kernels.py [--device cuda].

On a CPU run it under TRITON_INTERPRET=1.  Exit code 1 when a value or gradient is off.
"""
import argparse
import sys

import torch

import model_kernels as k


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    generator = torch.Generator().manual_seed(5)
    failed = 0
    for spread in (0.5, 3.0, 12.0):
        x = (torch.randn(333, 4, 4, generator=generator) * spread).to(device)
        g = torch.randn(333, 4, 4, generator=generator).to(device)
        outs = []
        for form, kind in ((k.sinkhorn_plain, torch.float64), (k.sinkhorn_kernel, torch.float32)):
            leaf = x.to(kind).clone().requires_grad_(True)
            y = form(leaf, 20, 1e-6)
            y.backward(g.to(kind))
            outs.append((y.detach().double(), leaf.grad.double()))
        value = (outs[0][0] - outs[1][0]).abs().max().item()
        slope = ((outs[0][1] - outs[1][1]).norm() / outs[0][1].norm()).item()
        failed += not (value < 1e-5 and slope < 1e-3)
        print(f"sinkhorn spread {spread}: value {value:.1e}, relative gradient {slope:.1e}")
    for columns, top in ((16, 3), (128, 32), (512, 64), (1000, 64), (40, 64)):
        s = torch.randn(77, columns, generator=generator).to(device)
        s = torch.where(torch.rand(77, columns, generator=generator).to(device) < 0.3, torch.zeros_like(s), s)
        s[:, columns // 2:] = torch.where(torch.rand(77, 1, generator=generator).to(device) < 0.5, -torch.inf,
                                          s[:, columns // 2:])
        mask = k.topk_mask_kernel(s, top)
        plain = k.topk_mask_plain(s, top)
        count = (mask.sum(-1) != min(top, columns)).sum().item()
        low = torch.where(mask, s, torch.inf).amin(-1)
        high = torch.where(mask, -torch.inf, s).amax(-1)
        same = torch.where(mask, s, torch.zeros_like(s)), torch.where(plain, s, torch.zeros_like(s))
        wrong = (low < high).sum().item() + (~torch.isclose(same[0].nan_to_num(0, 0, 0).sum(-1),
                                                            same[1].nan_to_num(0, 0, 0).sum(-1), atol=1e-4)).sum().item()
        failed += count + wrong
        print(f"topk {top} of {columns}: rows with a wrong count {count}, wrong choice {wrong}")
    print("kernels agree" if not failed else "kernels differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
