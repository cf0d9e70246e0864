"""The self-test at load: what this very model, with these weights, can verify exactly.

What the architecture decides is found once, on a small copy of the model, and remembered
(`of_architecture`). Four passes of the model itself then tell what it decides: the first computes
the reference, and three of our own (`_confirm`) must agree with it. So they must where weights are
quantized, modules replaced, adapters or hooks added: what such a model cannot do shows there. Only
a model that disagrees, or that cannot be copied, is searched itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY
from draftsmith.errors import UnsupportedError, WriteError, first_line
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.own_cache import first_recurrent_state
from draftsmith.model.reference import LEAVES, PROMPT, Finding, Reference, distance
from draftsmith.model.rows import SequenceRow
from draftsmith.model.runner import Runner
from draftsmith.model.search import (
    NOT_CAUSAL,
    ask,
    dependent,
    independence,
    own_attention,
    problem,
    search,
    state_finding,
)
from draftsmith.model.small_copy import identity, small_config, small_copy
from draftsmith.model.windows import windows_by_layer
from draftsmith.storage import cache_folder, digest

ACCEPTED = LEAVES[1][:-1]
"""Nodes that are kept before a plain step: not the first ones in memory."""
DEPENDENT = "rows change each other"

_KNOWN: dict[str, Capabilities] = {}
"""What was found on small copies in this process, by what tells these apart."""


def probe(loaded: LoadedModel) -> Capabilities:
    """Find the capabilities of a model (whatever `loaded.capabilities` says meanwhile).

    Raises UnsupportedError if its logits depend on later tokens: it cannot generate at all.
    """
    with torch.inference_mode():
        try:
            found = _confirmed(loaded, of_architecture(loaded))
        except UnsupportedError as error:
            found = replace(search(loaded), searched=str(error))
    return replace(found, windows=any(windows_by_layer(loaded.config)))


def of_architecture(loaded: LoadedModel) -> Capabilities:
    """What a small copy of the model can do; remembered in the process and in the cache folder.

    Raises UnsupportedError with the reason where no copy can be made and run.
    """
    config = small_config(loaded)
    key = identity(loaded, config)
    name = digest(key)
    try:
        path = cache_folder() / "architectures" / f"{loaded.config.model_type}-{name}.json"
    except WriteError:
        path = None
    found = _KNOWN.get(name) or Capabilities.recall(path, key)
    if found is None:
        copy = small_copy(loaded, config)
        try:
            found = replace(search(copy), position_sizes=())
        except Exception as error:
            raise UnsupportedError(f"a small copy of it fails ({first_line(error)})") from error
        found.remember(path, key)
    _KNOWN[name] = found
    return found


def _confirmed(loaded: LoadedModel, claim: Capabilities) -> Capabilities:
    """The capabilities of the copy, if the model has them, too; plain decoding if its rows depend
    on each other. Four passes at most.

    Raises UnsupportedError with the reason for any other disagreement.
    """
    try:
        reference = Reference.of(loaded, at_once=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"it cannot read four texts at once ({first_line(error)})"
        ) from error
    claim = replace(claim, position_sizes=reference.sizes)
    if claim.shape == "plain":  # the model's own passes with its own cache: nothing to confirm
        return claim
    if reference.disturbed > NOT_CAUSAL:
        raise UnsupportedError("its logits depend on tokens that come later")
    change, *findings = ask(_together if claim.packed else _alone, loaded, claim, reference)
    if change.what == DEPENDENT and change.excess > 1 and reference.cached:
        # In the model's own passes, too? A packed one asks more of it than a batch.
        by_others = reference.change_by_others(loaded)
        if by_others <= independence(loaded):
            raise UnsupportedError(f"it does not do what a small copy of it does: {change}")
        return Capabilities(
            "plain",
            own_attention(loaded),
            "replay",
            reasons=(dependent(by_others),),
            position_sizes=reference.sizes,
        )
    wrong = problem(loaded, [change, *findings])
    if wrong is not None:
        raise UnsupportedError(f"it does not do what a small copy of it does: {wrong}")
    return claim


def _together(runner: Runner, ref: Reference) -> list[Finding]:
    """A chain, then a tree of one row, each beside a row that stays as it is; then a plain step.

    Both passes are equally large, so what the other row gets from them tells whether rows of a
    pass depend on each other. That is the first finding.
    """
    row, other = runner.open(ref.prompt[:1]), runner.open(ref.prompt[:3])
    chain = ref.reading(1, len(ref.draft) + 2)
    line, before = runner.forward([row, other], [chain, EMPTY])
    # So much is accepted that two tokens of the prompt are left, for a pass as wide as this one.
    runner.commit([row], [range(PROMPT - 3)], [ref.prompt[1:]])
    tree, after = runner.forward([row, other], [ref.draft, EMPTY])
    change = _change(runner, before.logits, after.logits)
    if change.excess > 1:
        return [change]
    found = [ref.along(one.logits[0], 0, 2) for one in (before, after)]
    found += [ref.along(got, 0, i) for i, got in enumerate(line.logits)]
    found += [ref.at(got, node) for node, got in enumerate(tree.logits, -1)]
    return [change, *found, *_step(runner, ref, row, ACCEPTED)]


def _alone(runner: Runner, ref: Reference) -> list[Finding]:
    """Two drafts of one row, alike in shape and in the first token only; then a plain step.

    Whether their other tokens change what is before them is the first finding.
    """
    draft = ref.chain(ACCEPTED)
    other = replace(draft, tokens=(draft.tokens[0], *ref.others[: len(draft) - 1]))
    row = runner.open(ref.prompt)
    # The first pass is not committed, so that the second one begins where it did.
    before, after = (runner.forward([row], [one])[0].logits for one in (other, draft))
    change = _change(runner, before[:2], after[:2])
    if change.excess > 1:
        return [change]
    nodes = (-1, *ACCEPTED)
    found = [ref.at(got, node) for node, got in zip(nodes[:2], before[:2], strict=True)]
    found += [ref.at(got, node) for node, got in zip(nodes, after, strict=True)]
    return [change, *found, *_step(runner, ref, row, range(len(draft)))]


def _step(runner: Runner, ref: Reference, row: SequenceRow, path: Sequence[int]) -> list[Finding]:
    """A pass over one token behind an accepted path, which is not the first in memory."""
    tokens = [ref.nodes[node] for node in LEAVES[1]]
    runner.commit([row], [path], [tokens])
    step = ref.at(runner.forward([row], [EMPTY])[0].logits[0], LEAVES[1][-1])
    found = [replace(step, sole=True)]
    state = first_recurrent_state(row.state)
    if state is not None and ref.state is not None:
        found.append(state_finding(runner, ref.state, state))
    return found


def _change(runner: Runner, before: Tensor, after: Tensor) -> Finding:
    """How much rows (n, V) of two passes that are alike differ."""
    change = max(distance(a, b) for a, b in zip(before, after, strict=True))
    return Finding(change, independence(runner.loaded), DEPENDENT, sole=True)
