"""Packs of all three layouts before other people's readers.

The official safetensors library reads every file, and finds the same names, types, shapes and bytes in each layout. exllamav3's own
reader (exllamav3_reader.py says how far it runs without a GPU) opens the folders, checks every header and marker, makes its layer of
every EXL3 matrix at the width that was asked for, and lists the tensors of every module as quantization_config.json does.
The pack is of a cut-down checkpoint (tests/e2e/small_checkpoint.py): every kind of matrix, half-step widths, native tensors.
"""
import argparse
import hashlib
import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))
sys.dont_write_bytecode = True

import exllamav3_reader  # noqa: E402
import small_checkpoint as small  # noqa: E402
from oracle_common import Program  # noqa: E402

try:
    import safetensors
except ImportError as missing:
    sys.exit(f"oracle: {missing}; this test needs the PyPI package 'safetensors' in {sys.executable}")


def check(condition, text):
    if not condition:
        sys.exit(f"oracle: {text}")


def official(folder):
    """{name: (dtype, shape, digest)} of every file, by the safetensors library."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="np") as file:
            declared = {name: (file.get_slice(name).get_dtype(), list(file.get_slice(name).get_shape())) for name in file.keys()}
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            check((tensor["dtype"], list(tensor["shape"])) == declared[name], f"{path.name}: '{name}' is read in two ways")
            check(name not in out, f"{path.name}: '{name}' is stored twice")
            out[name] = (*declared.pop(name), hashlib.sha256(tensor["data"]).hexdigest())
        check(not declared, f"{path.name}: {sorted(declared)} are listed and not read")
    return out


def exllamav3(folder, layout, widths):
    """Opens a folder with exllamav3's classes; widths: stem -> bits that must be found."""
    collection, linear, quantize, convert_dtype = exllamav3_reader.load()
    stc = collection(str(folder))
    stems = sorted(name[:-8] for name in stc.tensor_file_map if name.endswith(".trellis"))
    check(stems == sorted(widths), f"{layout}: {len(stems)} matrices, expected {len(widths)}")
    for stem in stems:
        check(exllamav3_reader.is_exl3(stc, stem), f"{layout}: '{stem}' is not recognised as EXL3")
        found = exllamav3_reader.accept(stc, linear, quantize, convert_dtype, stem)
        check(found == widths[stem], f"{layout}: '{stem}': width {found}, expected {widths[stem]}")
    if layout == "exllamav3":
        storage = json.loads((folder / "quantization_config.json").read_text())["tensor_storage"]
        n = 0
        for module, entry in storage.items():
            if not any(other.startswith(module + ".") for other in storage):
                check(stc.list_tensors(module, only_serializable=True) == entry["stored_tensors"], f"tensor_storage: '{module}' differs")
                n += 1
        listed = [name for entry in storage.values() for name in entry["stored_tensors"]]
        check(sorted(listed) == sorted(stc.tensor_file_map), "tensor_storage does not list every tensor once")
        print(f"{layout}: tensor_storage as exllamav3 would write it for {n} modules")
    return stc


def refusals(folder):
    """The reader that accepts these packs is one that refuses: a marker of another codebook, a half step without mul1, a cut file."""
    collection, linear, quantize, convert_dtype = exllamav3_reader.load()
    path = next(p for p in sorted(folder.glob("*.safetensors")) if any(n.endswith(".mul1") for n in small.read_header(p)[0]))
    tensors = small.read_tensors(path)
    name = next(n for n in tensors if n.endswith(".mul1"))
    wrong = dict(tensors, **{name: ("I32", [], b"\x12\x34\x56\x78")})
    half = next(p for p in sorted(folder.glob("*.safetensors"))
                for n, e in small.read_header(p)[0].items() if n.endswith(".trellis") and e["shape"][2] % 16)
    halves = {n: t for n, t in small.read_tensors(half).items() if not n.endswith(".mul1")}
    stem = next(n[:-8] for n, t in halves.items() if n.endswith(".trellis") and t[1][2] % 16)
    for what, content, matrix in (("marker", wrong, name[:-5]), ("half step", halves, stem), ("cut", None, None)):
        with tempfile.TemporaryDirectory() as other:
            to = pathlib.Path(other) / "a.safetensors"
            if content is None:
                to.write_bytes(path.read_bytes()[:-1])
            else:
                small.write_tensors(to, content)
            try:
                exllamav3_reader.accept(collection(other), linear, quantize, convert_dtype, matrix)
            except (ValueError, AssertionError) as refused:
                print(f"refused as it should be, {what}: {str(refused).replace(other, '').strip()[:120]}")
            else:
                sys.exit(f"oracle: exllamav3's reader accepts a wrong {what}: the stand-ins hide something")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--espalier", required=True)
    program = Program(parser.parse_args().espalier)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        model = small.write_checkpoint(HERE.parent / "golden/model/tiny-a", root / "model")
        data = root / "data.jsonl"
        data.write_text(small.data_line("r0", small.token_row(1, 48)))
        program.run("quantize", model, "--bits", "2", "--dense-bits", "3", "--head-bits", "4", "--drafter-bits", "2.5", "--data", data,
                    "--preset", "fast", "--out", root / "exllamav3", "--quiet")
        for layout in ("vllm", "tensorfold"):
            program.run("convert", root / "exllamav3", "--layout", layout, "--out", root / layout, "--quiet")
        written = {}
        for path in (root / "exllamav3").glob("*.safetensors"):
            written.update(small.read_tensors(path))
        ours = {name: (dtype, shape, hashlib.sha256(blob).hexdigest()) for name, (dtype, shape, blob) in written.items()}
        widths = {name[:-8]: shape[2] / 16 for name, (_, shape, _) in written.items() if name.endswith(".trellis")}
        for layout in ("exllamav3", "vllm", "tensorfold"):
            found = official(root / layout)
            check(found == ours, f"{layout}: the safetensors library reads other tensors")
            exllamav3(root / layout, layout, widths)
            print(f"{layout}: {len(found)} tensors in {len(list((root / layout).glob('*.safetensors')))} files; safetensors "
                  f"{safetensors.__version__} and exllamav3's reader accept them")
        refusals(root / "exllamav3")


if __name__ == "__main__":
    main()
