#!/bin/sh
# One timed piece of the training run on a GPU machine: train_call.sh SECONDS TOTAL_STEPS [train.py arguments]
# Tokenises once per machine, keeps the exact checkpoint in $RUN_DIR, writes logs and compact shards to $OUT.
set -e
seconds=$1; total=$2; shift 2
here=$(cd "$(dirname "$0")" && pwd)
run=${RUN_DIR:-/var/tmp/pocket-run}
mkdir -p "$run"
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$run/inductor" TOKENIZERS_PARALLELISM=false
cd "$here"
[ -f "$run/tok/dev_bytes.json" ] || python3 tokenize_corpus.py ../../.pocket/text.xz ../../models/pocket/tokenizer.json "$run/tok" --jobs 16 | tail -3
stem=""
[ -f ../../.pocket/backbone.json ] && stem=../../.pocket/backbone
python3 train.py --data "$run/tok" --tokenizer ../../models/pocket/tokenizer.json --out "$OUT" --exact "$run/exact.pt" \
  --resume "$stem" --cache ../../.pocket/cache.bin --total-steps "$total" --seconds "$seconds" "$@"
