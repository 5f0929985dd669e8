"""Rebuilds a training corpus for the pocket model from Debian package names.

For every chosen source: apt-get download, dpkg-deb -x (nothing is installed), text extraction, removal of paragraphs over 60 characters
that appeared before, and documents in <domain>.jsonl(.zst) with {source, doc, heldout, text}. manifest.json records package, version,
sha256 of the .deb, bytes taken and licence; each package's copyright file is copied beside it. Order of sources is fixed,
directory listings are sorted, no timestamps: same packages, same bytes. Six sources are SWORD modules and need mod2imp (libsword-utils).
Command: rebuild_corpus.py OUT_DIR [--only SOURCE ...] [--cache DIR] [--expect manifest.json]
"""

import argparse
import fnmatch
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import zlib

from licences import LICENCES

# source: (domain, extractor, glob patterns below the unpacked package, largest number of text bytes)
MB = 1_000_000
HELP = "usr/share/libreoffice/help/{}/text/*.html"
RUST_BOOKS = ("book", "nomicon", "reference", "rust-by-example")
CLDR_LOCALES = ("ar", "de", "es", "fr", "hi", "ja", "ko", "pl")
SOURCES = {
    "austen": ("prose", "rdb", ["usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"], 5 * MB),
    "bible-web": ("prose", "bible", [], 5 * MB), "spurgeon": ("prose", "sword", [], 6 * MB),
    "mhcc": ("prose", "sword", [], 4 * MB), "scofield": ("prose", "sword", [], 2 * MB),
    "wn": ("encyc", "dict", ["usr/share/dictd/wn.dict.dz"], 6 * MB), "naves": ("encyc", "sword", [], 2 * MB),
    "jargon": ("encyc", "dict", ["usr/share/dictd/jargon.dict.dz"], 2 * MB),
    "devil": ("encyc", "dict", ["usr/share/dictd/devil*.dict.dz"], 1 * MB),
    "python-doc": ("docs", "text", ["usr/share/doc/python3*/html/_sources/*.txt"], 8 * MB),
    "postgres": ("docs", "html", ["usr/share/doc/postgresql-doc-*/html/*.html"], 8 * MB),
    "sqlite": ("docs", "html", ["usr/share/doc/sqlite3/*.html"], 5 * MB),
    "git_cxx_boost-doc": ("docs", "html", ["usr/share/doc/libboost*-doc/doc/html/*.html"], 4 * MB),
    "rust-book": ("docs", "html", [f"usr/share/doc/rust-doc/html/{d}/*.html" for d in RUST_BOOKS], 3 * MB),
    "cmake-doc": ("docs", "text", ["usr/share/doc/cmake-data/html/_sources/*.txt"], 3 * MB),
    "apache-en": ("docs", "html", ["usr/share/doc/apache2-doc/manual/en/*.html"], 3 * MB),
    "bible-es": ("multi", "bible", [], 4 * MB),
    **{f"libreoffice-{tag.lower()}": ("multi", "html", [HELP.format(tag)], 1_400_000)
       for tag in ("de", "fr", "es", "it", "pt-BR", "ru", "ja", "zh-CN", "ko", "pl", "hi")},
    "boost-hpp": ("code", "text", ["usr/include/boost/*.hpp"], 8 * MB), "go-src": ("code", "text", ["usr/share/go-*/src/*.go"], 8 * MB),
    "python-std": ("code", "text", ["usr/lib/python3*/*.py"], 6 * MB),
    "cldr-xml": ("struct", "text", [f"usr/share/unicode/cldr/common/main/{t}.xml" for t in CLDR_LOCALES], 5 * MB),
    "tzdata": ("struct", "text", ["usr/share/zoneinfo/*.tab", "usr/share/zoneinfo/tzdata.zi"], 1 * MB),
    "ucd": ("struct", "text", ["usr/share/unicode/*.txt"], 3 * MB),
}
LARGEST_FILE = 800_000  # bytes; larger plain files are generated tables that would fill a source's share
CHUNK = {"dict": 8_000, "sword": 20_000, "bible": 23_000}
BLOCKS = set("p div li ul ol dl dt dd h1 h2 h3 h4 h5 h6 tr td th table section article header footer nav blockquote br hr body".split())


