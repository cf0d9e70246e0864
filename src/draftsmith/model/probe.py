"""The self-test at load: finds which drafts this model, with these weights, verifies exactly.

What depends on the architecture is tested on a small copy of the model (`_of_architecture`). Four
passes of the model itself then test what depends on its weights and modules (`_confirmed`): the
first computes a reference, and three of our own passes must agree with it. This also covers
quantized weights, replaced modules, adapters and hooks. Only a model that disagrees, or that has no
small copy, is searched completely.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from draftsmith.core.draft import EMPTY
from draftsmith.errors import UnsupportedError, first_line
from draftsmith.model import graphs
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.loaded import LoadedModel, Store
from draftsmith.model.reference import PROMPT, Finding, Reference
from draftsmith.model.runner import Runner
from draftsmith.model.search import (
    ACCEPTED,
    NOT_CAUSAL,
    check_packed,
    disagreement,
    plain_step,
    search,
    unchanged,
)
from draftsmith.model.small_copy import small_copy
from draftsmith.model.static import refusal
from draftsmith.model.windows import windows_by_layer


def probe(loaded: LoadedModel) -> Capabilities:
    """Find the capabilities of a model; `loaded.capabilities` is ignored.

    Raises UnsupportedError if its logits depend on later tokens, since it cannot generate then.
    """
    with torch.inference_mode():
        claim = None
        try:
            claim = _of_architecture(loaded)
            found = _confirmed(loaded, claim)
        except UnsupportedError as error:
            # Its scales may depend on all tokens of a pass, so ask the copy, which has none.
            causal = claim is not None and _quantized(loaded.model)
            found = replace(search(loaded, causal=causal), searched=str(error))
    return replace(found, windows=any(windows_by_layer(loaded.config)))


def _of_architecture(loaded: LoadedModel) -> Capabilities:
    """Find what a small copy of the model can do.

    Raises UnsupportedError with the reason if no copy can be made and run.
    """
    copy, kind = small_copy(loaded), loaded.device.type
    # The copy computes in float32, and is judged by it, also where the caller's passes do not.
    known = torch.amp.is_autocast_available(kind)
    try:
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            return search(copy)
    except Exception as error:
        raise UnsupportedError(f"its small copy fails ({first_line(error)})") from error


def _confirmed(loaded: LoadedModel, claim: Capabilities) -> Capabilities:
    """Check the capabilities of the copy on the model itself, in at most four passes.

    Raises UnsupportedError with the reason for a disagreement.
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
    check = check_packed if claim.packed else _check_two_drafts
    wrong = disagreement(check, replace(loaded, capabilities=claim), reference)
    if wrong is not None:
        raise UnsupportedError(f"it disagrees with its small copy: {wrong}")
    return claim


def _check_two_drafts(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify two drafts of one row that share their shape and first token; then a plain step.

    Their other tokens must not change the logits before them.
    """
    draft = ref.chain(ACCEPTED)
    other = replace(draft, tokens=(draft.tokens[0], *ref.others[: len(draft) - 1]))
    row = runner.open(ref.prompt)
    # The first pass is not committed, so the second one begins at the same position.
    before, after = (runner.forward([row], [one])[0].logits for one in (other, draft))
    nodes = (-1, *ACCEPTED)
    found = [unchanged(runner, before[:2], after[:2])]
    found += [ref.at(got, node) for node, got in zip(nodes[:2], before[:2], strict=True)]
    found += [ref.at(got, node) for node, got in zip(nodes, after, strict=True)]
    return found + plain_step(runner, ref, row, range(len(draft)))


def _quantized(model: Any) -> bool:
    """Whether the model or a part of it is quantized, as torch and transformers name it."""
    files = (type(module).__module__ for module in model.modules())
    return getattr(model, "is_quantized", False) or any(".quantized." in file for file in files)


def with_store(loaded: LoadedModel, store: str | None) -> LoadedModel:
    """Return the model with a key/value store; with "packed" where it cannot use that one.

    None is "static" where its passes can be captured. The reason against it is then among those of
    the model's capabilities.
    """
    wanted = store or ("static" if loaded.device.type in graphs.CAPTURED else "packed")
    found = replace(loaded, store=cast(Store, wanted))
    why = refusal(loaded) if wanted == "static" else None
    if wanted == "static" and why is None:
        try:
            with torch.inference_mode():
                why = disagreement(_check_static, found, Reference.of(loaded, at_once=True))
        except torch.OutOfMemoryError as error:
            why = f"there is no memory for their test ({first_line(error)})"
        if store is None and why is None:
            why = found.graphs.failure
    if why is None:
        return found
    reasons = *loaded.capabilities.reasons, f"passes of fixed shapes: {why}"
    return replace(loaded, capabilities=replace(loaded.capabilities, reasons=reasons))


def _check_static(runner: Runner, ref: Reference) -> list[Finding]:
    """Verify a tree beside another row in a pass of fixed shape; then a plain step, and a chain
    after pending tokens."""
    row, other = runner.open(ref.prompt), runner.open(ref.prompt[:-4])
    runner.prefill(row)
    runner.prefill(other)
    tree, plain = runner.forward([row, other], [ref.draft, EMPTY])
    found = [ref.at(got, node) for node, got in enumerate(tree.logits, -1)]
    found.append(ref.along(plain.logits[0], 0, PROMPT - 5))
    found += plain_step(runner, ref, row, ACCEPTED)
    runner.extend(row, ref.prompt[:-4])
    chain = ref.text_as_draft(PROMPT - 4, PROMPT)
    line = runner.forward([row], [chain])[0].logits
    found += [ref.along(got, 0, PROMPT - 5 + i) for i, got in enumerate(line)]
    runner.close(row)
    runner.close(other)
    return found
