"""Make a folder for transformers of a checkpoint: `python export.py --run R --data D --out O`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from common import END, ID, PAD, TEXT_END
from transformers import GenerationConfig

from model import fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--run", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    state = torch.load(args.run / "last.pt", map_location="cpu", weights_only=True)
    marks = {"bos_token_id": ID[TEXT_END], "eos_token_id": ID[END], "pad_token_id": ID[PAD]}
    network = fresh(**state["sizes"], **marks)
    network.load_state_dict(state["network"])
    # It names a second stop that the config does not.
    network.generation_config = GenerationConfig(
        **marks | {"eos_token_id": [ID[END], ID[TEXT_END]]}
    )
    network.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.data / "tokenizer" / name, args.out / name)
    # Spelled both ways where transformers 4 and 5 name a setting differently.
    config = json.loads((args.out / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_theta": state["sizes"]["rope_theta"], "rope_scaling": None}
    text = json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2, sort_keys=True)
    (args.out / "config.json").write_text(text + "\n", encoding="utf-8")
    for path in args.out.iterdir():
        path.chmod(0o644)
    print(f"{args.out}: step {state['step']}, {state['tokens']} tokens")


if __name__ == "__main__":
    main()
