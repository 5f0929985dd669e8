#!/usr/bin/env bash
# The long forms of ./test --full; each ends with its own verdict, the first failure stops. Argument: oracle interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh
oracle=$1
fuzz_seconds=${FUZZ_SECONDS:-600}

need_packages clang libclang-rt-14-dev

say "sanitizers: address, undefined behaviour"
cmake --preset asan -DESPALIER_ORACLE_PYTHON="$oracle" >/dev/null
cmake --build --preset asan
ctest --preset asan -j "$(nproc)" -LE 'e2e|pocket'

say "fuzzing, $fuzz_seconds s a target"
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
bash tools/fuzz_long.sh build/fuzz "$fuzz_seconds" build/fuzz-logs
