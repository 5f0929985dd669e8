"""Tokenizer against PyPI `tokenizers`: ids, texts and Engram classes must be equal, item by item, in both directions.

Command: text_oracle.py --espalier build/release/espalier [--full] [--corpus FOLDER]
"""

import argparse
import pathlib
import random
import sys
import tempfile
import time

import oracle_common
import text_corpus
from tokenizers import Regex, normalizers

ROOT = pathlib.Path(__file__).resolve().parents[2]

# serving.md 3.4 (V4.1): text and ids.
VECTORS = [
    ("Hello, world!", [19923, 14, 2058, 3]), ("I don't think it's CAN'T", [43, 2090, 1664, 2118, 436, 734, 36837, 67322]),
    ("1234567", [6895, 18009, 25]), ("10000", [1457, 504]), ("x1234y", [90, 6895, 22, 91]), ("٢٠٢٤", [76647, 82025, 76647, 152, 100]),
    ("½ Ⅷ ⅓", [23951, 223, 23603, 103, 223, 23603, 244]), ("中文mixed英文", [21134, 122545, 21207]),
    ("日本語のテスト", [88768, 1576, 109288]), ("ｶﾀｶﾅ", [5879, 117, 55241, 225, 5879, 117, 55241, 230]),
    ("한국어 텍스트", [5634, 17564, 9227, 61291, 238, 45652]), (".foo bar-baz", [4658, 6379, 4758, 1761, 1521]),
    ("!!!\n\nx", [47868, 90]), ("  leading", [223, 6646]), ("trailing   ", [19660, 7400, 361]), ("a \n\n b", [67, 1004, 291]),
    ("\r\n\r\n", [204, 201, 204, 201]), ("   \n\n  ", [92687, 262]), ("  1", [262, 19]), ("\u3000\u3000", [36759]),
    ("e\u0301", [71, 17793]), ("👨‍👩‍👧", [25730, 104, 46088, 25730, 105, 46088, 25730, 103]), ("x\u0000y", [90, 191, 91]),
    ("\ufeffbom", [15251, 68, 316]), ("a<｜User｜>b", [67, 128803, 68]), ("<dsml:x", [128840, 90]),
    ("<｜place▁holder▁no▁799｜>", [30, 28217, 4205, 5487, 226, 14646, 5487, 226, 3567, 5487, 226, 28002, 28217, 32]),
    ("<｜DSML｜ invoke name=\"f\">\n", [30, 128825, 34756, 2329, 1281, 72, 3816]),
    ("\n</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜>", [201, 1718, 128825, 34756, 1018, 1718, 128825, 10699, 32, 1])]
# With markers as ordinary text.
PLAIN_VECTORS = [("｜DSML｜", [28217, 10525, 7398, 28217])]


def engram_classes(tokenizer):
    """model.md 7.1, with the reference's own normalisers."""
    steps = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), "\ue000"), normalizers.Strip(),
        normalizers.Replace("\ue000", " ")])
    classes, out = {}, []
    for i in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = tokenizer.id_to_token(i) if "\ufffd" in text else steps.normalize_str(text) or text
        out.append(classes.setdefault(key, len(classes)))
    return out


def compare(program, name, path, texts, seed, n_sequences):
    reference = oracle_common.load(path)
    started = time.time()
    want = [e.ids for e in reference.encode_batch(texts, add_special_tokens=False)]
    got = program.run_lines("tokenize", path, texts)["ids"]
    oracle_common.report_first(f"{name}: encode", texts, want, got)
    rng = random.Random(seed)
    n_tokens = reference.get_vocab_size(with_added_tokens=True)
    ids = want + [[rng.randrange(n_tokens) for _ in range(rng.randint(0, 40))] for _ in range(n_sequences)] + [[i] for i in range(n_tokens)]
    for flags, skip in (((), False), (("--skip-special",), True)):
        oracle_common.report_first(f"{name}: decode, skip_special={skip}", ids, reference.decode_batch(ids, skip_special_tokens=skip),
                                   program.run_lines("detokenize", path, ids, *flags)["text"])
    classes = engram_classes(reference)
    oracle_common.report_first(f"{name}: Engram classes", [reference.id_to_token(i) for i in range(n_tokens)], classes,
                               program.run("tokenize", path, "--engram-map")["class_of"])
    n_bytes = sum(len(t.encode()) for t in texts)
    print(f"{name}: {len(texts)} texts, {n_bytes / 1e6:.1f} MB, {sum(map(len, want))} ids, {len(ids)} id sequences, "
          f"{max(classes) + 1} Engram classes: equal ({time.time() - started:.1f} s)", flush=True)
    return max(classes) + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--espalier", required=True)
    parser.add_argument("--corpus", default=str(ROOT.parent / "shared" / "corpus"))
    parser.add_argument("--full", action="store_true", help="all planes, longer runs, more text")
    args = parser.parse_args()
    program = oracle_common.Program(args.espalier)
    with tempfile.TemporaryDirectory() as folder:
        v41 = oracle_common.v41_tokenizer(folder)
        texts = [text for text, _ in VECTORS]
        oracle_common.report_first("recorded vectors", texts, [ids for _, ids in VECTORS], program.run_lines("tokenize", v41, texts)["ids"])
        texts = [text for text, _ in PLAIN_VECTORS]
        oracle_common.report_first("recorded vectors, plain", texts, [ids for _, ids in PLAIN_VECTORS],
                                   program.run_lines("tokenize", v41, texts, "--plain")["ids"])

        added = [t.content for t in oracle_common.load(v41).get_added_tokens_decoder().values()]
        texts = text_corpus.seeded(40000 if args.full else 5000, added)
        texts += text_corpus.every_code_point(range(17) if args.full else (0, 1, 2, 3, 14))
        texts += text_corpus.long_runs(1000000 if args.full else 50000)
        texts += text_corpus.project_sources(ROOT)
        if pathlib.Path(args.corpus).is_dir():
            texts += text_corpus.corpus(args.corpus, 5000000 if args.full else 300000)
        else:
            print(f"no corpus at {args.corpus}: project sources and seeded texts only")
        n_classes = compare(program, "DeepSeek V4", oracle_common.released_tokenizer(), texts, 1, 5000)
        if n_classes != 99092:
            sys.exit(f"oracle: DeepSeek V4: expected 99092 Engram classes, found {n_classes}")
        compare(program, "DeepSeek V4.1", v41, texts[:6000], 2, 2000)
        for name, path in (("golden tiny-a", ROOT / "tests/golden/model/tiny-a/tokenizer.json"),
                           ("pocket", ROOT / "models/pocket/tokenizer.json")):
            if path.is_file():
                compare(program, name, path, texts if args.full else texts[::3], 3, 2000)
            else:
                sys.exit(f"oracle: {path}: expected the tokenizer of {name}, found nothing")


if __name__ == "__main__":
    main()
