"""A cut-down copy of the tiny golden checkpoint, and an independent reader and writer of safetensors files.

Three layers (window-only with Engram, ratio-2 source, ratio-2 reuse), one drafter stage, fewer experts: every kind of matrix,
little to encode. Standard library only.
"""
import json
import pathlib
import shutil
import struct

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
         "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


def count(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def read_header(path):
    """{name: {dtype, shape, data_offsets}} after checking the rules of the format; also the metadata and where data begins."""
    blob = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    assert 8 + size <= len(blob), f"{path}: header beyond the file"
    header = json.loads(blob[8:8 + size])
    metadata = header.pop("__metadata__", {})
    assert all(isinstance(v, str) for v in metadata.values()), f"{path}: metadata values are strings"
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == at, f"{path}: {name} begins at {begin}, expected {at}: no gaps, no overlaps"
        assert end - begin == SIZES[entry["dtype"]] * count(entry["shape"]), f"{path}: {name} has the wrong size"
        assert (8 + size + begin) % SIZES[entry["dtype"]] == 0, f"{path}: {name} is not aligned"
        at = end
    assert 8 + size + at == len(blob), f"{path}: data does not end with the file"
    return header, metadata, 8 + size


def read_tensors(path):
    """{name: (dtype, shape, bytes)}"""
    header, _, base = read_header(path)
    blob = pathlib.Path(path).read_bytes()
    return {name: (e["dtype"], list(e["shape"]), blob[base + e["data_offsets"][0]:base + e["data_offsets"][1]]) for name, e in header.items()}


def write_tensors(path, tensors):
    header, data, at = {}, [], 0
    for name, (dtype, shape, blob) in sorted(tensors.items(), key=lambda item: (-SIZES[item[1][0]], item[0])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(blob)]}
        data.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def small_tensors(golden):
    """The tensors of the small checkpoint. Layers 1, 2, 3 become 0, 1, 2; the tails of mtp.1 move to mtp.0."""
    source = {}
    for path in sorted(pathlib.Path(golden).glob("*.safetensors")):
        source.update(read_tensors(path))
    out = {}
    for name, (dtype, shape, blob) in source.items():
        to = None
        parts = name.split(".")
        if parts[0] == "layers" and parts[1] in "123":
            to = ".".join(["layers", str(int(parts[1]) - 1)] + parts[2:])
        elif name.startswith("mtp.0.") or name in ("embed.weight", "head.weight", "norm.weight"):
            to = name
        elif name.startswith(("mtp.1.norm.", "mtp.1.markov_head.", "mtp.1.confidence_head.")):
            to = "mtp.0." + name[6:]
        if to is None:
            continue
        n_experts = 2 if to.startswith("mtp.") else 3
        if ".experts." in to and int(to.split(".experts.")[1].split(".")[0]) >= n_experts:
            continue
        if ".ffn.gate." in to:  # the first rows of the router
            blob = blob[:len(blob) // shape[0] * n_experts]
            shape = [n_experts] + shape[1:]
        out[to] = (dtype, shape, blob)
    return out


def small_config(golden):
    config = json.loads(pathlib.Path(golden, "config.json").read_text())
    config.pop("vision_config")
    config["text_config"].update(num_hidden_layers=3, compress_ratios=[0, 2, 2, 0], kv_source_layer_ids=[1], index_source_layer_ids=[1],
                                 candidate_source_layer_id=None, engram_layer_ids=[0], engram_num_embeddings=[630], n_routed_experts=3,
                                 num_nextn_predict_layers=1, dspark_target_layer_ids=[0, 1, 2], dspark_n_routed_experts=2)
    return config


def write_checkpoint(golden, folder, tensors=None, config=None):
    folder = pathlib.Path(folder)
    folder.mkdir()
    write_tensors(folder / "model.safetensors", tensors if tensors is not None else small_tensors(golden))
    (folder / "config.json").write_text(json.dumps(config if config is not None else small_config(golden)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(pathlib.Path(golden, name), folder / name)
    (folder / "LICENSE").write_text("licence text of the test checkpoint\n")
    return folder


def data_line(name, ids, domain="a", mask=None, **extra):
    row = dict(id=name, domain=domain, mode="raw", ids=ids, role_mask=mask if mask is not None else [3] * len(ids), source="counter",
               licence="CC0-1.0")
    row.update(extra)
    return json.dumps(row) + "\n"


def token_row(seed, n):
    """n ids of a small generator, below the chat tokens."""
    state, ids = seed * 2654435761 % 2**32, [0]
    while len(ids) < n:
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append(3 + (state >> 8) % 480)
    return ids
