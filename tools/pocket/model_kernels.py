"""Sinkhorn normalisation and top-k masks: plain torch everywhere, Triton kernels on a GPU.

`sinkhorn(logits, iters, eps)`: softmax over the last index, plus eps, then columns, then iters-1
rounds of rows and columns (model.md section 4).  `topk_mask(scores, k)`: bool mask of the k largest
entries of the last dimension; equal scores prefer the lower index on the GPU path, the order of
torch.topk elsewhere.
"""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def sinkhorn_plain(logits, iters, eps):
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def topk_mask_plain(scores, k):
    k = min(k, scores.shape[-1])
    index = torch.topk(scores, k, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True)


if triton is not None:

    @triton.jit
    def _sinkhorn_forward(x_ptr, out_ptr, sums_ptr, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i, j = tl.arange(0, 4), tl.arange(0, 4)
        at = token[:, None, None] * 16 + i[None, :, None] * 4 + j[None, None, :]
        live = token < n
        c = tl.load(x_ptr + at, mask=live[:, None, None], other=0.0)
        c = tl.exp(c - tl.max(c, 2)[:, :, None])
        c = c / tl.sum(c, 2)[:, :, None]
        c = c + eps
        slot = token[:, None] * 4 + i[None, :]
        for step in range(2 * ITERS - 1):
            if step % 2 == 0:
                s = tl.sum(c, 1) + eps
                tl.store(sums_ptr + step * n * 4 + slot, s, mask=live[:, None])
                c = c / s[:, None, :]
            else:
                s = tl.sum(c, 2) + eps
                tl.store(sums_ptr + step * n * 4 + slot, s, mask=live[:, None])
                c = c / s[:, :, None]
        tl.store(out_ptr + at, c, mask=live[:, None, None])

    @triton.jit
    def _sinkhorn_backward(out_ptr, sums_ptr, grad_ptr, dx_ptr, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i, j = tl.arange(0, 4), tl.arange(0, 4)
        at = token[:, None, None] * 16 + i[None, :, None] * 4 + j[None, None, :]
        live = token < n
        c = tl.load(out_ptr + at, mask=live[:, None, None], other=0.0)
        g = tl.load(grad_ptr + at, mask=live[:, None, None], other=0.0)
        slot = token[:, None] * 4 + i[None, :]
        for back in range(2 * ITERS - 1):
            step = 2 * ITERS - 2 - back
            s = tl.load(sums_ptr + step * n * 4 + slot, mask=live[:, None], other=1.0)
            if step % 2 == 0:
                g = (g - tl.sum(g * c, 1)[:, None, :]) / s[:, None, :]
                c = c * s[:, None, :]
            else:
                g = (g - tl.sum(g * c, 2)[:, :, None]) / s[:, :, None]
                c = c * s[:, :, None]
        c = c - eps
        dx = c * (g - tl.sum(g * c, 2)[:, :, None])
        tl.store(dx_ptr + at, dx, mask=live[:, None, None])

    @triton.jit
    def _topk_mask(x_ptr, out_ptr, n, k, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + column, mask=column < n, other=float("-inf"))
        x = tl.where(x == 0.0, 0.0, x)  # -0 and +0 compare equal
        bits = x.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        key = tl.where(column < n, key, -4294967296)
        # largest threshold t with count(key >= t) >= k
        low = tl.min(tl.where(column < n, key, 2147483647), 0)
        high = tl.max(key, 0)
        for _ in range(33):
            middle = (low + high + 1) >> 1
            enough = tl.sum((key >= middle).to(tl.int32), 0) >= k
            low = tl.where(enough & (low < high), middle, low)
            high = tl.where(enough | (low >= high), high, middle - 1)
        above = key > low
        equal = key == low
        room = k - tl.sum(above.to(tl.int32), 0)
        rank = tl.cumsum(equal.to(tl.int32), 0)
        chosen = above | (equal & (rank <= room))
        tl.store(out_ptr + row * n + column, chosen.to(tl.int8), mask=column < n)


class _Sinkhorn(torch.autograd.Function):
    BLOCK = 64

    @staticmethod
    def forward(ctx, logits, iters, eps):
        flat = logits.contiguous().view(-1, 16)
        n = flat.shape[0]
        out = torch.empty_like(flat)
        sums = torch.empty(2 * iters - 1, n, 4, device=flat.device)
        _sinkhorn_forward[(triton.cdiv(n, _Sinkhorn.BLOCK),)](flat, out, sums, n, eps, ITERS=iters,
                                                              BLOCK=_Sinkhorn.BLOCK)
        ctx.save_for_backward(out, sums)
        ctx.iters, ctx.eps = iters, eps
        return out.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        out, sums = ctx.saved_tensors
        dx = torch.empty_like(out)
        n = out.shape[0]
        _sinkhorn_backward[(triton.cdiv(n, _Sinkhorn.BLOCK),)](out, sums, grad.contiguous(), dx, n, ctx.eps,
                                                               ITERS=ctx.iters, BLOCK=_Sinkhorn.BLOCK)
        return dx.view_as(grad), None, None


def sinkhorn_kernel(logits, iters, eps):
    return _Sinkhorn.apply(logits, iters, eps)


def topk_mask_kernel(scores, k):
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    flat = scores.contiguous().view(-1, scores.shape[-1])
    out = torch.empty(flat.shape, dtype=torch.int8, device=flat.device)
    _topk_mask[(flat.shape[0],)](flat, out, flat.shape[1], k, BLOCK=max(16, triton.next_power_of_2(flat.shape[1])))
    return out.view(torch.bool).view(scores.shape)


def sinkhorn(logits, iters, eps):
    if logits.is_cuda and triton is not None and logits.shape[-1] == 4:
        return sinkhorn_kernel(logits.float(), iters, eps)
    return sinkhorn_plain(logits, iters, eps)


def topk_mask(scores, k):
    if scores.is_cuda and triton is not None:
        return topk_mask_kernel(scores.float(), k)
    return topk_mask_plain(scores, k)
