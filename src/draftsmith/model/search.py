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
import transformers
from torch import Tensor

from draftsmith.core.draft import EMPTY
from draftsmith.errors import UnsupportedError, first_line
from draftsmith.model.capabilities import DEPENDENT_ROWS, CacheKind, Capabilities
from draftsmith.model.forward import unwrapped
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.own_cache import first_recurrent_state, recurrent_cache
from draftsmith.model.reference import (
    LEAVES,
    PROMPT,
    Finding,
    Reference,
    deviation,
    distance,
    rounding_floor,
)
from draftsmith.model.registered import NAME, foreign_attention, own_name
from draftsmith.model.rows import SequenceRow
from draftsmith.model.runner import Runner
from draftsmith.model.windows import unknown_window

NOT_CAUSAL = 0.3
"""A model looks ahead if *later* tokens change a logits row by more than this, relatively."""
ACCEPTED = LEAVES[1][:-1]
"""Nodes accepted before a plain step. They are not the first ones in memory."""

Check = Callable[[Runner, Reference], list[Finding]]


def search(loaded: LoadedModel, *, causal: bool = False) -> Capabilities:
    """Find the most that a model can do; `loaded.capabilities` is ignored.

    `causal`: later tokens do not matter, whatever the logits say: quantization changes them.

    Raises UnsupportedError if its logits depend on later tokens, since it cannot generate then.
    """
    reference = Reference.of(loaded, at_once=False)
    if reference.disturbed > NOT_CAUSAL and not causal:
        raise UnsupportedError(
            f"{loaded.name} attends to later tokens (they change its logits by "
            f"{reference.disturbed:.0%}), so it is not a causal language model"
        )
    return replace(_best(loaded, reference), position_sizes=reference.sizes)


def _best(loaded: LoadedModel, reference: Reference) -> Capabilities:
    plain = Capabilities("plain", own_attention(loaded), "replay")
    if reference.disturbed > independence(loaded):
        reasons = [
            f"{DEPENDENT_ROWS}'s logits (by {reference.disturbed:.1e}; per-tensor dynamic "
            "quantization does this), so rejected drafts would change accepted tokens"
        ]
    else:
        found, reasons = _drafting(loaded, reference)
        if found is not None:
            return replace(found, reasons=tuple(reasons))
        wrong = disagreement(_check_steps, replace(loaded, capabilities=plain), reference)
        if wrong is None:
            return replace(plain, reasons=tuple(reasons))
        reasons.append(f"one token at a time with its own cache: {wrong}")
    # Its own cache may be inexact; what its own `generate` does still counts as right.
    wrong = disagreement(_check_generate, replace(loaded, capabilities=plain), reference)
    if wrong is not None:
        reasons.append(f"plain decoding with its cache: {wrong}")
        plain = replace(plain, cache="none")
    return replace(plain, reasons=tuple(reasons))


def independence(loaded: LoadedModel) -> float:
    """Largest change of a row by other rows that still counts as rounding.

    Not zero: experts may use another kernel for more tokens.
    """
    return max(1e-4, 2 * torch.finfo(loaded.dtype).eps)


def own_attention(loaded: LoadedModel) -> str:
    """Name of the attention implementation that the model came with."""
    return own_name(loaded.config) or "eager"


def disagreement(check: Check, loaded: LoadedModel, ref: Reference) -> str | None:
    """Run one check; return its worst finding as text if it exceeds rounding, else None.

    In half precision one of several findings may be a discrete choice, such as an expert, that
    flipped, and that no trial of the reference showed.
    """
    try:
        findings = check(Runner(loaded), ref)
    except torch.OutOfMemoryError:
        raise
    # Models are third-party code. Whatever they raise is the reason.
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    wrong = [finding for finding in findings if finding.excess > 1]
    spared = 1 if loaded.dtype.itemsize < 4 else 0
    if len(wrong) <= spared and not any(finding.sole for finding in wrong):
        return None
    return str(max(wrong, key=lambda finding: finding.excess))


