#!/usr/bin/env bash
# Runs every test of the GPU test program and prints a compact summary. From the root of the repository:
#
#   tests/gpu/run_all.sh [PROGRAM] [SECONDS_PER_TEST] [SECONDS_IN_ALL]
#
# PROGRAM is test_gpu (default: build/cuda/tests/gpu/test_gpu); a folder `lib` beside it is searched for shared libraries, so the program
# can be brought to a machine that lacks them. A test that crashes, hangs past its time or loses the device ends its process only: the
# tests after it run in a new one. The suites of the network's operations come first. Exit code: 0 when everything that ran passed, 1 when
# something failed or did not run, 77 without a GPU.
set -u
program=${1:-build/cuda/tests/gpu/test_gpu}
per_test=${2:-60}
in_all=${3:-600}
here=$(cd "$(dirname "$program")" && pwd)
[ -d "$here/lib" ] && export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
log=${OUT:-$(mktemp -d)}/gpu_tests.log
: >"$log"
start=$(date +%s)

"$program" --gtest_filter=-* >>"$log" 2>&1
first=$?
if [ $first -eq 77 ] || [ $first -ge 126 ]; then tail -n 3 "$log"; exit $first; fi
head -n 1 "$log"
mapfile -t all < <("$program" --gtest_list_tests 2>/dev/null | awk '/^[^ ].*\.$/ {suite = $1} /^  / {print suite $1}')
mapfile -t left < <(
  for suites in '^OpsCuda' '^(RowsProduct|ExpertRows)' '^NetworkCuda'; do printf '%s\n' "${all[@]}" | grep -E "$suites"; done
  printf '%s\n' "${all[@]}" | grep -vE '^(OpsCuda|RowsProduct|ExpertRows|NetworkCuda)'
)

passed=0 skipped=0
failures=()
while [ ${#left[@]} -gt 0 ]; do
  spent=$(($(date +%s) - start))
  if [ $spent -ge "$in_all" ]; then break; fi
  # One process for the whole rest of a suite.
  suite=${left[0]%%.*}
  batch=() rest=()
  for t in "${left[@]}"; do if [ "${t%%.*}" = "$suite" ]; then batch+=("$t"); else rest+=("$t"); fi; done
  limit=$((per_test * ${#batch[@]}))
  [ $limit -gt $((in_all - spent)) ] && limit=$((in_all - spent))
  part=$(mktemp)
  filter=$(IFS=:; echo "${batch[*]}")
  # The watchdog looks at the test that runs, not at the batch.
  "$program" --gtest_filter="$filter" --gtest_color=no >"$part" 2>&1 &
  pid=$!
  current="" since=$(date +%s) ended=""
  while kill -0 $pid 2>/dev/null; do
    sleep 0.2
    now=$(date +%s) name=$(grep '^\[ RUN ' "$part" | tail -n 1)
    if [ "$name" != "$current" ]; then current=$name since=$now; fi
    if [ $((now - since)) -ge "$per_test" ] || [ $((now - start)) -ge "$in_all" ]; then kill -9 $pid 2>/dev/null; ended="took too long"; fi
  done
  wait $pid 2>/dev/null
  code=$?
  cat "$part" >>"$log"
  again=()
  for t in "${batch[@]}"; do
    if grep -qF "[       OK ] $t (" "$part"; then passed=$((passed + 1))
    elif grep -qF "[  SKIPPED ] $t (" "$part"; then skipped=$((skipped + 1))
    elif grep -qF "[  FAILED  ] $t (" "$part" || grep -qF "[  FAILED  ] $t, " "$part"; then
      failures+=("$t")
      echo "--- FAILED $t"
      sed -n "/^\[ RUN      \] ${t//./\\.}\$/,/^\[  FAILED  \] ${t//./\\.}/p" "$part" | sed 1d | grep -vE '^Stack trace' | cut -c1-420 | head -n 14
    elif grep -qxF "[ RUN      ] $t" "$part"; then
      failures+=("$t")
      echo "--- ${ended:-ended with code $code in} $t"
      sed -n "/^\[ RUN      \] ${t//./\\.}\$/,\$p" "$part" | sed 1d | cut -c1-420 | tail -n 10
    else again+=("$t"); fi
  done
  rm -f "$part"
  left=("${again[@]}" "${rest[@]}")
  if [ ${#again[@]} -eq ${#batch[@]} ]; then  # nothing started at all: do not try for ever
    failures+=("${again[0]}")
    echo "--- did not start: ${again[0]} (code $code)"
    left=("${again[@]:1}" "${rest[@]}")
  fi
done
echo "passed $passed, failed ${#failures[@]}, skipped $skipped, not run ${#left[@]}, $(($(date +%s) - start)) s; all output: $log"
[ ${#failures[@]} -gt 0 ] && printf 'FAILED %s\n' "${failures[@]}"
[ ${#left[@]} -gt 0 ] && printf 'NOT RUN %s\n' "${left[@]}"
[ ${#failures[@]} -eq 0 ] && [ ${#left[@]} -eq 0 ]
