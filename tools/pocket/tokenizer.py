"""Trains the pocket model's tokenizer: byte-level BPE with DeepSeek's pre-tokenizer, 6144 ids in the released file layout.

ids 0/1/2 = BOS/EOS/PAD, 3..258 = the byte alphabet, then merges, then the chat tokens of V4.1 at the end with the flags
of the release. Trained on the training part of the corpus (weighted sample) and on training dialogues only.
Command: tokenizer.py PARTS_DIR MODEL_DIR   (PARTS_DIR from corpus.py); byte-identical output for the same input.
"""

import argparse
import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import dialogue
from dialogue_format import BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML

VOCAB_SIZE = 6144
SPECIAL = [BOS, EOS, PAD]

# Chat tokens in the order of the released ids. None is `special`; all are `normalized` but the image placeholder.
CHAT_TOKENS = [SYSTEM, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML, "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>",
               "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜deepseek_image｜>"]
NOT_NORMALIZED = {"<｜deepseek_image｜>"}

SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]

# Share of each source's training bytes that the trainer sees (1.0 = all); keeps lists and markup from taking merges.
SAMPLE = {"spurgeon": 0.4, "mhcc": 0.5, "bible-web": 0.6, "bible-es": 0.5, "naves": 0.3, "cldr-xml": 0.25, "ucd": 0.25,
          "go-src": 0.5, "boost-hpp": 0.5, "git_cxx_boost-doc": 0.5, "postgres": 0.7, "python-doc": 0.7, "sqlite": 0.7}
DIALOGUES = 12000


def pre_tokenizer():
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
    return pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def training_texts(parts_dir):
    """Training documents (a fixed share of each source, spread evenly) and the plain text of training dialogues."""
    credit = {}
    with open(pathlib.Path(parts_dir) / "train.jsonl", encoding="utf-8") as handle:
        for line in handle:
            record = json.loads(line)
            source = record["source"]
            credit[source] = credit.get(source, 0.0) + SAMPLE.get(source, 1.0)
            if credit[source] >= 1.0:
                credit[source] -= 1.0
                yield record["text"]
    for index in range(DIALOGUES):
        text = dialogue.conversation("train", index)["text"]
        for marker in SPECIAL + CHAT_TOKENS:
            text = text.replace(marker, "\x00")
        yield from (piece for piece in text.split("\x00") if piece)


def check_against(reference, own):
    """Raises ValueError where the file layout differs from a released tokenizer.json (vocabulary and merges aside)."""
    for key in ("version", "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if reference[key] != own[key]:
            raise ValueError(f"tokenizer.json: {key} differs: expected {reference[key]}, found {own[key]}")
    skip = ("vocab", "merges")
    left = {k: v for k, v in reference["model"].items() if k not in skip}
    right = {k: v for k, v in own["model"].items() if k not in skip and k in left}
    if left != right:
        raise ValueError(f"tokenizer.json: model differs: expected {left}, found {right}")
    order = lambda t: sorted(t["model"]["vocab"], key=t["model"]["vocab"].get)[:259]
    if order(reference) != order(own):
        raise ValueError("tokenizer.json: the first 259 vocabulary entries differ from the release")


def build(parts_dir):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Sequence([])
    tok.pre_tokenizer = pre_tokenizer()
    tok.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    tok.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(CHAT_TOKENS), special_tokens=SPECIAL,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(training_texts(parts_dir), trainer)
    tok.add_tokens([AddedToken(t, normalized=t not in NOT_NORMALIZED, special=False) for t in CHAT_TOKENS])
    return tok


def released_layout(tok):
    """The JSON document with merges as 'left right' strings, as in the release."""
    data = json.loads(tok.to_str())
    data["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    data["model"].pop("ignore_merges", None)
    return data


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts_dir")
    parser.add_argument("model_dir")
    parser.add_argument("--reference", help="a released tokenizer.json to compare the layout with")
    args = parser.parse_args()
    data = released_layout(build(args.parts_dir))
    if args.reference:
        check_against(json.load(open(args.reference, encoding="utf-8")), data)
    size = len(data["model"]["vocab"]) + len(CHAT_TOKENS)
    if size != VOCAB_SIZE:
        raise ValueError(f"vocabulary has {size} ids, expected {VOCAB_SIZE}: give more training text")
    model_dir = pathlib.Path(args.model_dir)
    (model_dir / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    config = {"add_bos_token": False, "add_eos_token": False, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": None,
              "clean_up_tokenization_spaces": False, "model_max_length": 4096, "tokenizer_class": "PreTrainedTokenizerFast"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{size} ids, {len(data['model']['merges'])} merges", file=sys.stderr)


if __name__ == "__main__":
    main()