def _drafting(loaded: LoadedModel, reference: Reference) -> tuple[Capabilities | None, list[str]]:
    """Return the first way to verify drafts that agrees, else None; with the refusals before it."""
    reasons: list[str] = []
    cache: CacheKind = "replay" if _is_recurrent(loaded) else "own"
    if cache == "replay":
        reasons.append("trees: a recurrent state can follow one branch only")
        if recurrent_cache(loaded.config) is None:
            newer = "; transformers 5 can restore it" if transformers.__version__ < "5" else ""
            reasons.append(
                "chains: this version of transformers keeps the recurrent state in a layout that "
                f"cannot be restored{newer}"
            )
            return None, reasons
    elif (kind := unknown_window(loaded.config)) is not None:
        reasons.append(f"drafts: the attention windows of {kind!r} are of a kind not known here")
        return None, reasons
    else:
        tree = Capabilities("tree", NAME, "packed")
        wrong = _slot_dependence(loaded.config)
        if wrong is None:
            wrong = disagreement(check_packed, replace(loaded, capabilities=tree), reference)
        if wrong is None:
            return tree, reasons
        reasons.append(f"trees and shared passes: {wrong}")
    chain = Capabilities("chain", own_attention(loaded), cache)
    wrong = disagreement(_check_chain, replace(loaded, capabilities=chain), reference)
    if wrong is None:
        return chain, reasons
    return None, [*reasons, f"chains: {wrong}"]


def _slot_dependence(config: Any) -> str | None:
    """Reason why results depend on a token's slot, which trees and packing change; else None.

    Known by configuration, because the self-test's texts are too short to show it.
    """
    if (name := foreign_attention(config)) is not None:
        return f"its attention {name!r}, or the mask for it, is not one of transformers' own"
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        return "its attention windows count slots, not positions"
    if getattr(config, "attention_chunk_size", None) is not None:  # Llama 4
        return "its query scaling depends on slots, and its windows are chunks"
    return None


def check_packed(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify a chain, then a tree, each beside a row that does not change; then a plain step.

    Both passes have the same width, so the other row shows whether rows of a pass change each
    other.
    """
    row, other = runner.open(ref.prompt[:1]), runner.open(ref.prompt[:3])
    chain = ref.text_as_draft(1, len(ref.draft) + 2)
    line, before = runner.forward([row, other], [chain, EMPTY])
    # Accept so much that two prompt tokens are left, and the next pass has the same width.
    runner.commit([row], [range(PROMPT - 3)], [ref.prompt[1:]])
    tree, after = runner.forward([row, other], [ref.draft, EMPTY])
    found = [unchanged(runner, before.logits, after.logits)]
    found += [ref.along(one.logits[0], 0, 2) for one in (before, after)]
    found += [ref.along(got, 0, i) for i, got in enumerate(line.logits)]
    found += [ref.at(got, node) for node, got in enumerate(tree.logits, -1)]
    return found + plain_step(runner, ref, row, ACCEPTED)


def plain_step(
    runner: Runner, ref: Reference, row: SequenceRow, path: Sequence[int]
) -> list[Finding]:
    """Run a pass over one token after an accepted path that is not the first in memory."""
    tokens = [ref.nodes[node] for node in LEAVES[1]]
    runner.commit([row], [path], [tokens])
    last = ref.at(runner.forward([row], [EMPTY])[0].logits[0], LEAVES[1][-1])
    found = [replace(last, sole=True)]
    state = first_recurrent_state(row.state)
    if state is not None and ref.state is not None:
        found.append(_state_finding(runner, ref.state, state))
    return found


def unchanged(runner: Runner, before: Tensor, after: Tensor) -> Finding:
    """Compare logits (n, V) that the other rows and drafts of two passes should not change."""
    change = max(distance(a, b) for a, b in zip(before, after, strict=True))
    return Finding(change, independence(runner.loaded), DEPENDENT_ROWS, sole=True)


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
        found.append(_state_finding(runner, state, stepped))
    runner.close(row)
    return found


def _state_finding(runner: Runner, state: Tensor, stepped: Tensor) -> Finding:
    """Compare two recurrent states after the same tokens."""
    error = deviation(stepped.flatten(), state.flatten())
    return Finding(error, rounding_floor(runner.loaded), "the recurrent state differs", sole=True)


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
        found.append(Finding(distance(ours, theirs[0]), rounding_floor(runner.loaded)))
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
