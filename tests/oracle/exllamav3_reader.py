"""exllamav3's own reader of packs on a machine without PyTorch, nvcc or a GPU.

`import exllamav3` needs a CUDA build of PyTorch and compiles its CUDA extension, so it cannot be imported here. Three of its modules need
neither to decide whether they accept a pack: the collection of safetensors files (headers, names, codebook markers), the constructor of
an EXL3 linear layer, and the quantizer's constants. They run as published, over stand-ins for `torch`, for the extension and for the rest
of the package; a tensor is its type and shape.
"""
import functools
import importlib
import importlib.util
import sys
import types
from unittest import mock

PACKAGE = "exllamav3"
REAL = ("loader.safetensors", "modules.quant.exl3", "modules.quant.exl3_lib.quantize")
TYPES = {"int": "int32", "int32": "int32", "long": "int64", "int8": "int8", "uint8": "uint8", "short": "int16", "int16": "int16",
         "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float8_e4m3fn": "float8_e4m3fn"}


class TorchType(str):
    """What torch's types are to the reader: they compare, and print as torch.int16."""


class Described:
    """A tensor of which only type and shape are known."""

    def __init__(self, dtype, shape):
        self.dtype, self.shape, self.device = dtype, tuple(shape), "cpu"


def stand_in(name, **members):
    module = mock.MagicMock(name=name)
    module.__path__ = []
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    return module


class NameLookup:
    """Stands in for the trie of tensor names."""

    def __init__(self, names):
        self.names = list(names)

    def keys(self, prefix):
        return [name for name in self.names if name.startswith(prefix)]


@functools.lru_cache
def load():
    """Returns (SafetensorsCollection, LinearEXL3, quantize, convert_dtype); stops when the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        sys.exit(f"oracle: no {PACKAGE} in {sys.executable}; pip install --no-deps -r tests/oracle/requirements-no-deps.txt")
    root = list(spec.submodule_search_locations)[0]
    shared = {text: TorchType("torch." + text) for text in TYPES.values()}
    torch = stand_in("torch", **{name: shared[text] for name, text in TYPES.items()})
    torch.tensor = lambda value, dtype: mock.Mock(view=lambda to: Described(to, ()))
    stand_in("torch.nn")
    stand_in("torch.nn.functional")
    for folder in ("", ".loader", ".modules", ".modules.quant", ".modules.quant.exl3_lib"):
        package = types.ModuleType(PACKAGE + folder)  # its __init__ would import everything
        package.__path__ = [root + folder.replace(".", "/")]
        sys.modules[PACKAGE + folder] = package
    for name in ("ext", "util", "util.tensor", "util.progress", "util.memory", "util.hadamard", "model", "model.config",
                 "modules.quant.exl3_lib.hessian_packed"):
        stand_in(f"{PACKAGE}.{name}")
    collection, linear, quantize = (importlib.import_module(f"{PACKAGE}.{name}") for name in REAL)
    collection.SafetensorsCollection.get_tensor_file_map_trie = lambda self: NameLookup(self.tensor_file_map)
    return collection.SafetensorsCollection, linear.LinearEXL3, quantize, collection.convert_dtype


def describe(stc, convert_dtype, name):
    """The tensor as the collection's header has it, or None."""
    if not stc.has_tensor(name):
        return None
    entry = stc.file_headers[stc.tensor_file_map[name]][name]
    return Described(convert_dtype(entry["dtype"])[0], entry["shape"])


def is_exl3(stc, stem):
    """The group by which its linear layer recognises EXL3."""
    return stc.has_tensor_group(stem, [["sv", "svh"], ["su", "suh"], "trellis"])


def accept(stc, linear, quantize, convert_dtype, stem):
    """Makes its layer of one matrix of a pack; returns the width that it found. Raises what it raises."""
    part = lambda suffix: describe(stc, convert_dtype, stem + suffix)
    trellis = part(".trellis")
    layer = linear(None, 16 * trellis.shape[0], 16 * trellis.shape[1], su=part(".su"), sv=part(".sv"), suh=part(".suh"), svh=part(".svh"),
                   trellis=trellis, mcg=stc.get_codebook_marker(stem + ".mcg", quantize.codebook_mcg_mult),
                   mul1=stc.get_codebook_marker(stem + ".mul1", quantize.codebook_mul1_mult), key=stem)
    return layer.K
