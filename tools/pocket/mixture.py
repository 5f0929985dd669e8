"""Mixture weights of the training text and the deterministic order of training rows.

A row is train[start : start + row_len] of one source, with its first token replaced by BOS. schedule() gives the starts; it is a
pure function of (meta, n_rows, row_len, seed), so a resumed run continues at row k of the same schedule. numpy only.
"""

import numpy as np

# Percent of training tokens per source. Dialogues and narrative prose are raised, Bible and commentary are capped,
# repetitive code and tables are lowered. Sources by domain: prose, encyc, docs, multi, code, struct, dialogue.
WEIGHTS = {
    "austen": 6.0, "bible-web": 3.0, "spurgeon": 3.0, "mhcc": 2.5,
    "wn": 6.0, "jargon": 2.7, "naves": 0.8,
    "python-doc": 6.0, "postgres": 4.5, "sqlite": 3.5, "rust-book": 2.5, "git_cxx_boost-doc": 2.0, "cmake-doc": 2.0,
    "bible-es": 1.2, "libreoffice-de": 1.35, "libreoffice-fr": 1.35, "libreoffice-es": 1.35, "libreoffice-pt-br": 1.35,
    "libreoffice-ru": 1.35, "libreoffice-ja": 1.35, "libreoffice-zh-cn": 1.35, "libreoffice-ko": 1.35,
    "libreoffice-pl": 1.35, "libreoffice-hi": 1.35,
    "boost-hpp": 3.5, "go-src": 4.0, "python-std": 5.0,
    "cldr-xml": 2.2, "ucd": 2.1,
    "dialogue": 24.0,
}


def epoch_starts(begin, end, doc_starts, row_len, shift):
    """Row starts of one pass over [begin, end); a start moves back to a document start in the last quarter row.

    doc_starts: sorted int64 document starts inside the source. shift: first start, 0 <= shift < row_len.
    """
    out, at = [], begin + shift
    while at + row_len <= end:
        out.append(at)
        following = at + row_len
        i = int(np.searchsorted(doc_starts, following, side="right")) - 1
        if i >= 0 and doc_starts[i] > following - row_len // 4:
            following = int(doc_starts[i])
        at = following
    return out


def schedule(meta, n_rows, row_len=1024, seed=0):
    """int64 [n_rows] of row starts in train.npy.

    meta: dict from meta.json of tokenize_corpus.py. Sources are mixed evenly by WEIGHTS; inside a source rows are shuffled and
    every pass shifts the cuts. Raises ValueError when a source of meta has no weight or is shorter than two rows.
    """
    rng = np.random.default_rng(seed)
    all_docs = np.asarray(meta["doc_starts"], dtype=np.int64)
    total = sum(WEIGHTS[s["name"]] for s in meta["sources"] if s["name"] in WEIGHTS)
    starts, keys = [], []
    for entry in meta["sources"]:
        name, begin, end = entry["name"], entry["begin"], entry["end"]
        if name not in WEIGHTS:
            raise ValueError(f"mixture: source {name!r} has no weight")
        if end - begin < 2 * row_len:
            raise ValueError(f"mixture: source {name!r} has {end - begin} tokens, expected at least {2 * row_len}")
        want = int(np.ceil(n_rows * WEIGHTS[name] / total))
        docs = all_docs[np.searchsorted(all_docs, begin):np.searchsorted(all_docs, end)]
        rows, first = [], True
        while len(rows) < want:
            shift = 0 if first else int(rng.integers(0, row_len))
            part = np.array(epoch_starts(begin, end, docs, row_len, shift), dtype=np.int64)
            rng.shuffle(part)
            rows.extend(part.tolist())
            first = False
        starts.extend(rows[:want])
        keys.append((np.arange(want) + rng.random(want)) / want)
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.asarray(starts, dtype=np.int64)[order][:n_rows]
