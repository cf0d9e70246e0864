#!/bin/sh
# Prepare, train and evaluate edit-7m: sh run.sh CORPORA WORK [more arguments of train.py]
set -e
here=$(dirname "$0")
corpora=$1
work=$2
shift 2
[ -f "$work/data/edits.npz" ] || python "$here/prepare.py" --corpora "$corpora" --out "$work/data"
python "$here/train.py" --config "$here/edit-7m.toml" --data "$work/data" --out "$work/edit-7m" \
    --tokens 60e6 --hours 0.33 "$@"
python "$here/../../benchmarks/edit_model.py" --model "$work/edit-7m" --corpora "$corpora" \
    --data "$work/data" --out "$work/results.json"
