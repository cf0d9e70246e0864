"""The self-test at load: finds which drafts this model, with these weights, verifies exactly.

What depends on the architecture is tested once, on a small copy of the model, and stored
(`of_architecture`). Four passes of the model itself then test what depends on its weights and
modules (`_confirmed`): the first computes a reference, and three of our own passes must agree with
it. This also covers quantized weights, replaced modules, adapters and hooks. Only a model that
disagrees, or that has no small copy, is searched completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY
from draftsmith.errors import UnsupportedError, WriteError, first_line
from draftsmith.model import graphs
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.loaded import LoadedModel, Store
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
from draftsmith.model.static import refusal
from draftsmith.model.windows import windows_by_layer
from draftsmith.storage import cache_folder, digest

ACCEPTED = LEAVES[1][:-1]
"""Nodes accepted before a plain step. They are not the first ones in memory."""
DEPENDENT = "rows of a pass change each other"

_KNOWN: dict[str, Capabilities] = {}
"""Findings on small copies in this process, by digest of `identity`."""


def probe(loaded: LoadedModel) -> Capabilities:
    """Find the capabilities of a model; `loaded.capabilities` is ignored.

    Raises UnsupportedError if its logits depend on later tokens, since it cannot generate then.
    """
    with torch.inference_mode():
        try:
            found = _confirmed(loaded, of_architecture(loaded))
        except UnsupportedError as error:
            found = replace(search(loaded), searched=str(error))
    return replace(found, windows=any(windows_by_layer(loaded.config)))


def with_store(loaded: LoadedModel, store: str | None) -> LoadedModel:
    """Return the model with a key/value store; with "packed" where it cannot use that one.

    None is "static" where its passes can be captured. The reason against it is then among those of
    the model's capabilities.
    """
    wanted = store or ("static" if loaded.device.type in graphs.CAPTURED else "packed")
    found = replace(loaded, store=cast(Store, wanted))
    why = refusal(loaded) if wanted == "static" else None
    if wanted == "static" and why is None:
        with torch.inference_mode():
            reference = Reference.of(loaded, at_once=True)
            try:
                why = problem(loaded, _check_static(Runner(found), reference))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # models are third-party code
                why = first_line(error)
        if store is None and why is None:
            why = found.graphs.failure
    if why is None:
        return found
    reasons = *loaded.capabilities.reasons, f"passes of fixed shapes: {why}"
    return replace(loaded, capabilities=replace(loaded.capabilities, reasons=reasons))


def _check_static(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify a tree in a pass of fixed shape; then a plain step, and a chain after pending
    tokens."""
    row = runner.open(ref.prompt)
    runner.prefill(row)
    tree = runner.forward([row], [ref.draft])[0].logits
    found = [ref.at(got, node) for node, got in enumerate(tree, -1)]
    found += _step(runner, ref, row, ACCEPTED)
    runner.extend(row, ref.prompt[:-4])
    chain = ref.reading(PROMPT - 4, PROMPT)
    line = runner.forward([row], [chain])[0].logits
    found += [ref.along(got, 0, PROMPT - 5 + i) for i, got in enumerate(line)]
    runner.close(row)
    return found


