"""Make a folder for transformers of a checkpoint: `python export.py --run R --data D --out O`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from common import ASSISTANT, END, FILE, ID, PAD, TEXT_END
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith import builtin
from model import fresh


def check(folder: Path) -> None:
    """Load what was written, and see that it does with text what it was trained to."""
    AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = builtin.edit_messages("a.py", "rename a to b", "a = 1\n")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if not text.endswith(ASSISTANT + FILE):
        raise SystemExit(f"the template does not end with the anchor: {text!r}")
    ids = tokenizer.encode("a  = [1 , 2]\n")
    if ids[0] != ID[TEXT_END]:
        raise SystemExit("the tokenizer does not begin a text with its marker")
    if tokenizer.decode(ids[1:]) != "a  = [1 , 2]\n":
        raise SystemExit("the tokenizer does not give back what it was given")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
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
    check(args.out)
    print(f"{args.out}: step {state['step']}, {state['tokens']} tokens")


if __name__ == "__main__":
    main()
