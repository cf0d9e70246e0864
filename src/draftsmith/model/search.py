"""Finds the most that a model can do by trying ways to run it, the most capable first.

Each way runs the test tree through our runner and is compared with the reference. The first that
agrees is chosen, and the reason of every refusal is kept. Small copies are searched, and models
without a copy; this takes up to about fifty short passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY
from draftsmith.errors import UnsupportedError
from draftsmith.model.capabilities import CacheKind, Capabilities
from draftsmith.model.forward import unwrapped
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.own_cache import first_recurrent_state, recurrent_cache
from draftsmith.model.reference import LEAVES, PARENTS, PROMPT, Finding, Reference, distance, floor
from draftsmith.model.registered import NAME, own_name
from draftsmith.model.runner import Runner

NOT_CAUSAL = 0.3
"""A model looks ahead if *later* tokens change a logits row by more than this, relatively."""
_SHORT_CHECK = 0.3
"""Tolerance for plain decoding if the model itself is inexact. It still detects a wrong cache."""

Check = Callable[[Runner, Reference], list[Finding]]


def search(loaded: LoadedModel) -> Capabilities:
    """Find the most that a model can do; `loaded.capabilities` is ignored.

    Raises UnsupportedError if its logits depend on later tokens, since it cannot generate then.
    """
    reference = Reference.of(loaded, at_once=False)
    if reference.disturbed > NOT_CAUSAL:
        raise UnsupportedError(
            f"{loaded.name} attends to later tokens (they change its logits by "
            f"{reference.disturbed:.0%}), so it is not a causal language model"
        )
    return replace(_best(loaded, reference), position_sizes=reference.sizes)


def _best(loaded: LoadedModel, reference: Reference) -> Capabilities:
    reasons: list[str] = []
    if reference.disturbed > independence(loaded):
        reasons.append(dependent(reference.disturbed))
        reference = reference.with_tolerance(_SHORT_CHECK)
    elif found := _drafting(loaded, reference, reasons):
        return found
    plain = Capabilities("plain", own_attention(loaded), "replay")
    wrong = problem(loaded, ask(_check_steps, loaded, plain, reference))
    if wrong is not None:
        # Its own cache may be inexact; what its own `generate` does still counts as right.
        reasons.append(f"one token at a time with its own cache: {wrong}")
        wrong = problem(loaded, ask(_check_generate, loaded, plain, reference))
    if wrong is not None:
        reasons.append(f"plain decoding with its cache: {wrong}")
        plain = replace(plain, cache="none")
    return replace(plain, reasons=tuple(reasons))


def independence(loaded: LoadedModel) -> float:
    """Largest change of a row by other rows that still counts as rounding.

    Not zero: experts may use another kernel for more tokens.
    """
    return max(1e-4, 2 * torch.finfo(loaded.dtype).eps)


def dependent(change: float) -> str:
    """Return the reason for a model with rows that change each other."""
    return (
        f"rows of a pass change each other's logits (by {change:.1e}; per-tensor dynamic "
        "quantization does this), so rejected drafts would change accepted tokens"
    )


def own_attention(loaded: LoadedModel) -> str:
    """Name of the attention implementation that the model came with."""
    return own_name(loaded.config) or "eager"


def ask(check: Check, loaded: LoadedModel, as_if: Capabilities, ref: Reference) -> list[Finding]:
    """Run one check on the model as if it had these capabilities."""
    try:
        return check(Runner(replace(loaded, capabilities=as_if)), ref)
    except torch.OutOfMemoryError:
        raise
    # Models are third-party code. Whatever they raise is the reason.
    except Exception as error:
        return [Finding.failure(error)]


def problem(loaded: LoadedModel, findings: Sequence[Finding]) -> str | None:
    """Return the worst finding as text if it exceeds rounding, else None.

    In half precision one of several findings may be a discrete choice, such as an expert, that
    flipped, and that no trial of the reference showed.
    """
    wrong = [finding for finding in findings if finding.excess > 1]
    spared = 1 if loaded.dtype.itemsize < 4 else 0
    if len(wrong) <= spared and not any(finding.sole for finding in wrong):
        return None
    return str(max(wrong, key=lambda finding: finding.excess))


def _drafting(loaded: LoadedModel, reference: Reference, reasons: list[str]) -> Capabilities | None:
    """Return the first way to verify drafts that agrees, else None. Appends to `reasons`."""
    cache: CacheKind = "replay" if _is_recurrent(loaded) else "own"
    if cache == "replay":
        reasons.append("trees: a recurrent state can follow one branch only")
        if recurrent_cache(loaded.config) is None:
            reasons.append(
                "chains: this version of transformers keeps the recurrent state in a layout that "
                "cannot be restored; transformers 5 can restore it"
            )
            return None
    else:
        tree = Capabilities("tree", NAME, "packed")
        wrong = _slot_dependence(loaded.config)
        if wrong is None:
            wrong = problem(loaded, ask(_check_packed, loaded, tree, reference))
        if wrong is None:
            return tree
        reasons.append(f"trees and shared passes: {wrong}")
    chain = Capabilities("chain", own_attention(loaded), cache)
    wrong = problem(loaded, ask(_check_chain, loaded, chain, reference))
    if wrong is None:
        return replace(chain, reasons=tuple(reasons))
    reasons.append(f"chains: {wrong}")
    return None


def _slot_dependence(config: Any) -> str | None:
    """Reason why results depend on a token's slot, which trees and packing change; else None.

    Known by configuration, because the self-test's texts are too short to show it.
    """
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        return "its attention windows count slots, not positions"
    if config.model_type == "llama4_text" and getattr(config, "attn_temperature_tuning", False):
        return "its query scaling depends on slots, not on positions"
    return None


def _check_packed(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify a tree alone, then beside a chain, a plain row and a chunk, with lengths mixed."""
    chunked, plain = runner.open(ref.prompt), runner.open(ref.prompt[:3])
    runner.prefill(plain)
    row, short = runner.open(ref.prompt), runner.open(ref.prompt[:-4])
    runner.prefill(row)
    rows = [plain, chunked, row, short]
    chain = ref.reading(PROMPT - 4, PROMPT)
    takes = [len(plain.pending), 5, len(row.pending), len(short.pending)]
    alone = runner.forward([row], [ref.draft])[0].logits
    one, none, tree, line = runner.forward(rows, [EMPTY, EMPTY, ref.draft, chain], takes)
    found = [ref.along(one.logits[0], 0, 2)]
    found += [ref.at(alone[1 + node], node) for node in range(-1, len(PARENTS))]
    found += [ref.at(tree.logits[1 + node], node) for node in range(-1, len(PARENTS))]
    found += [ref.along(got, 0, PROMPT - 5 + i) for i, got in enumerate(line.logits)]
    assert not len(none.logits)
    # Accept a branch that is not first in memory, then continue: rows must have kept their own
    # keys.
    path, leaf = LEAVES[1][:-1], LEAVES[1][-1]
    runner.commit(
        rows,
        [(), (), path, range(4)],
        [[ref.prompt[3]], (), [ref.nodes[node] for node in (*path, leaf)], [*chain.tokens, 0]],
    )
    one, rest = runner.forward(rows[:2], [EMPTY] * 2)
    # A pass over one token may use other code.
    (sole,) = runner.forward([row], [EMPTY])
    steps = [
        ref.along(one.logits[0], 0, 3),
        ref.along(rest.logits[0], 0, PROMPT - 1),
        ref.at(sole.logits[0], leaf),
    ]
    return found + [replace(step, sole=True) for step in steps]


