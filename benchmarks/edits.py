"""Ten real edits of held-out files: how much faster, with the same answer?

    python -m benchmarks.edits ../shared/data                     # the model's own answers
    python -m benchmarks.edits ../shared/data --answers commit    # what the commits really did
    python -m benchmarks.edits ../shared/data --select            # how the ten were chosen

The model ships with the package and was not trained on these repositories (pallets/flask and
TheAlgorithms/Python). The ten are the held-out commits with the lowest hashes whose prompt and
answer fit the model's context; `benchmarks/edits.txt` lists them.

So small a model seldom makes the change that a commit message asks for, and what is copied is easy
to draft. With `--answers commit` every arm is made to say the commit's new file: no other token is
left to choose. Passes, drafts and their rejections are then those of a model that edits as
people do.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks import shared
from benchmarks.paired import ratio
from draftsmith import builtin
from draftsmith.bench.answer import Dictated
from draftsmith.bench.run import in_turn
from draftsmith.engine.engine import Engine
from draftsmith.text.tokenizer import encode

LIST = Path(__file__).with_name("edits.txt")


@dataclass(frozen=True)
class Edit:
    """One commit's change of one file, and its prompt in tokens."""

    commit: str
    path: str
    before: str
    after: str
    prompt: list[int]
    limit: int


def held_out(data: Path, engine: Engine) -> list[Edit]:
    """All held-out edits that fit, lowest hash first."""
    context = engine.model.context_length
    assert context is not None
    names = [field.name for field in fields(Edit)]
    found = shared.held_out(data, engine.model.tokenizer, context)
    return [Edit(**{name: row[name] for name in names}) for row in found]


def chosen(data: Path, engine: Engine) -> list[Edit]:
    """The edits listed in `edits.txt`."""
    wanted = LIST.read_text(encoding="utf-8").split()
    found = {edit.commit: edit for edit in reversed(held_out(data, engine))}
    return [found[commit] for commit in wanted]


def has_change(edit: Edit, answer: str) -> bool:
    """Whether the answer has every line the commit added and none of those it removed."""
    before, after, new = (t.splitlines() for t in (edit.before, edit.after, answer))
    diff = list(difflib.ndiff(before, after))
    added = {line[2:] for line in diff if line[:2] == "+ "}
    removed = {line[2:] for line in diff if line[:2] == "- "} - set(after)
    return added <= set(new) and not removed & set(new)


def arms(engine: Engine, dictate: bool) -> dict[str, Callable[[Edit], list[int]]]:
    """Ways to answer an edit, all with the same weights, dtype and limit.

    `dictate`: the answer is the commit's new file.
    """
    model: Any = engine.model.model
    tokenizer = engine.model.tokenizer

    def dictated(edit: Edit) -> Dictated | None:
        answer = [*encode(tokenizer, edit.after), tokenizer.eos_token_id]
        return Dictated(len(edit.prompt), answer) if dictate else None

    def ours(drafter: str) -> Callable[[Edit], list[int]]:
        def answer(edit: Edit) -> list[int]:
            result = engine.generate(
                edit.prompt,
                drafter=drafter,
                max_new_tokens=edit.limit,
                temperature=0.0,
                processors=dictated(edit),
            )
            tokens: list[int] = result.tokens
            return tokens

        return answer

    def theirs(**options: Any) -> Callable[[Edit], list[int]]:
        def answer(edit: Edit) -> list[int]:
            prompt = torch.tensor([edit.prompt])
            said = dictated(edit)
            with said.in_logits(model) if said else nullcontext():
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=edit.limit,
                    **options,
                )
            tokens: list[int] = out[0, len(edit.prompt) :].tolist()
            return tokens

        return answer

    return {
        "plain": ours("none"),
        "copyspec": ours("copyspec(gamma=3, block=10)"),
        "prompt_lookup": ours("prompt_lookup"),
        "auto": ours("auto"),
        "generate": theirs(),
        "generate, prompt lookup": theirs(prompt_lookup_num_tokens=10),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--answers", choices=["model", "commit"], default="model")
    parser.add_argument("--select", action="store_true", help="print the ten hashes and stop")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine.from_pretrained(builtin.path(), dtype=args.dtype, prefixes=0)
    if args.select:
        print("\n".join(dict.fromkeys(e.commit for e in held_out(args.data, engine)[:12])))
        return
    edits, ways = chosen(args.data, engine), arms(engine, args.answers == "commit")
    print(f"{len(edits)} edits, answers: {args.answers}'s, {args.dtype}, {args.threads} threads, "
          f"{args.runs} runs", flush=True)  # fmt: skip
    for way in ways.values():
        way(edits[0])  # warm up

    seconds: dict[str, list[float]] = {name: [] for name in ways}  # one entry per run and edit
    answers: dict[str, list[list[int]]] = {name: [] for name in ways}
    for run in range(args.runs):
        for index, edit in enumerate(edits):
            for name in in_turn(list(ways), run + index):
                begin = perf_counter()
                tokens = ways[name](edit)
                seconds[name].append(perf_counter() - begin)
                if run == 0:
                    answers[name].append(tokens)
    report(engine, edits, answers, seconds)


def report(
    engine: Engine,
    edits: list[Edit],
    answers: dict[str, list[list[int]]],
    seconds: dict[str, list[float]],
) -> None:
    """The tables: what the answers are worth, and what each arm took."""
    differs = contains = 0
    similarity = []
    for edit, tokens in zip(edits, answers["plain"], strict=True):
        text = engine.model.tokenizer.decode(tokens, skip_special_tokens=True)
        differs += text.strip() != edit.before.strip()
        contains += has_change(edit, text)
        similarity.append(difflib.SequenceMatcher(None, text, edit.after, autojunk=False).ratio())
        print(
            f"  {edit.commit[:10]} {len(tokens):5} tokens, {similarity[-1]:.2f} like the new file"
        )
    print(
        f"differs from the old file: {differs} of {len(edits)}; contains the commit's change: "
        f"{contains}; median similarity to the new file {median(similarity):.2f}"
    )
    print(f"{'arm':26} {'seconds':>8} {'same answer':>11}   speed over plain, over their lookup")
    for name, spent in seconds.items():
        same = sum(a == b for a, b in zip(answers[name], answers["plain"], strict=True))
        over_plain = ratio(seconds["plain"], spent)
        over_lookup = ratio(seconds["generate, prompt lookup"], spent)
        print(f"{name:26} {sum(spent):8.2f} {same:8}/{len(edits)}   {over_plain}   {over_lookup}")


if __name__ == "__main__":
    sys.exit(main())
