"""Replay recorded answers of Qwen2.5-72B and compare CopySpec with the paper's figures.

    python benchmarks/replay_copyspec.py ../shared/data

The folder holds `recorded/*.jsonl` (id, turn, messages, output) and `tokenizers/qwen2`. Figures of
the paper: Dumitru et al. 2025, table 1 (copied share of output tokens, both turns).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from draftsmith.bench.replay import replay
from draftsmith.core.drafter import Drafter
from draftsmith.core.result import Stats, total
from draftsmith.drafters.registry import parse

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
PAPER = {"mt_redundant": 0.3235, "mt_bench": 0.2053}


def render(messages: list[dict[str, str]]) -> str:
    """Qwen2's chat template."""
    turns = [{"role": "system", "content": SYSTEM}, *messages]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns)
    return text + "<|im_start|>assistant\n"


def measure(data: Path, suite: str, drafter: Drafter) -> dict[int, Stats]:
    """Stats by turn."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizers" / "qwen2" / "tokenizer.json"))
    turns: dict[int, list[Stats]] = {}
    path = data / "recorded" / f"{suite}.qwen2.5-72b.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompt = tokenizer.encode(render(record["messages"]), add_special_tokens=False).ids
        answer = tokenizer.encode(record["output"] + "<|im_end|>", add_special_tokens=False).ids
        stats = replay(prompt, answer, drafter, tokenizer.get_vocab_size())
        turns.setdefault(record["turn"], []).append(stats)
    return {turn: total(parts) for turn, parts in sorted(turns.items())}


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data")
    spec = sys.argv[2] if len(sys.argv) > 2 else "copyspec(gamma=3, block=10)"
    if not (data / "recorded").is_dir():
        sys.exit(f"no recorded answers in {data}; give the folder that holds recorded/")
    drafter = parse(spec)
    print(f"{drafter}\n{'suite':14} {'turn':>4} {'tokens':>8} {'per pass':>8} {'copied':>7} paper")
    for suite, figure in PAPER.items():
        turns = measure(data, suite, drafter)
        for name, stats in [*turns.items(), ("both", total(list(turns.values())))]:
            paper = f"{figure:6.1%}" if name == "both" else ""
            print(
                f"{suite:14} {name!s:>4} {stats.tokens:8,} {stats.tokens_per_pass:8.3f} "
                f"{stats.accepted_share:7.2%} {paper}"
            )


if __name__ == "__main__":
    main()
