#!/bin/sh
# Train the model that ships and two to compare it with: sh arms.sh TEXTS RUNS. Give it again to go on.
# All see the same text in the same steps; RUNS/ARM/training/measured.json has what was measured.
set -e
texts=$1
runs=$2

for arm in improved basic plain; do
    [ -f "$runs/$arm/config.json" ] || draftsmith train sdsat -m edit-7m -o "$runs/$arm" \
        --objective "$arm" --texts "$texts/code.jsonl" --prose "$texts/edits.jsonl" \
        --held-out "$texts/held_out_code.jsonl" --held-out "$texts/held_out_edits.jsonl" \
        --share-of replaced --steps 100 --rows 4 --rows-per-pass 4 --length 512 \
        --learning-rate 5e-6 --final-learning-rate 1e-6 --token-rate 100 \
        --cpu --threads 1 --save-every 20 --measure-every 20
done
