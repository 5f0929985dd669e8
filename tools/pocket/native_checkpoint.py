"""Whole checkpoints in the released layout: config.json, sharded safetensors, index (model.md section 2).

`load(folder)` returns (Config, float32 parameters with stacked experts); vision tensors are ignored.
`save(folder, root_config, params)` writes shards grouped as in the release:
embed | layers | head, norm | drafter | one file per Engram layer.
"""
import json
import os

import numpy as np
import torch

import native
from model_config import Config, parameters


def _tensor(array):
    return torch.from_numpy(np.array(array, dtype=np.float32))


def load(folder):
    """Read and dequantise every text and drafter tensor; shapes are checked against the configuration."""
    cfg = Config.from_json(os.path.join(folder, "config.json"))
    with open(os.path.join(folder, "model.safetensors.index.json")) as handle:
        where = json.load(handle)["weight_map"]
    raw = {}
    for shard in sorted(set(where.values())):
        raw.update(native.read_safetensors(os.path.join(folder, shard)))

    def fetch(name, kind, shape):
        if name not in raw:
            raise native.FormatError(f"{folder}: tensor {name} is missing")
        found, array = raw[name]
        if found != kind or tuple(array.shape) != tuple(shape):
            raise native.FormatError(f"{folder}: {name} expected {kind} {list(shape)}, "
                                     f"found {found} {list(array.shape)}")
        return array

    params = {}
    for name, spec in parameters(cfg).items():
        stem = name[:-len(".weight")] if name.endswith(".weight") else name
        if spec.stored == "bf16":
            value = native.decode_bf16(fetch(name, "BF16", spec.shape))
        elif spec.stored == "f32":
            value = fetch(name, "F32", spec.shape)
        elif spec.stored == "fp8":
            out, inner = spec.shape
            value = native.decode_fp8_block(fetch(name, "F8_E4M3", spec.shape),
                                            fetch(f"{stem}.scale", "F8_E8M0", (-(-out // 32), -(-inner // 32))))
        elif spec.stored == "rows":
            value = native.decode_fp8_rows(fetch(name, "F8_E4M3", spec.shape),
                                           fetch(f"{stem}.scale", "F8_E8M0", (spec.shape[0], spec.shape[1] // 32)))
        else:
            count, out, inner = spec.shape
            base, matrix = name.rsplit(".", 1)
            value = np.stack([native.decode_mxfp4(fetch(f"{base}.{e}.{matrix}.weight", "I8", (out, inner // 2)),
                                                  fetch(f"{base}.{e}.{matrix}.scale", "F8_E8M0", (out, inner // 32)))
                              for e in range(count)])
        params[name] = _tensor(value)
    return cfg, params


def stored_tensors(cfg, params):
    """{released name: (dtype string, array)} of every tensor, rounding `params` to the stored formats."""
    out = {}
    for name, spec in parameters(cfg).items():
        value = params[name].detach().to("cpu", torch.float32).contiguous()
        stem = name[:-len(".weight")] if name.endswith(".weight") else name
        if spec.stored == "bf16":
            out[name] = ("BF16", native.encode_bf16(value.numpy()))
        elif spec.stored == "f32":
            out[name] = ("F32", value.numpy())
            if name.endswith("gate.bias"):
                out[name + "_vl"] = ("F32", value.numpy())
        elif spec.stored == "mxfp4":
            base, matrix = name.rsplit(".", 1)
            for e in range(spec.shape[0]):
                codes, scales = native.encode_mxfp4(value[e])
                out[f"{base}.{e}.{matrix}.weight"] = ("I8", codes)
                out[f"{base}.{e}.{matrix}.scale"] = ("F8_E8M0", scales)
        else:
            encode = native.encode_fp8_block if spec.stored == "fp8" else native.encode_fp8_rows
            codes, scales = encode(value)
            out[name] = ("F8_E4M3", codes)
            out[f"{stem}.scale"] = ("F8_E8M0", scales)
    return out


def shard_groups(cfg, names, layers_per_shard=4):
    """List of name lists in the release's grouping."""
    groups = {}
    for name in names:
        parts = name.split(".")
        if ".engram." in name:
            key = (4, int(parts[1]))
        elif parts[0] == "layers":
            key = (1, int(parts[1]) // layers_per_shard)
        elif parts[0] == "mtp":
            key = (3, 0)
        else:
            key = (0, 0) if parts[0] == "embed" else (2, 0)
        groups.setdefault(key, []).append(name)
    return [groups[k] for k in sorted(groups)]


def save(folder, root_config, params, layers_per_shard=4):
    """Write config.json, shards and index; returns the tensor bytes."""
    cfg = Config.from_text(root_config["text_config"])
    os.makedirs(folder, exist_ok=True)
    tensors = stored_tensors(cfg, params)
    groups = shard_groups(cfg, tensors, layers_per_shard)
    where, total = {}, 0
    for number, group in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        total += native.write_safetensors(os.path.join(folder, shard), {n: tensors[n] for n in group})
        where.update({n: shard for n in group})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as handle:
        json.dump({"metadata": {"total_size": total}, "weight_map": where}, handle, indent=1)
        handle.write("\n")
    with open(os.path.join(folder, "config.json"), "w") as handle:
        json.dump(root_config, handle, indent=2)
        handle.write("\n")
    return total
