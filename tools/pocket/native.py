"""Element formats of the released checkpoint: safetensors files, FP8 E4M3 with UE8M0 block scales,
MXFP4 and the KV-cache roundings.  Source: model.md sections 2.2, 3.2 and 3.3.

Two faces: `round_*` return float32 values on the format's grid (differentiable use goes through
`straight_through`), `encode_*`/`decode_*` translate to and from stored bytes.  Everything is plain
torch arithmetic on float bits, so it runs on any torch from 1.13 on, CPU or GPU.
"""
import json
import os
import struct

import numpy as np
import torch

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMPY_TYPES = {"F32": np.float32, "I64": np.int64, "I32": np.int32, "U8": np.uint8, "I8": np.int8,
                "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}


class FormatError(ValueError):
    """A file that does not follow the format; the message names the file, what was expected and found."""


# ---------------------------------------------------------------- safetensors

def read_header(path):
    """Parse and check the header; returns (dict name -> entry, offset of the data section)."""
    size = os.path.getsize(path)
    with open(path, "rb") as handle:
        head = handle.read(8)
        if len(head) < 8:
            raise FormatError(f"{path}: expected an 8-byte header length, found {size} bytes")
        length = struct.unpack("<Q", head)[0]
        if length > size - 8 or length > 100_000_000:
            raise FormatError(f"{path}: header length {length} does not fit a file of {size} bytes")
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise FormatError(f"{path}: header is not JSON ({error})") from error
    return header, 8 + length


def read_safetensors(path):
    """Read one file; returns {name: (dtype string, numpy array)}; BF16 and F8 stay raw integers."""
    header, base = read_header(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if kind not in _NUMPY_TYPES:
            raise FormatError(f"{path}: tensor {name} has unsupported dtype {kind}")
        dtype = np.dtype(_NUMPY_TYPES[kind])
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if begin < 0 or end - begin != expected or base + end > data.size:
            raise FormatError(f"{path}: tensor {name} needs {expected} bytes inside the file, "
                              f"found offsets {begin}..{end} of {data.size - base}")
        out[name] = (kind, np.frombuffer(data[base + begin:base + end].tobytes(), dtype).reshape(shape))
    return out


def write_safetensors(path, tensors, metadata=None):
    """Write {name: (dtype string, numpy array)} through a temporary file; returns the tensor bytes."""
    header, offset = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, (kind, array) in tensors.items():
        if array.dtype != np.dtype(_NUMPY_TYPES[kind]):
            raise FormatError(f"{name}: dtype {array.dtype} cannot be stored as {kind}")
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = str(path) + ".partial"
    with open(partial, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            handle.write(np.ascontiguousarray(array).tobytes())
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)
    return offset


# ---------------------------------------------------------------- grids

def exponent_floor(x):
    """floor(log2 x) of positive normal float32 values, from the bits."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def exponent_ceil(x):
    """ceil(log2 x) of positive normal float32 values, from the bits (vendor's ue8m0 rounding)."""
    bits = x.view(torch.int32)
    return ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def power_of_two(e):
    """2^e as float32 for integer e in [-126, 127], exact."""
    return ((e + 127) << 23).view(torch.float32)


def round_e4m3(x):
    """Nearest e4m3fn value, ties to even, saturating at 448; float32 in and out."""
    x = x.clamp(-448.0, 448.0)
    step = power_of_two(exponent_floor(x.abs().clamp_min(2.0 ** -6)).clamp_min(-6) - 3)
    return torch.round(x / step) * step


def round_e2m1(x):
    """Nearest of {0,.5,1,1.5,2,3,4,6} with sign, ties to the even code; input within +-6."""
    a = x.abs().clamp_max(6.0)
    step = power_of_two(exponent_floor(a.clamp_min(1.0)).clamp_min(0) - 1)
    return torch.copysign(torch.round(a / step) * step, x)


def fp8_block_scale(w, block=32):
    """Exponents [ceil(out/32), ceil(in/32)] of the power-of-two scales of an FP8 matrix [..., out, in]."""
    out, inner = w.shape[-2:]
    padded = torch.nn.functional.pad(w.abs(), (0, -inner % block, 0, -out % block))
    tiles = padded.reshape(*w.shape[:-2], -(-out // block), block, -(-inner // block), block)
    amax = tiles.amax(-1).amax(-2).clamp_min(1e-12)
    return exponent_ceil(amax * float(np.float32(1 / 448)))


def expand_block(scale, out, inner, block=32):
    """Scale per element from a block-scale matrix."""
    return scale.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :out, :inner]


def round_fp8_block(w, block=32):
    """FP8 32x32 rounding of a matrix (float32 values on the stored grid)."""
    scale = expand_block(power_of_two(fp8_block_scale(w, block)), *w.shape[-2:], block)
    return round_e4m3(w / scale) * scale


def group_exponent(x, group, limit):
    """ceil(log2(max|group| / limit)) along the last dimension; shape [..., n/group, 1]."""
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(limit * 2.0 ** -100)
    return tiles, exponent_ceil(amax * float(np.float32(1 / limit)))


def round_fp8_rows(x, group=32):
    """FP8 with one power-of-two scale per `group` columns of each row (Engram tables)."""
    tiles, e = group_exponent(x, group, 448.0)
    scale = power_of_two(e)
    return (round_e4m3(tiles / scale) * scale).reshape(x.shape)


def round_mxfp4(x, group=32):
    """MXFP4: e2m1 codes with one power-of-two scale per `group` inputs."""
    tiles, e = group_exponent(x, group, 6.0)
    scale = power_of_two(e)
    return (round_e2m1(tiles / scale) * scale).reshape(x.shape)


def round_bf16(x):
    return x.to(torch.bfloat16).to(torch.float32)


def straight_through(x, rounded):
    """Value of `rounded`, gradient of `x`."""
    return x + (rounded - x).detach()


# ---------------------------------------------------------------- KV roundings (model.md 3.2, 3.3)

def kv_window(x):
    """Window key: e4m3, groups of 32, amax at least 1e-4."""
    tiles = x.float().reshape(*x.shape[:-1], -1, 32)
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two(exponent_ceil(amax * float(np.float32(1 / 448))))
    return (round_e4m3(tiles / scale) * scale).reshape(x.shape).to(x.dtype)


def kv_compressed(x):
    """Compressed entry: fp4, groups of 16, e4m3 scale amax/6."""
    tiles = x.float().reshape(*x.shape[:-1], -1, 16)
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0 ** -9)
    scale = round_e4m3(amax / 6.0)
    return (round_e2m1((tiles / scale).clamp(-6, 6)) * scale).reshape(x.shape).to(x.dtype)


def kv_index(x):
    """Index query or key: fp4, groups of 32, power-of-two scale."""
    tiles = x.float().reshape(*x.shape[:-1], -1, 32)
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0 ** -126)
    scale = power_of_two(exponent_ceil(amax * float(np.float32(1 / 6))))
    return (round_e2m1((tiles / scale).clamp(-6, 6)) * scale).reshape(x.shape).to(x.dtype)


# ---------------------------------------------------------------- stored bytes

def _e4m3_table():
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0 ** -9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where((codes & 127) == 127, np.nan, value)
    return (np.where(codes & 128, -1, 1) * value).astype(np.float32)


E4M3_TABLE = _e4m3_table()
FP4_TABLE = np.array(FP4_VALUES + tuple(-v for v in FP4_VALUES), np.float32)


def decode_e8m0(raw):
    return np.ldexp(np.float32(1), raw.astype(np.int32) - 127).astype(np.float32)


def decode_bf16(raw):
    return (raw.astype(np.uint32) << 16).view(np.float32)


def encode_bf16(value):
    """float32 array already on the bf16 grid -> raw uint16."""
    return torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def encode_e4m3(value):
    """float32 array on the e4m3 grid -> codes."""
    order = np.argsort(E4M3_TABLE[:127], kind="stable")
    code = order[np.searchsorted(E4M3_TABLE[:127][order], np.abs(value))].astype(np.uint8)
    if not np.array_equal(E4M3_TABLE[code], np.abs(value)):
        raise FormatError("encode_e4m3: values are not on the e4m3 grid")
    return code | (np.signbit(value) & (value != 0)).astype(np.uint8) * np.uint8(128)


def encode_fp8_block(w, block=32):
    """float32 [out, in] -> (codes, scale bytes); the decoded value equals round_fp8_block(w)."""
    e = fp8_block_scale(w, block)
    scale = expand_block(power_of_two(e), *w.shape, block)
    return encode_e4m3(round_e4m3(w / scale).numpy()), (e + 127).numpy().astype(np.uint8)


def decode_fp8_block(codes, scales, block=32):
    scale = np.repeat(np.repeat(decode_e8m0(scales), block, 0), block, 1)
    return E4M3_TABLE[codes] * scale[:codes.shape[0], :codes.shape[1]]


def encode_fp8_rows(x, group=32):
    tiles, e = group_exponent(x, group, 448.0)
    codes = encode_e4m3(round_e4m3(tiles / power_of_two(e)).numpy()).reshape(x.shape)
    return codes, (e + 127).squeeze(-1).numpy().astype(np.uint8)


def decode_fp8_rows(codes, scales, group=32):
    return E4M3_TABLE[codes] * np.repeat(decode_e8m0(scales), group, 1)


def encode_mxfp4(x, group=32):
    """float32 [out, in] -> (I8 [out, in/2], scale bytes [out, in/32])."""
    tiles, e = group_exponent(x, group, 6.0)
    value = round_e2m1(tiles / power_of_two(e)).reshape(x.shape).numpy()
    code = np.searchsorted(FP4_TABLE[:8], np.abs(value)).astype(np.uint8)
    code |= (np.signbit(value) & (value != 0)).astype(np.uint8) * np.uint8(8)
    packed = (code[:, 0::2] | (code[:, 1::2] << 4)).view(np.int8)
    return packed, (e + 127).squeeze(-1).numpy().astype(np.uint8)


def decode_mxfp4(packed, scales, group=32):
    raw = packed.view(np.uint8)
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
    return FP4_TABLE[codes] * np.repeat(decode_e8m0(scales), group, 1)
