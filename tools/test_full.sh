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
say "damaged packs before the sanitized program"
ESPALIER_BIN="$PWD/build/asan/espalier" ESPALIER_MAKER="$PWD/build/release/espalier" ESPALIER_SOURCE_DIR="$PWD" \
  /usr/bin/python3 tests/e2e/packs_test.py Damage Conversion Making.test_plans_that_do_not_fit Making.test_inputs_that_are_not_those_of_the_run

say "the openai client against a real server"
"$oracle" -m pip install -q --disable-pip-version-check openai==1.109.1
"$oracle" tests/oracle/openai_client_test.py --espalier build/release/espalier

say "the pocket model with its whole calibration set and panel, one and two threads"
ESPALIER_POCKET_FULL=1 ESPALIER_BIN="$PWD/build/release/espalier" ESPALIER_SOURCE_DIR="$PWD" /usr/bin/python3 tests/e2e/quantize_pocket_test.py

say "fuzzing, $fuzz_seconds s a target"
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
bash tools/fuzz_long.sh build/fuzz "$fuzz_seconds" build/fuzz-logs
