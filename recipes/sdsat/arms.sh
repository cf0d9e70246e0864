#!/bin/sh
# Train the arms of the paper's comparisons: sh arms.sh TEXTS RUNS. Give it again to go on.
# All arms see the same text in the same steps; the number in a name is L.
set -e
texts=$1
runs=$2

arm() {
    name=$1
    shift
    [ -f "$runs/$name/config.json" ] || draftsmith train sdsat -m edit-7m -o "$runs/$name" \
        --texts "$texts/code.jsonl" --prose "$texts/edits.jsonl" \
        --held-out "$texts/held_out_code.jsonl" --held-out "$texts/held_out_edits.jsonl" \
        --share-of replaced --steps 100 --rows 4 --rows-per-pass 4 --length 512 \
        --learning-rate 5e-6 --final-learning-rate 1e-6 --token-rate 100 \
        --cpu --threads 1 --save-every 20 --measure-every 20 "$@"
}

arm plain --objective plain
arm improved-5 # what ships
arm basic-5 --objective basic
arm plain-again --objective plain --seed 1 # how much another order of the text changes
arm improved-3 --L 3
arm improved-7 --L 7
arm diverse-5 --diverse
arm windows-5 --share-of windows # what the paper's share counts
