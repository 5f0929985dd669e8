"""Texts for the tokenizer oracle: seeded strings that look for trouble, the project's own sources, and a corpus when given."""

import json
import pathlib
import random
import shutil
import subprocess
import sys

SCRIPTS = [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x587), (0x5D0, 0x5EA),
           (0x620, 0x64A), (0x904, 0x939), (0x985, 0x9B9), (0xE01, 0xE3A), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F),
           (0x1780, 0x17DC), (0x1E00, 0x1EFF), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0x9FA6, 0x9FFF),
           (0x3400, 0x4DBF), (0xAC00, 0xD7A3), (0xFF66, 0xFF9D), (0x20000, 0x2A6DF), (0x1D400, 0x1D7FF), (0x10330, 0x1034A)]
SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u180e" + "".join(map(chr, range(0x2000, 0x200D))) + "\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
DIGITS = "0123456789٠١٢٣۴५६৭๓１２３½¼Ⅷⅳ①②㊿𝟘𝟙〇"
MARKS = "\u0300\u0301\u0308\u0327\u0345\u0483\u0489\u064b\u0651\u093e\u094d\u0e31\u20dd\u20e3\u3099\ufe0f\ufe20\U0001d165"
EMOJI = ["👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "🇩", "1️⃣", "❤️", "😀😃", "👩🏾‍💻", "🫠", "🪿", "™️", "☕︎", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"]
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»…—–‘’“”、。「」《》！？（）￥€£¥¢₹©®±×÷∑√∞≠≤≥←→"
CODE = ["def f(x):\n    return x\n", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += 1;\n}", "don't I'm we'll THEY'RE it'S", "a.b->c::d",
        "https://example.org/a_b?c=d&e=%20#f", "{\"k\": [1, 2.5e-3, null]}", "<tool_result>ok</tool_result>", "x<y>z", "<dsml:x", "</dsml:",
        "$abc(def)", "    \n\n\t\n  x", "\r\n\r\n", "a \n\n b", "#!/bin/sh\n", "SELECT * FROM t WHERE a='b';", "\\frac{a}{b}", "v1.2.3-rc4"]


def seeded(count, added, seed=20260930):
    """`added`: spellings of added tokens, mixed in whole and cut."""
    rng = random.Random(seed)

    def word():
        low, high = rng.choice(SCRIPTS)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))

    def marker():
        token = rng.choice(added)
        return token if rng.random() < 0.6 else token[:rng.randint(1, len(token))] + rng.choice(["", "x", token])

    makers = [word, word, lambda: " " + word(), lambda: rng.choice(SPACES) * rng.choice([1, 1, 2, 3, 7]),
              lambda: "".join(rng.choice(DIGITS) for _ in range(rng.randint(1, 9))),
              lambda: "".join(rng.choice(PUNCTUATION) for _ in range(rng.randint(1, 6))), lambda: rng.choice(EMOJI),
              lambda: word()[:1] + "".join(rng.choice(MARKS) for _ in range(rng.randint(1, 6))), lambda: rng.choice(CODE), marker,
              lambda: chr(rng.randint(0, 0x1F)), lambda: chr(rng.choice([0x7F, 0x80, 0x9F, 0xAD, 0x200D, 0xFFFD, 0xFFFE, 0x10FFFF])),
              lambda: chr(rng.choice([rng.randint(1, 0xD7FF), rng.randint(0xE000, 0x1FFFF), rng.randint(0x20000, 0x10FFFF)])),
              lambda: rng.choice("aA .\n0中") * rng.randint(1, 300)]
    out = [""]
    while len(out) < count:
        out.append("".join(rng.choice(makers)() for _ in range(rng.choice([1, 2, 3, 8, 30]))))
    return out


def every_code_point(planes):
    """Each code point between letters, after a space, doubled, before a digit."""
    out = []
    for plane in planes:
        for start in range(plane << 16, (plane + 1) << 16, 64):
            chunk = [chr(c) for c in range(start, start + 64) if not 0xD800 <= c < 0xE000]
            if chunk:
                out.append("".join(f"x{c}y {c}{c}1" for c in chunk))
                out.append("".join(chunk))
    return out


def long_runs(size):
    return [unit * (size // len(unit)) for unit in ("a", " ", "\n", "中", "é", "7", "!", "😀", "ab ", "\t", "\u0301", "\x01")]


def project_sources(root):
    out = []
    for folder in ("src", "apps", "tests", "tools", "docs"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cpp", ".py", ".md", ".txt") and path.stat().st_size < 200000:
                out.append(path.read_text(encoding="utf-8"))
    return out


def corpus(folder, bytes_per_file):
    """The first documents of every file of a corpus of zstd-compressed JSON lines."""
    files = sorted(pathlib.Path(folder).glob("*.jsonl.zst"))
    if files and shutil.which("zstd") is None:
        sys.exit("oracle: the corpus needs the program 'zstd'; install it")
    out = []
    for path in files:
        with subprocess.Popen(["zstd", "-dc", "--long=27", str(path)], stdout=subprocess.PIPE) as stream:
            taken = 0
            for i, line in enumerate(stream.stdout):
                if i % 7 != 0:  # spread over sources
                    continue
                text = json.loads(line)["text"]
                out.append(text)
                taken += len(text.encode())
                if taken > bytes_per_file:
                    break
            stream.kill()
    return out