class TextOfHtml(html.parser.HTMLParser):
    """Text of a page: blocks become paragraphs, <pre> keeps its lines, scripts and styles go."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.skip, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "style", "head"):
            self.skip += 1
        elif tag == "pre":
            self.pre += 1
            self.out.append("\n\n")
        elif tag in BLOCKS and not self.pre:
            self.out.append("\n\n")

    def handle_endtag(self, tag):
        if tag in ("script", "style", "head"):
            self.skip = max(0, self.skip - 1)
        elif tag == "pre":
            self.pre = max(0, self.pre - 1)
            self.out.append("\n\n")
        elif tag in BLOCKS and not self.pre:
            self.out.append("\n\n")

    def handle_data(self, data):
        if not self.skip:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self):
        lines = [line.strip(" ") if not line.startswith("  ") else line.rstrip() for line in "".join(self.out).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def read_text(path):
    data = path.read_bytes()
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")


def chunks(entries, limit, separator="\n\n"):
    """Joins entries into documents of about `limit` bytes."""
    group, size = [], 0
    for entry in entries:
        group.append(entry)
        size += len(entry.encode())
        if size >= limit:
            yield separator.join(group)
            group, size = [], 0
    if group:
        yield separator.join(group)


def strings_of_rdb(data):
    """Long character vectors of an R lazy-load file as lists of str.

    The file is a row of (u32 big-endian plain size, zlib stream); each stream is one R object in XDR serialisation.
    """
    at = 0
    while at + 4 < len(data):
        inflater = zlib.decompressobj()
        raw = inflater.decompress(data[at + 4:])
        at = len(data) - len(inflater.unused_data)
        for match in re.finditer(rb"\x00\x00\x00\x10", raw[:200]):
            count = struct.unpack_from(">I", raw, match.end())[0]
            place, lines = match.end() + 4, []
            while len(lines) < count and place + 8 <= len(raw) and raw[place + 3] == 9:
                length = max(struct.unpack_from(">i", raw, place + 4)[0], 0)
                lines.append(raw[place + 8:place + 8 + length].decode("utf-8", errors="replace"))
                place += 8 + length
            if count > 100 and len(lines) == count:
                yield lines
                break


def novels(data):
    """(document name, text) per chapter of each novel, in the order of the titles."""
    books = {}
    for lines in strings_of_rdb(data):
        title = next((l for l in lines if l.strip()), "book")
        name = "".join(c for c in title.lower().replace(" and ", "") if c.isalnum())
        books.setdefault(name, "\n".join(lines))
    for name in sorted(books):
        parts = re.split(r"(?im)^(?=(?:chapter|volume) [ivxlc\d]+)", books[name])
        for i, part in enumerate(parts):
            yield f"austen_{name}.txt#{i}", re.sub(r"(?<!\n)\n(?!\n)", " ", part).strip()


def sword_entries(root, is_bible):
    """Entries of the package's SWORD module; a repeated body is kept once.

    Bible texts give bare verses (markup around words removed), commentaries and dictionaries the reference line and the body.
    """
    names = [m for conf in sorted(root.glob("usr/share/sword/mods.d/*.conf")) for m in re.findall(r"^\[(\w+)\]", read_text(conf), re.M)]
    if not names:
        raise SystemExit("rebuild_corpus: no SWORD module in the package, expected usr/share/sword/mods.d/*.conf")
    module = names[0]
    tool = shutil.which("mod2imp")
    if tool is None:
        raise SystemExit(f"rebuild_corpus: module {module}: mod2imp not found; install libsword-utils or leave the source out with --only")
    env = {"SWORD_PATH": str(root / "usr/share/sword"), "LANG": "C.UTF-8"}
    done = subprocess.run([tool, module], env=env, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise SystemExit(f"rebuild_corpus: module {module}: mod2imp failed: {done.stderr.decode(errors='replace').strip()[:200]}")
    seen = set()
    for entry in done.stdout.decode("utf-8", errors="replace").split("$$$")[1:]:
        head, _, body = entry.partition("\n")
        body = re.sub(r"<[^>]+>", "" if is_bible else " ", body)
        body = re.sub(r"[ \t]+", " ", body).strip()
        if body and body not in seen:
            seen.add(body)
            yield body.replace("\n", " ") if is_bible else f"{head.strip()}\n{body}"


def extract(source, root, package):
    """Yields (document name, text) of one unpacked package."""
    _, kind, patterns, _ = SOURCES[source]
    if kind in ("sword", "bible"):
        for i, text in enumerate(chunks(sword_entries(root, kind == "bible"), CHUNK[kind], "\n" if kind == "bible" else "\n\n")):
            yield f"{package}#{i}", text
        return
    names = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    for pattern in patterns:
        for name in (n for n in names if fnmatch.fnmatch(n, pattern)):
            path = root / name
            if kind == "dict":
                stem = path.name.split(".")[0]
                body = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
                # Headwords stand in column 0; a file without blank lines is cut before them.
                entries = body.split("\n\n") if body.count("\n\n") * 2000 > len(body) else re.split(r"\n(?=\S)", body)
                for i, text in enumerate(chunks(entries, CHUNK["dict"])):
                    yield f"dict_{stem}.txt#{i}", text
            elif kind == "rdb":
                yield from novels(path.read_bytes())
            elif kind == "html":
                parser = TextOfHtml()
                parser.feed(read_text(path))
                yield f"{package}/{name}", parser.text()
            elif path.stat().st_size <= LARGEST_FILE:
                yield f"{package}/{name}", read_text(path)


def deduplicate(text, seen):
    """Drops paragraphs over 60 characters that appeared anywhere before; adds the rest to seen."""
    kept = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) > 60:
            key = hashlib.sha256(paragraph.strip().encode()).digest()[:12]
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept).strip()


def fetch(package, cache):
    """(deb path, version, sha256) of a package, downloaded unless the cache has it."""
    found = sorted(cache.glob(f"{package}_*.deb"))
    if not found:
        done = subprocess.run(["apt-get", "download", package], cwd=cache, capture_output=True, text=True, check=False)
        found = sorted(cache.glob(f"{package}_*.deb"))
        if done.returncode or not found:
            raise SystemExit(f"rebuild_corpus: package {package}: apt-get download failed: {done.stderr.strip()[:200]}; try apt-get update")
    version = subprocess.run(["dpkg-deb", "-f", found[-1], "Version"], capture_output=True, text=True, check=True).stdout.strip()
    return found[-1], version, hashlib.sha256(found[-1].read_bytes()).hexdigest()


def check_expected(path, manifest):
    """Stops when a package differs from an earlier manifest: a changed package makes another corpus."""
    wanted = {entry["package"]: entry["sha256"] for entry in json.loads(pathlib.Path(path).read_text())["packages"]}
    for entry in manifest:
        if wanted.get(entry["package"], entry["sha256"]) != entry["sha256"]:
            raise SystemExit(f"rebuild_corpus: {entry['package']}: expected sha256 {wanted[entry['package']]}, found {entry['sha256']} "
                             f"(version {entry['version']}); drop --expect to build a new corpus")


def open_output(path):
    """Compressed when the zstandard module is there, plain otherwise."""
    try:
        import zstandard
    except ImportError:
        return open(path, "wb")
    params = zstandard.ZstdCompressionParameters.from_level(19, enable_ldm=True, window_log=27)
    return zstandard.ZstdCompressor(compression_params=params).stream_writer(open(f"{path}.zst", "wb"), closefd=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir")
    parser.add_argument("--only", nargs="+", choices=sorted(SOURCES), metavar="SOURCE", help="some sources only")
    parser.add_argument("--cache", help="folder of .deb files (default OUT_DIR/deb)")
    parser.add_argument("--expect", help="manifest.json of an earlier build; other package bytes are refused")
    args = parser.parse_args()
    out_dir = pathlib.Path(args.out_dir)
    cache = pathlib.Path(args.cache or out_dir / "deb").resolve()
    for folder in (out_dir, cache, out_dir / "copyright"):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in SOURCES if not args.only or s in args.only]
    manifest, seen, outputs = [], set(), {}
    for source in chosen:
        domain, _, _, limit = SOURCES[source]
        package, licence = LICENCES[source]
        deb, version, digest = fetch(package, cache)
        manifest.append({"source": source, "package": package, "version": version, "sha256": digest, "licence": licence})
        if args.expect:
            check_expected(args.expect, manifest[-1:])
        root = out_dir / "unpacked"
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        notice = root / "usr/share/doc" / package / "copyright"
        if notice.is_file():
            shutil.copyfile(notice, out_dir / "copyright" / package)
        if domain not in outputs:
            outputs[domain] = open_output(out_dir / f"{domain}.jsonl")
        documents = taken = 0
        for doc, text in extract(source, root, package):
            text = deduplicate(text, seen)
            if len(text) < 40:
                continue
            if taken >= limit:
                break
            held = int(hashlib.sha256((source + doc).encode()).hexdigest()[:8], 16) % 50 == 0
            record = {"source": source, "doc": doc, "heldout": int(held), "text": text}
            outputs[domain].write((json.dumps(record, ensure_ascii=False) + "\n").encode())
            documents, taken = documents + 1, taken + len(text.encode())
        shutil.rmtree(root)
        if not documents:
            raise SystemExit(f"rebuild_corpus: {source}: package {package} {version} gave no documents, expected files {SOURCES[source][2]}")
        manifest[-1].update(documents=documents, bytes=taken)
        print(f"{domain} {source}: {package} {version}: {documents} documents, {taken} bytes", file=sys.stderr)
    for handle in outputs.values():
        handle.close()
    (out_dir / "manifest.json").write_text(json.dumps({"packages": manifest}, indent=1) + "\n")


if __name__ == "__main__":
    main()
