"""Turn a checkpoint into a folder transformers loads: `python export.py --run R --data D --out O`.

The exported model is loaded back with transformers and compared with the network that was trained.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import common
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from model import Shape, TinyLlama


def llama_config(shape: Shape, first: int, end: int, pad: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=True,
        attention_bias=False,
        hidden_act="silu",
        bos_token_id=first,
        eos_token_id=end,
        pad_token_id=pad,
    )


def rewrite_config(folder: Path, shape: Shape) -> None:
    """Spell the settings both ways where transformers 4 and 5 name them differently."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = shape.rope_theta
    config["rope_scaling"] = None
    config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # Not derived from the model's config: it names a second stop that the config does not.
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8"))
    generation.pop("_from_model_config", None)
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)


def compare(trained: TinyLlama, exported: LlamaForCausalLM) -> float:
    """The largest difference of the last hidden states, as a share of the largest; in float32."""
    ids = torch.arange(300)[None] * 7 % trained.shape.vocab
    with torch.no_grad():
        table = trained.positions(300, torch.float32, torch.device("cpu"))
        mine = trained.model(ids, *table, torch.float32)
        theirs = exported.model(ids).last_hidden_state
    return float((mine - theirs).abs().max() / mine.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    state = torch.load(args.run / "last.pt", map_location="cpu", weights_only=True)
    shape = Shape(**state["shape"])
    vocabulary = Tokenizer.from_file(str(args.data / "tokenizer" / "tokenizer.json"))
    end, pad = vocabulary.token_to_id(common.END), vocabulary.token_to_id(common.PAD)
    stops = [end, vocabulary.token_to_id(common.TEXT_END)]

    trained = TinyLlama(shape)
    trained.load_state_dict(state["network"])
    # Rounded before the comparison, so that what is compared is what is shipped.
    trained.to(torch.bfloat16).float()
    exported = LlamaForCausalLM(llama_config(shape, stops[1], end, pad))
    exported.load_state_dict(trained.state_dict(), strict=False)
    exported.tie_weights()
    exported.generation_config.eos_token_id = stops
    exported.generation_config.pad_token_id = pad
    exported.generation_config.bos_token_id = stops[1]
    exported.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.data / "tokenizer" / name, args.out / name)
    rewrite_config(args.out, shape)

    loaded = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    difference = compare(trained, loaded)
    if difference > 1e-2:  # sharp heads enlarge what rounding does
        raise SystemExit(f"the exported model differs from the trained one by {difference}")
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    chat = [{"role": "user", "content": common.edit_prompt("a.py", "rename a to b", "a = 1\n")}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if not text.endswith(common.ASSISTANT + common.FILE):
        raise SystemExit(f"the template does not end with the anchor: {text!r}")
    ids = tokenizer.encode("a  = [1 , 2]\n")
    if ids[0] != vocabulary.token_to_id(common.TEXT_END):
        raise SystemExit("the tokenizer does not begin a text with its marker")
    if tokenizer.decode(ids[1:]) != "a  = [1 , 2]\n":
        raise SystemExit("the tokenizer does not give back what it was given")
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(
        f"{args.out}: step {state['step']}, {state['tokens']} tokens, "
        f"{state['seconds'] / 3600:.2f} hours, {size / 1e6:.1f} MB, "
        f"differs from the network by {difference:.1e}"
    )


if __name__ == "__main__":
    main()
