"""How often the host waits for the device in each pass, and how many kernels it launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pretended
import pytest
from both import IDS, on

from architectures import build, prompt
from draftsmith.engine import scheduler
from draftsmith.engine.engine import Engine
from tiers import slow_after

PROMPTS = [prompt(20 + 3 * i, i) for i in range(8)]
SHORT, LONG = 8, 40
"""Lengths of two answers; their difference leaves out what happens once for each request."""


def engine(device: str, layers: int, name: str = "llama") -> Engine:
    """A model whose answers do not end, with blocks of logits that are searched first."""
    model = build(name, num_hidden_layers=layers, eos_token_id=None, vocab_size=1024)
    return Engine.from_pretrained(on(device, model))


def per_pass(
    engine: Engine, ids: Sequence[Any], **options: Any
) -> tuple[int, Counter[tuple[str, str]]]:
    """Return the passes between two lengths of an answer, and their waits by line."""
    counts = []
    for length in (SHORT, SHORT, LONG):  # the first time warms up
        with pretended.counted() as seen:
            found = engine.generate(ids, max_new_tokens=length, **options)
        results = found if isinstance(found, list) else [found]
        assert not any(result.notices for result in results)
        counts.append((max(result.stats.passes for result in results), seen))
    (few, before), (many, after) = counts[1:]
    return many - few, after.waits - before.waits


ARMS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "a drafted chain": {"drafter": "copyspec(gamma=2)", "budget": 8},
    "a drafted tree": {"drafter": "auto", "budget": 8},
    "auto": {"drafter": "auto"},
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("arm", slow_after(1, reversed(ARMS)))
def test_a_greedy_pass_waits_once(device: str, arm: str, rows: int) -> None:
    """For the copy of what the step reads, of all rows together."""
    ids = IDS if rows == 1 else PROMPTS
    passes, waits = per_pass(engine(device, 2), ids, **ARMS[arm])
    assert {why for why, _ in waits} == {"copy to the host"}
    assert {line.split(":")[0] for _, line in waits} == {"core/readout.py"}
    assert waits.total() == passes


@pytest.mark.parametrize(("name", "options"), [
    *((name, {"drafter": "copyspec(gamma=2)", "budget": 4})
      for name in ("gemma3_text", "gpt2", "phi3")),
    *(("llama", {"drafter": drafter, "budget": 4, "temperature": 0.8, "seed": 1} | more)
      for drafter in ("none", "copyspec(gamma=2)", "auto")
      for more in ({"top_k": 2}, {"top_p": 0.1, "min_p": 0.1})),
    ("banned ids", ARMS["a drafted tree"]),
])  # fmt: skip
def test_other_passes(device: str, name: str, options: dict[str, Any]) -> None:
    """Architectures without experts, for which transformers waits itself; and samples, which are
    drawn on the device after all nodes."""
    model = build("llama" if name == "banned ids" else name, eos_token_id=None)
    if name == "banned ids":
        model.generation_config.suppress_tokens = [7, 9]
    passes, waits = per_pass(Engine.from_pretrained(on(device, model)), IDS, **options)
    assert waits.total() == passes


@pytest.mark.parametrize("drafter", ["spectra(N=3, W=4, G=4)", "lookahead", "pld_plus"])
def test_some_drafters_wait_at_most_once_more(device: str, drafter: str) -> None:
    """For the scores of earlier positions, or for logits below the highest."""
    passes, waits = per_pass(engine(device, 2), IDS, drafter=drafter, budget=16)
    assert {why for why, _ in waits} == {"copy to the host"}
    assert passes <= waits.total() <= (1 if drafter == "lookahead" else 2) * passes


# ------------------------------------------------------------------------------------- kernels

EQUAL = [prompt(20, i) for i in range(8)]
"""Prompts of one length: the rows share a buffer."""
MOST = {"plain": (56, 58), "a drafted chain": (144, 74), "a drafted tree": (144, 74)}
"""a, b: most kernels of a pass of eight rows are a + b L, for a Llama of L layers.

Each further row adds two copies of keys and values and one attention to every layer, and a draft
two more copies. A row also makes its mask, moves the keys of an accepted branch, and gets a larger
buffer. Rows with keys of equal length and no drafts need less.
"""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The decoding passes of this test, in order: rows and kernels."""
    found, step = list[tuple[int, int]](), scheduler.step

    def counted(sequences: Sequence[Any], *given: Any) -> Any:
        decoding = all(len(one.row.pending) == 1 for one in sequences)
        with pretended.counted() as seen:
            made = step(sequences, *given)
        if decoding:
            found.append((len(sequences), seen.kernels.total()))
        return made

    monkeypatch.setattr(scheduler, "step", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arm", MOST)
def test_kernels_of_a_pass_are_bounded(
    device: str, arm: str, passes: list[tuple[int, int]]
) -> None:
    """At most 60 + 38 L for one row. In a packed pass each further row adds more."""
    for layers in (2, 4):
        found = engine(device, layers)
        for ids in (IDS, PROMPTS, EQUAL):
            few, each = (60, 38) if ids is IDS else MOST[arm]
            found.generate(ids, max_new_tokens=SHORT, **ARMS[arm])  # warms up
            passes.clear()
            found.generate(ids, max_new_tokens=24, **ARMS[arm])
            assert max(rows for rows, _ in passes) == (1 if ids is IDS else 8)
            assert max(kernels for _, kernels in passes) <= few + each * layers


@pytest.mark.slow
def test_rows_of_equal_length_are_read_together(device: str, passes: list[tuple[int, int]]) -> None:
    """Without drafts they add one kernel to each layer, whatever their number."""
    found, counts = engine(device, layers=4), list[int]()
    for ids in ([IDS], EQUAL[:2], EQUAL[2:]):
        passes.clear()
        found.generate(ids, max_new_tokens=24, **ARMS["plain"])
        assert {rows for rows, *_ in passes} == {len(ids)}
        counts.append(min(kernels for *_, kernels in passes))
    assert counts[1] == counts[2]
    assert counts[2] - counts[0] <= 1 + 4
