#!/bin/sh
# Final piece of the run on a GPU machine: native fine-tune, drafter, export, evaluation.
# train_finish.sh FINE_STEPS DRAFTER_SECONDS; reads .pocket/start.xz, writes shards, log.jsonl and eval.json to $OUT.
here=$(cd "$(dirname "$0")" && pwd)
run=${RUN_DIR:-/var/tmp/pocket-run}
mkdir -p "$run/out" "$run/model"
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$run/inductor" TOKENIZERS_PARALLELISM=false
cd "$here"
tokenizer=../../models/pocket/tokenizer.json
python3 tokenize_corpus.py ../../.pocket/text.xz $tokenizer "$run/tok" --jobs 16 | tail -1 | cut -c1-200
common="--data $run/tok --tokenizer $tokenizer --out $run/out"
python3 train_final.py --start ../../.pocket/start.xz $common --log final --total-steps "$1" --native-from 0 --decay-from 0 \
  --warmup 30 --dense-steps 0 --lr 1e-3 --eval-every 200 || exit 1
cp "$run"/out/backbone* "$OUT"; cp "$run/out/final.jsonl" "$OUT/log.jsonl"
python3 drafter_train.py --backbone "$run/out/backbone" $common --steps 6000 --seconds "$2" || exit 1
cp "$run"/out/drafter-* "$run/out/drafter.json" "$OUT"; cat "$run/out/drafter.jsonl" >> "$OUT/log.jsonl"
python3 export.py --backbone "$run/out/backbone" --drafter "$run/out/drafter" --out "$run/model" || exit 1
cp $tokenizer "$run/model"
python3 report_eval.py --model "$run/model" --sources ../../models/pocket --data "$run/tok" --length 1024 --out "$OUT/eval.json"