def _check_chain(runner: Runner, ref: Reference) -> list[Finding]:
    """Accept one chain in part and one completely, then compute every token alone.

    The last is part of the check, because a step without a draft must continue verified chains.
    """
    row = runner.open(ref.prompt)
    runner.prefill(row)
    first, last = LEAVES[0], LEAVES[1]
    output = runner.forward([row], [ref.chain(first)])[0].logits
    found = [ref.at(got, node) for got, node in zip(output, (-1, *first), strict=True)]
    state = first_recurrent_state(row.state)
    runner.commit([row], [[0]], [[ref.nodes[first[0]], ref.nodes[last[1]]]])
    output = runner.forward([row], [ref.chain(last[2:])])[0].logits
    found += [ref.at(got, node) for got, node in zip(output, last[1:], strict=True)]
    runner.close(row)
    return found + _check_steps(runner, ref, state)


def _check_steps(runner: Runner, ref: Reference, state: Tensor | None = None) -> list[Finding]:
    """Compute the first path token by token; compare the recurrent state with `state`, if given.

    With small weights, logits may not show that a state was lost. The state itself does.
    """
    ids = ref.text(0)
    row, found = runner.open(ids[:1]), []
    for position, following in enumerate([*ids[1:], None]):
        found.append(ref.along(runner.forward([row], [EMPTY])[0].logits[0], 0, position))
        if following is not None:
            runner.commit([row], [[]], [[following]])
    stepped = first_recurrent_state(row.state)
    if state is not None and stepped is not None:
        found.append(state_finding(runner, state, stepped))
    runner.close(row)
    return found


def state_finding(runner: Runner, state: Tensor, stepped: Tensor) -> Finding:
    """Compare two recurrent states after the same tokens."""
    error = distance(stepped.flatten(), state.flatten())
    return Finding(error, floor(runner.loaded), "the recurrent state differs", sole=True)


def _check_generate(runner: Runner, ref: Reference) -> list[Finding]:
    """Compare steps with the logits of the model's own `generate`."""
    model, steps = runner.loaded.model, 3
    ids = torch.tensor([ref.prompt], device=runner.loaded.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    row, found = runner.open(ref.prompt), []
    for theirs, token in zip(out.logits, out.sequences[0, PROMPT:].tolist(), strict=True):
        ours = runner.forward([row], [EMPTY])[0].logits[0]
        found.append(Finding(distance(ours, theirs[0]), floor(runner.loaded)))
        runner.commit([row], [[]], [[token]])
    runner.close(row)
    return found


def _is_recurrent(loaded: LoadedModel) -> bool:
    config, model = loaded.config, loaded.model
    own = unwrapped(model)
    if getattr(own, "_is_stateful", False) or recurrent_cache(config) is not None:
        return True
    types = set(getattr(config, "layer_types", None) or ())
    types |= set(getattr(config, "layers_block_type", None) or ())
    return bool(types & {"conv", "linear_attention", "mamba", "hybrid", "recurrent"})
