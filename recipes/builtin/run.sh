#!/bin/sh
# Prepare, train and evaluate edit-7m: sh run.sh DATA WORK [more arguments of train.py]
# DATA has corpora/, WORK is a scratch folder.
set -e
here=$(cd "$(dirname "$0")" && pwd)
data=$(cd "$1" && pwd)
mkdir -p "$2"
work=$(cd "$2" && pwd)
shift 2
[ -f "$work/data/edits.npz" ] || python "$here/prepare.py" --corpora "$data/corpora" --out "$work/data"
python "$here/train.py" --config "$here/edit-7m.toml" --data "$work/data" --out "$work/edit-7m" \
    --tokens 4e6 "$@"
cd "$here/../.."
python -m benchmarks.edits "$data" -m "$work/edit-7m" --dtype float32 --runs 1 -o "$work"
