#!/usr/bin/env bash
# Runs every libFuzzer target for a while and keeps its log: fuzz_long.sh BUILD_DIR SECONDS LOG_DIR [TARGET…]
set -euo pipefail
build=$1 seconds=$2 logs=$3
shift 3
source_dir=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$logs"
build=$(cd "$build" && pwd)
logs=$(cd "$logs" && pwd)
status=0
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(find "$build" -name 'fuzz_*' -type f -perm -u+x -printf '%f\n' | sort)
for target in "${targets[@]}"; do
  name=${target#fuzz_}
  work=$(mktemp -d)
  seeds=()
  [ -d "$source_dir/tests/fuzz/corpus/$name" ] && seeds=("$source_dir/tests/fuzz/corpus/$name")
  program=$(find "$build" -name "$target" -type f -perm -u+x | head -1)
  if (cd "$work" && "$program" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -print_funcs=0 "$work" "${seeds[@]}") >"$logs/$name.log" 2>&1; then
    echo "$name: clean, $(grep -o 'number_of_executed_units: [0-9]*' "$logs/$name.log" | cut -d' ' -f2) inputs in $seconds s"
  else
    echo "$name: FAILED, see $logs/$name.log"
    status=1
  fi
  rm -rf "$work"
done
exit $status
