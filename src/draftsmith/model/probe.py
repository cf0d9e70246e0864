"""The self-test at load: what this very model, with these weights, can verify exactly.

One small tree is computed branch by branch without any cache, by the model as it came. Then our
runner computes it in one pass, the most capable way first. The first way that agrees is taken, and
every refusal is kept with its reason. About ten passes over less than twenty tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.errors import UnsupportedError
from draftsmith.model.capabilities import CacheKind, Capabilities
from draftsmith.model.forward import Forward
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.replay_memory import recurrent_cache
from draftsmith.model.rope import scaled_by_slot
from draftsmith.model.runner import Runner

_PROMPT = 12
_PARENTS = (-1, 0, 1, 0, 3, -1, 5, 6)
_LEAVES = ((0, 1, 2), (0, 3, 4), (5, 6, 7))
"""Root-to-leaf paths of the test tree: two that part after one node, one apart from the start."""

_NOT_CAUSAL = 0.3
"""Relative change of a logits row by *later* tokens above which a model looks ahead."""
_NOISE_MARGIN = 4
"""One-token passes and wide passes use other kernels: their difference, times this, is rounding."""
_MOST_NOISE = 0.05
"""Tolerances never exceed this: above it, the next token is often another one."""
_INEXACT = ("mamba", "bamba", "jamba")
"""Recurrent models that continue several tokens inexactly, sometimes below any tolerance."""
_SHORT_CHECK = 0.3
"""Tolerance for a model whose rows disturb each other: catches a wrong cache, not its noise."""


@dataclass(frozen=True)
class _Reference:
    """The tree computed branch by branch: logits (T, V) of each leaf path, prompt included."""

    prompt: list[int]
    nodes: list[int]
    logits: list[Tensor]
    tolerance: float
    disturbed: float
    """How much the drafted tokens change the logits before them (0 for a sound model)."""

    @property
    def draft(self) -> Draft:
        return Draft(tuple(self.nodes), _PARENTS, ("self-test",) * len(self.nodes))

    def at(self, node: int) -> Tensor:
        """(V,) logits after a node, -1 for the root."""
        if node == -1:
            return self.logits[0][_PROMPT - 1]
        leaf = next(i for i, path in enumerate(_LEAVES) if node in path)
        return self.logits[leaf][_PROMPT + _LEAVES[leaf].index(node)]


def probe(loaded: LoadedModel) -> Capabilities:
    """Find the capabilities of a model (whatever `loaded.capabilities` says meanwhile).

    Raises UnsupportedError if its logits depend on later tokens: it cannot generate at all.
    """
    with torch.inference_mode():
        reference = _reference(loaded)
        reasons: list[str] = []
        if reference.disturbed > _NOT_CAUSAL:
            raise UnsupportedError(
                f"{loaded.name} looks at tokens that come later (its logits change by "
                f"{reference.disturbed:.0%}): it is no causal language model"
            )
        own = str(getattr(loaded.config, "_attn_implementation", None) or "eager")
        recurrent = _is_recurrent(loaded)
        if reference.disturbed > _independence(loaded):
            reasons.append(
                "rows of a pass change each other's logits (by "
                f"{reference.disturbed:.1e}; per-tensor dynamic quantization does this), so "
                "rejected drafts would change accepted tokens"
            )
            reference = replace(reference, tolerance=_SHORT_CHECK)
        else:
            found = (
                _try_chain(loaded, reference, reasons, own, "replay")
                if recurrent
                else _try_parallel(loaded, reference, reasons, own)
            )
            if found is not None:
                return found
        kinds: tuple[CacheKind, ...] = ("replay",) if recurrent else ("rows", "replay")
        for kind in kinds:
            plain = Capabilities("plain", own, kind, batch=False)
            problem = _problem(_check_plain, loaded, plain, reference)
            if problem is None:
                return replace(plain, reasons=tuple(reasons))
            reasons.append(f"plain decoding with its cache ({kind}): {problem}")
        return Capabilities("plain", own, "none", batch=False, reasons=tuple(reasons))


def _try_parallel(
    loaded: LoadedModel, reference: _Reference, reasons: list[str], own: str
) -> Capabilities | None:
    for attention in ("draftsmith", "sdpa", "eager"):
        tree = Capabilities("tree", attention, "rows", batch=True)
        problem = _problem(_check_tree, loaded, tree, reference)
        if problem is not None:
            reasons.append(f"trees with {attention} attention: {problem}")
            continue
        if scaled_by_slot(loaded.config) is not None:
            problem = "it scales queries by slot, not by position"
        else:
            problem = _problem(_check_batch, loaded, tree, reference)
        if problem is not None:
            reasons.append(f"several rows in one pass: {problem}")
        exclusive = replace(loaded, capabilities=tree).forward.exclusive
        if exclusive is not None:
            reasons.append(
                f"forwards of the model in other threads during ours: {exclusive}, so its "
                "attention setting is switched for the length of a pass"
            )
        return replace(tree, batch=problem is None, reasons=tuple(reasons))
    return _try_chain(loaded, reference, reasons, own, "rows")


def _try_chain(
    loaded: LoadedModel, reference: _Reference, reasons: list[str], own: str, cache: CacheKind
) -> Capabilities | None:
    if cache == "replay":
        reasons.append("trees: a recurrent state follows one branch only")
        if recurrent_cache(loaded.config) is None:
            reasons.append(
                "chains: this version of transformers keeps the recurrent state in a layout that "
                "cannot be copied and put back; with transformers 5 it can"
            )
            return None
        if loaded.config.model_type in _INEXACT:
            reasons.append(f"chains: {loaded.config.model_type} continues several tokens inexactly")
            return None
    chain = Capabilities("chain", own, cache, batch=False)
    problem = _problem(_check_chain, loaded, chain, reference)
    if problem is None:
        return replace(chain, reasons=tuple(reasons))
    reasons.append(f"chains: {problem}")
    return None


def _problem(check: Any, loaded: LoadedModel, as_if: Capabilities, ref: _Reference) -> str | None:
    """Run one check on the model as if it had these capabilities; None if it agrees."""
    try:
        worst = max(check(Runner(replace(loaded, capabilities=as_if)), ref))
    except (KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Models are third-party code: whatever it raises is the reason.
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")
    if worst <= ref.tolerance:  # False for NaN, too.
        return None
    return f"logits differ by {worst:.1e}, more than rounding ({ref.tolerance:.1e})"


def _check_tree(runner: Runner, ref: _Reference) -> list[float]:
    row = runner.open(ref.prompt)
    runner.prefill(row)
    output = runner.forward([row], [ref.draft])[0].logits
    errors = [_distance(output[1 + node], ref.at(node)) for node in range(-1, len(_PARENTS))]
    # Accept the branch that is not first in memory, then take one plain step: compaction works.
    path = _LEAVES[1][:2]
    errors += _after(runner, row, path, _LEAVES[1][2], ref)
    runner.close(row)
    return errors


def _check_batch(runner: Runner, ref: _Reference) -> list[float]:
    """A tree beside a shorter row whose chain is the rest of the prompt."""
    row, short = runner.open(ref.prompt), runner.open(ref.prompt[:-4])
    runner.prefill(row)
    runner.prefill(short)
    chain = Draft.chain(ref.prompt[-4:], "self-test")
    tree, line = runner.forward([row, short], [ref.draft, chain])
    errors = [_distance(tree.logits[1 + node], ref.at(node)) for node in range(-1, len(_PARENTS))]
    wanted = ref.logits[0][_PROMPT - 5 : _PROMPT]
    errors += [_distance(got, want) for got, want in zip(line.logits, wanted, strict=True)]
    return errors


def _check_chain(runner: Runner, ref: _Reference) -> list[float]:
    """A chain accepted in part, what a plain step then gives, and a chain accepted whole."""
    row = runner.open(ref.prompt)
    runner.prefill(row)
    first, last = _LEAVES[0], _LEAVES[1]
    output = runner.forward([row], [_chain(ref, first)])[0].logits
    errors = [_distance(got, ref.at(n)) for got, n in zip(output, (-1, *first), strict=True)]
    runner.commit([row], [[0]], [[ref.nodes[first[0]], ref.nodes[last[1]]]])
    output = runner.forward([row], [_chain(ref, last[2:])])[0].logits
    errors += [_distance(got, ref.at(n)) for got, n in zip(output, last[1:], strict=True)]
    return errors


def _check_plain(runner: Runner, ref: _Reference) -> list[float]:
    row = runner.open(ref.prompt)
    errors = []
    for step, node in enumerate((-1, *_LEAVES[0])):
        output = runner.forward([row], [EMPTY])[0].logits
        errors.append(_distance(output[0], ref.at(node)))
        if step < len(_LEAVES[0]):
            runner.commit([row], [[]], [[ref.nodes[_LEAVES[0][step]]]])
    return errors


def _after(
    runner: Runner, row: Any, path: Sequence[int], leaf: int, ref: _Reference
) -> list[float]:
    emitted = [ref.nodes[node] for node in (*path, leaf)]
    runner.commit([row], [path], [emitted])
    return [_distance(runner.forward([row], [EMPTY])[0].logits[0], ref.at(leaf))]


def _chain(ref: _Reference, nodes: Sequence[int]) -> Draft:
    return Draft.chain([ref.nodes[node] for node in nodes], "self-test")


def _reference(loaded: LoadedModel) -> _Reference:
    vocab = loaded.vocab_size
    # Ordinary ids, all different where the vocabulary allows: the lowest are often special.
    low = min(10, vocab // 4)
    ids = [low + (37 * i + 11) % min(vocab - low, 997) for i in range(_PROMPT + len(_PARENTS))]
    prompt, nodes = ids[:_PROMPT], ids[_PROMPT:]
    forward = Forward(loaded.model, None)
    paths = [prompt + [nodes[n] for n in leaf] for leaf in _LEAVES]
    logits = [_whole(forward, path) for path in paths]
    shared = [(one[i], logits[0][i]) for one in logits[1:] for i in range(_PROMPT)]
    alone = _whole(forward, prompt[:1])[0]
    noise = _distance(alone, logits[0][0])
    floor = max(2e-5, 4 * torch.finfo(loaded.dtype).eps)
    return _Reference(
        prompt,
        nodes,
        logits,
        tolerance=min(max(floor, _NOISE_MARGIN * noise), _MOST_NOISE),
        disturbed=max(_distance(a, b) for a, b in shared),
    )


def _whole(forward: Forward, ids: list[int]) -> Tensor:
    """(T, V) logits of a sequence computed at once, into a cache of the model's own.

    With a cache, although it is thrown away: some models share keys between layers only then.
    """
    positions = [list(range(len(ids)))]
    try:
        logits: Tensor = forward([ids], positions, None, None, 0).logits
    except (ValueError, TypeError, AttributeError, NotImplementedError):
        logits = forward([ids], positions, None, False, 0).logits
    return logits[0, -len(ids) :]


def _distance(got: Tensor, wanted: Tensor) -> float:
    """Relative distance of two logits rows (V,), whose common offset does not matter."""
    a, b = got.float(), wanted.float().to(got.device)
    b = b - b.mean()
    return float((a - a.mean() - b).norm() / b.norm().clamp_min(1e-30))


def _independence(loaded: LoadedModel) -> float:
    """Change of a row by its neighbours that is rounding: same shapes, so next to none.

    Not zero: experts that get more tokens may compute them with another kernel.
    """
    return max(1e-4, 2 * torch.finfo(loaded.dtype).eps)


def _is_recurrent(loaded: LoadedModel) -> bool:
    config, model = loaded.config, loaded.model
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(own, "_is_stateful", False) or recurrent_cache(config) is not None:
        return True
    types = set(getattr(config, "layer_types", None) or ())
    types |= set(getattr(config, "layers_block_type", None) or ())
    return bool(types & {"conv", "linear_attention", "mamba", "hybrid", "recurrent"})
