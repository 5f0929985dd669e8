"""The include test must fail when an arrow is turned around: puts one wrong include of each kind into a copy and looks."""
import pathlib
import shutil
import subprocess
import sys
import tempfile

CASES = [
    ("src/base/status.h", '#include "format/json.h"'),
    ("src/format/json.cpp", '#include "model/config.h"'),
    ("src/tensor/view.h", "#include <nlohmann/json.hpp>"),
    ("src/base/log.cpp", "#include <cuda_runtime.h>"),
    ("src/device/stream.h", "#include <cuda_runtime.h>"),
    ("src/device/stream.cu", '#include "codec/trellis.h"'),
    ("src/base/log.cpp", '#include "tests/unit/x.h"'),
    ("src/base/log.cpp", '#include "apps/espalier/command.h"'),
    ("src/stages/eval/eval.cpp", '#include "stages/quantize/quantize.h"'),
]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    checker = root / "tests/architecture/include_direction.py"
    with tempfile.TemporaryDirectory() as tmp:
        copy = pathlib.Path(tmp)
        for folder in ("src", "apps", "bench"):
            shutil.copytree(root / folder, copy / folder)
        for name, line in CASES:
            path = copy / name
            original = path.read_text()
            path.write_text(original + "\n" + line + "\n")
            result = subprocess.run([sys.executable, checker, copy], capture_output=True, text=True)
            path.write_text(original)
            if result.returncode == 0 or name not in result.stdout:
                print(f"not noticed: {line} in {name}\n{result.stdout}")
                return 1
    print(f"{len(CASES)} wrong includes were noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