def of_architecture(loaded: LoadedModel) -> Capabilities:
    """Find what a small copy of the model can do. Stored in the process and in the cache folder.

    Raises UnsupportedError with the reason if no copy can be made and run.
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
            raise UnsupportedError(f"its small copy fails ({first_line(error)})") from error
        found.remember(path, key)
    _KNOWN[name] = found
    return found


def _confirmed(loaded: LoadedModel, claim: Capabilities) -> Capabilities:
    """Check the capabilities of the copy on the model itself, in at most four passes.

    Returns plain decoding if rows of a pass change each other. Raises UnsupportedError with the
    reason for any other disagreement.
    """
    try:
        reference = Reference.of(loaded, at_once=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"it fails with four texts in one pass ({first_line(error)})"
        ) from error
    claim = replace(claim, position_sizes=reference.sizes)
    # Such a model runs with its own cache, so nothing needs confirmation.
    if claim.shape == "plain":
        return claim
    if reference.disturbed > NOT_CAUSAL:
        raise UnsupportedError("its logits depend on later tokens")
    check = _confirm_packed if claim.packed else _confirm_chain
    change, *findings = ask(check, loaded, claim, reference)
    if change.what == DEPENDENT and change.excess > 1 and reference.cached:
        # Packed passes require more independence than batches, so test the model's own batches.
        by_others = reference.change_by_others(loaded)
        if by_others <= independence(loaded):
            raise UnsupportedError(f"it disagrees with its small copy: {change}")
        return Capabilities(
            "plain",
            own_attention(loaded),
            "replay",
            reasons=(dependent(by_others),),
            position_sizes=reference.sizes,
        )
    wrong = problem(loaded, [change, *findings])
    if wrong is not None:
        raise UnsupportedError(f"it disagrees with its small copy: {wrong}")
    return claim


def _confirm_packed(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify a chain, then a tree, each beside a row that does not change; then a plain step.

    Both passes have the same width, so the other row shows whether rows of a pass change each
    other. That is the first finding.
    """
    row, other = runner.open(ref.prompt[:1]), runner.open(ref.prompt[:3])
    chain = ref.reading(1, len(ref.draft) + 2)
    line, before = runner.forward([row, other], [chain, EMPTY])
    # Accept so much that two prompt tokens are left, and the next pass has the same width.
    runner.commit([row], [range(PROMPT - 3)], [ref.prompt[1:]])
    tree, after = runner.forward([row, other], [ref.draft, EMPTY])
    change = _change(runner, before.logits, after.logits)
    if change.excess > 1:
        return [change]
    found = [ref.along(one.logits[0], 0, 2) for one in (before, after)]
    found += [ref.along(got, 0, i) for i, got in enumerate(line.logits)]
    found += [ref.at(got, node) for node, got in enumerate(tree.logits, -1)]
    return [change, *found, *_step(runner, ref, row, ACCEPTED)]


def _confirm_chain(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify two drafts of one row that share their shape and first token; then a plain step.

    The first finding is whether their other tokens change the logits before them.
    """
    draft = ref.chain(ACCEPTED)
    other = replace(draft, tokens=(draft.tokens[0], *ref.others[: len(draft) - 1]))
    row = runner.open(ref.prompt)
    # The first pass is not committed, so the second one begins at the same position.
    before, after = (runner.forward([row], [one])[0].logits for one in (other, draft))
    change = _change(runner, before[:2], after[:2])
    if change.excess > 1:
        return [change]
    nodes = (-1, *ACCEPTED)
    found = [ref.at(got, node) for node, got in zip(nodes[:2], before[:2], strict=True)]
    found += [ref.at(got, node) for node, got in zip(nodes, after, strict=True)]
    return [change, *found, *_step(runner, ref, row, range(len(draft)))]


def _step(runner: Runner, ref: Reference, row: SequenceRow, path: Sequence[int]) -> list[Finding]:
    """Run a pass over one token after an accepted path that is not the first in memory."""
    tokens = [ref.nodes[node] for node in LEAVES[1]]
    runner.commit([row], [path], [tokens])
    step = ref.at(runner.forward([row], [EMPTY])[0].logits[0], LEAVES[1][-1])
    found = [replace(step, sole=True)]
    state = first_recurrent_state(row.state)
    if state is not None and ref.state is not None:
        found.append(state_finding(runner, ref.state, state))
    return found


def _change(runner: Runner, before: Tensor, after: Tensor) -> Finding:
    """Compare rows (n, V) of two passes that should be equal."""
    change = max(distance(a, b) for a, b in zip(before, after, strict=True))
    return Finding(change, independence(runner.loaded), DEPENDENT, sole=True)
