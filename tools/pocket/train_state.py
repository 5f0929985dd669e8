"""Training checkpoints.  Exact: every tensor, optimiser state and random state in one local file, so a
resumed run continues bit for bit.  Compact: weights in shards of at most 15 MiB, bf16 except the parameters the release
keeps in F32, for transport; a run resumed from it starts with empty moments and a short re-warm-up.
"""
import json
import lzma
import os

import numpy as np
import torch

SHARD_BYTES = 15 * 1024 * 1024


def save_exact(path, step, params, optimiser, generator, extra):
    blob = {"step": step, "params": {n: p.detach() for n, p in params.items()}, "state": optimiser.state,
            "steps": optimiser.steps, "generator": generator.get_state(), "extra": extra}
    torch.save(blob, path + ".partial")
    os.replace(path + ".partial", path)


def load_exact(path, params, optimiser, generator):
    """Restore in place; returns (step, extra)."""
    device = next(iter(params.values())).device
    blob = torch.load(path, map_location=device, weights_only=False)
    with torch.no_grad():
        for n, p in params.items():
            p.copy_(blob["params"][n])
        for n, s in optimiser.state.items():
            s.copy_(blob["state"][n])
    optimiser.steps = blob["steps"]
    generator.set_state(blob["generator"].cpu())
    return blob["step"], blob["extra"]


def _kept(name):
    """Parameters whose float32 value is stored as is: they stay F32 in the released format too."""
    return "hc_" in name or name.endswith(("attn_sink", "gate.bias"))


def save_compact(folder, stem, step, params, extra):
    """Write <stem>.json and <stem>-<n>.bin."""
    os.makedirs(folder, exist_ok=True)
    blobs, tensors = [], []
    for name, value in params.items():
        value = value.detach().to("cpu", torch.float32).contiguous()
        kind = "f32" if _kept(name) else "bf16"
        blobs.append(value.numpy().tobytes() if kind == "f32"
                     else value.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
        tensors.append([name, list(value.shape), kind])
    flat = b"".join(blobs)
    meta = {"step": step, "extra": extra, "tensors": tensors, "shards": -(-len(flat) // SHARD_BYTES)}
    for i in range(meta["shards"]):
        with open(os.path.join(folder, f"{stem}-{i}.bin"), "wb") as handle:
            handle.write(flat[i * SHARD_BYTES:(i + 1) * SHARD_BYTES])
    with open(os.path.join(folder, f"{stem}.json"), "w") as handle:
        json.dump(meta, handle)


def load_compact(folder, stem):
    """(step, {name: float32 tensor}, extra)."""
    with open(os.path.join(folder, f"{stem}.json")) as handle:
        meta = json.load(handle)
    flat = b"".join(open(os.path.join(folder, f"{stem}-{i}.bin"), "rb").read() for i in range(meta["shards"]))
    at, out = 0, {}
    for name, shape, kind in meta["tensors"]:
        count, width = int(np.prod(shape)), 4 if kind == "f32" else 2
        part = np.frombuffer(flat, np.uint8, count * width, at)
        value = part.view(np.float32) if kind == "f32" else (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        out[name], at = torch.from_numpy(value.reshape(shape).copy()), at + count * width
    if at != len(flat):
        raise ValueError(f"{folder}/{stem}: expected {at} bytes, found {len(flat)}")
    return meta["step"], out, meta["extra"]


def save_packed(path, params, extra):
    """A start point in one small file: 6-bit values with one scale per row, LZMA; F32-kept parameters exact.

    Only for weights that are trained further afterwards: the error is about 1.6 % of each row's maximum.
    """
    blobs, tensors = [], []
    for name, value in params.items():
        value = value.detach().to("cpu", torch.float32).contiguous().numpy()
        exact = _kept(name) or value.ndim < 2
        tensors.append([name, list(value.shape), exact])
        if exact:
            blobs.append(value.tobytes())
            continue
        scale = np.maximum(np.abs(value).max(-1, keepdims=True) / 31, 1e-12).astype(np.float32)
        blobs += [scale.tobytes(), np.rint(value / scale).astype(np.int8).tobytes()]
    head = json.dumps({"extra": extra, "tensors": tensors}).encode()
    with open(path, "wb") as handle:
        handle.write(lzma.compress(len(head).to_bytes(8, "little") + head + b"".join(blobs), preset=1))


def load_packed(path):
    """({name: float32 tensor}, extra)."""
    with open(path, "rb") as handle:
        flat = lzma.decompress(handle.read())
    size = int.from_bytes(flat[:8], "little")
    meta, at, out = json.loads(flat[8:8 + size]), 8 + size, {}
    for name, shape, exact in meta["tensors"]:
        count = int(np.prod(shape))
        if exact:
            value, at = np.frombuffer(flat, np.float32, count, at), at + 4 * count
        else:
            rows = count // shape[-1]
            scale = np.frombuffer(flat, np.float32, rows, at).reshape(*shape[:-1], 1)
            value = np.frombuffer(flat, np.int8, count, at + 4 * rows).reshape(shape) * scale
            at += 4 * rows + count
        out[name] = torch.from_numpy(np.array(value, np.float32).reshape(shape))
    if at != len(flat):
        raise ValueError(f"{path}: expected {at} bytes, found {len(flat)}")
    return out, meta["extra"]
