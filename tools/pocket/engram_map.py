"""Compressed token map of the Engram hash: token id -> class id, from a tokenizer.json.

Key of an id: its decoded text, normalised (NFKC, NFD, strip accents, lowercase, whitespace runs to one space, strip); the vocabulary
string when the text contains U+FFFD; the text itself when the normalised text is empty. Classes in order of first appearance.
Source: the network specification, section 7.1. Command: engram_map.py tokenizer.json [common.safetensors]  prints the
number of classes and, with the second file, compares with its tensor engram.token_map.
"""

import json
import struct
import sys

from tokenizers import Regex, Tokenizer, normalizers

KEEP_SPACE = "\ue000"


def token_map(tokenizer):
    """List of class ids, one per id of the tokenizer (added tokens included)."""
    steps = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), KEEP_SPACE),
        normalizers.Strip(), normalizers.Replace(KEEP_SPACE, " "),
    ])
    classes, out = {}, []
    for i in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = tokenizer.id_to_token(i) if "\ufffd" in text else (steps.normalize_str(text) or text)
        out.append(classes.setdefault(key, len(classes)))
    return out


def read_i64(path, name):
    """One I64 tensor of a safetensors file as a list."""
    with open(path, "rb") as handle:
        size = struct.unpack("<Q", handle.read(8))[0]
        entry = json.loads(handle.read(size))[name]
        begin, end = entry["data_offsets"]
        handle.seek(8 + size + begin)
        return list(struct.unpack(f"<{(end - begin) // 8}q", handle.read(end - begin)))


def main():
    own = token_map(Tokenizer.from_file(sys.argv[1]))
    print(max(own) + 1)
    if len(sys.argv) > 2 and own != read_i64(sys.argv[2], "engram.token_map"):
        sys.exit("engram_map: the map differs from engram.token_map")


if __name__ == "__main__":
    main()
