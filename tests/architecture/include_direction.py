"""The arrows of ARCHITECTURE.md, held by the build: fails with every offending include line.

Usage: include_direction.py SOURCE_DIR. Exit status 1 when a rule is broken, or when the rule table no longer covers a module.
"""
import pathlib
import re
import sys

# module -> modules it may include besides itself
ALLOWED = {
    "base": set(),
    "device": {"base"},
    "tensor": {"base"},
    "format": {"base", "tensor"},
    "ops": {"base", "device", "tensor"},
    "codec": {"base", "device", "tensor", "format", "ops"},
    "text": {"base", "format"},
    "model": {"base", "device", "tensor", "format", "ops", "codec", "text"},
    "stages": {"base", "device", "tensor", "format", "ops", "codec", "text", "model"},
    "runtime": {"base", "device", "tensor", "format", "ops", "codec", "text", "model"},
    "serve": {"base", "format", "text", "model", "runtime"},
}
# Stages meet in artefacts; the exceptions are the pack writer, which every stage that produces a model folder uses, and the
# files directly in src/stages, which put several stages together.
SHARED_STAGES = {"pack"}
# Headers of ours name no third-party type: these are the only exceptions, each a forward declaration or a SIMD-only header.
HEADER_THIRD_PARTY = {"nlohmann/json_fwd.hpp"}
STANDARD = re.compile(r"^[a-z_]+$|^(sys|netinet|arpa)/[a-z_]+\.h$|^(immintrin|unistd|fcntl|sched|errno|signal|stdint|string|pthread)\.h$")
CUDA = re.compile(r"^(cuda|cublas|nccl|cub/|thrust/|mma\.h)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def check_file(root, path, errors):
    relative = path.relative_to(root).as_posix()
    parts = relative.split("/")
    module = parts[1] if parts[0] == "src" else parts[0]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        kind, target = match.groups()
        where = f"{relative}:{number}: includes {target}"
        if target.startswith("tests/"):
            errors.append(f"{where}: nothing includes tests/")
        head = target.split("/")[0]
        if parts[0] == "src":
            if kind == '"' and head in ALLOWED:
                if head != module and head not in ALLOWED[module]:
                    errors.append(f"{where}: {module} may include {sorted(ALLOWED[module]) or 'nothing of ours'}")
                # Files directly in src/stages put stages together; a stage's own folder includes no other stage.
                if module == "stages" and head == "stages" and len(parts) > 3:
                    mine, theirs = parts[2], target.split("/")[1]
                    if mine != theirs and theirs not in SHARED_STAGES:
                        errors.append(f"{where}: stages meet in artefacts, not in each other's headers")
            elif kind == '"' and head in ("apps", "bench", "tools"):
                errors.append(f"{where}: libraries do not include {head}/")
            if CUDA.match(target) and not ("/cuda/" in relative or path.suffix in (".cu", ".cuh")):
                errors.append(f"{where}: CUDA headers belong to cuda/ folders, .cu and .cuh files")
            if path.suffix == ".h" and kind == "<" and not STANDARD.match(target) and target not in HEADER_THIRD_PARTY:
                if not CUDA.match(target):
                    errors.append(f"{where}: third-party headers belong to .cpp files")


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    errors = []
    modules = {p.name for p in (root / "src").iterdir() if p.is_dir()}
    for unknown in sorted(modules - set(ALLOWED)):
        errors.append(f"src/{unknown}: a new module needs a line in tests/architecture/include_direction.py and ARCHITECTURE.md")
    count = 0
    for folder in ("src", "apps", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
                check_file(root, path, errors)
                count += 1
    if count < 20:
        errors.append(f"only {count} source files found under {root}: wrong folder?")
    print("\n".join(errors) if errors else f"{count} files follow the arrows")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
