"""The self-test at load: what this very model, with these weights, can verify exactly.

One small tree is computed branch by branch without any cache, by the model as it came. Then our
runner computes it in one pass, the most capable way first. The first way that agrees is taken, and
every refusal is kept with its reason. About a dozen passes over less than twenty tokens; a model
that verifies chains only is stepped through one path token by token besides.

To agree means to differ by no more than rounding. How much that is depends on the position: there
are texts after which the last bit of an embedding decides about the logits. So the reference is
computed once more with every embedding and every block's output off by its last bit, and each
position is judged by what that changed there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.errors import UnsupportedError
from draftsmith.model.capabilities import CacheKind, Capabilities
from draftsmith.model.forward import Forward, cache_of, unwrapped
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.replay_memory import first_recurrent_state, recurrent_cache
from draftsmith.model.rope import scaled_by_slot
from draftsmith.model.runner import Runner
from draftsmith.model.windows import windows_by_slot

_PROMPT = 12
_PARENTS = (-1, 0, 1, 0, 3, -1, 5, 6)
_LEAVES = ((0, 1, 2), (0, 3, 4), (5, 6, 7))
"""Root-to-leaf paths of the test tree: two that part after one node, one apart from the start."""

_NOT_CAUSAL = 0.3
"""Relative change of a logits row by *later* tokens above which a model looks ahead."""
_MARGIN = 4
"""Times what rounding changed in one trial is still rounding."""
_MOST_NOISE = 0.05
"""Tolerances exceed this only as far as a trial did: above it, the next token is often another."""
_KNIFE_EDGE = 10
"""A position so many times more sensitive than the median one is judged without that limit."""
_SHORT_CHECK = 0.3
"""Tolerance for plain decoding where the model itself is inexact: catches a wrong cache."""


@dataclass(frozen=True)
class _Expected:
    """One logits row (V,), and by how much (relatively) another may differ from it."""

    logits: Tensor
    tolerance: float


@dataclass(frozen=True)
class _Finding:
    """How far (relatively) something was from what was expected, and how far it may be."""

    error: float
    tolerance: float
    what: str = "logits differ"

    @property
    def excess(self) -> float:
        """Above 1 it is no rounding; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.tolerance


@dataclass(frozen=True)
class _Reference:
    """The tree computed branch by branch: what to expect along each leaf path, prompt included."""

    prompt: list[int]
    nodes: list[int]
    expected: list[list[_Expected]]
    disturbed: float
    """How much the drafted tokens change the logits before them (0 for a sound model)."""

    @property
    def draft(self) -> Draft:
        return Draft(tuple(self.nodes), _PARENTS, ("self-test",) * len(self.nodes))

    def at(self, got: Tensor, node: int) -> _Finding:
        """Judge the logits (V,) after a node, -1 for the root."""
        if node == -1:
            return self.along(got, 0, _PROMPT - 1)
        leaf = next(i for i, path in enumerate(_LEAVES) if node in path)
        return self.along(got, leaf, _PROMPT + _LEAVES[leaf].index(node))

    def along(self, got: Tensor, leaf: int, position: int) -> _Finding:
        """Judge the logits (V,) after a position of a leaf path."""
        wanted = self.expected[leaf][position]
        return _Finding(_distance(got, wanted.logits), wanted.tolerance)

    def loose(self) -> _Reference:
        """The same, to be met roughly."""
        roughly = [[replace(one, tolerance=_SHORT_CHECK) for one in path] for path in self.expected]
        return replace(self, expected=roughly)


def probe(loaded: LoadedModel) -> Capabilities:
    """Find the capabilities of a model (whatever `loaded.capabilities` says meanwhile).

    Raises UnsupportedError if its logits depend on later tokens: it cannot generate at all.
    """
    with torch.inference_mode():
        return replace(_find(loaded), position_sizes=_position_sizes(loaded))


def _find(loaded: LoadedModel) -> Capabilities:
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
        reference = reference.loose()
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
        problem = _problem(_check_steps, loaded, plain, reference)
        if problem is not None and kind == "replay":
            # Its own cache may be inexact. What its own `generate` does is right all the same.
            reasons.append(f"one token at a time with its own cache: {problem}")
            problem = _problem(_check_generate, loaded, plain, reference)
        if problem is None:
            return replace(plain, reasons=tuple(reasons))
        reasons.append(f"plain decoding with its cache ({kind}): {problem}")
    return Capabilities("plain", own, "none", batch=False, reasons=tuple(reasons))


def _try_parallel(
    loaded: LoadedModel, reference: _Reference, reasons: list[str], own: str
) -> Capabilities | None:
    if windows_by_slot(loaded.config):  # wider ones than the self-test's texts, usually
        reasons.append("trees: it limits layers to a window by slot, not by position")
        return _try_chain(loaded, reference, reasons, own, "rows")
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
        packed = problem is None and attention == "draftsmith"
        if packed:
            problem = _problem(_check_packed, loaded, replace(tree, packed=True), reference)
            if problem is not None:
                reasons.append(f"several rows without padding: {problem}")
                packed, problem = False, None
        return replace(tree, batch=problem is None, packed=packed, reasons=tuple(reasons))
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
    chain = Capabilities("chain", own, cache, batch=False)
    problem = _problem(_check_chain, loaded, chain, reference)
    if problem is None:
        return replace(chain, reasons=tuple(reasons))
    reasons.append(f"chains: {problem}")
    return None


def _problem(check: Any, loaded: LoadedModel, as_if: Capabilities, ref: _Reference) -> str | None:
    """Run one check on the model as if it had these capabilities; None if it agrees."""
    try:
        findings = check(Runner(replace(loaded, capabilities=as_if)), ref)
    except (KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Models are third-party code: whatever it raises is the reason.
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")
    worst = max(findings, key=lambda finding: finding.excess)
    if worst.excess <= 1:
        return None
    return f"{worst.what} by {worst.error:.1e}, more than rounding ({worst.tolerance:.1e})"


def _check_tree(runner: Runner, ref: _Reference) -> list[_Finding]:
    row = runner.open(ref.prompt)
    runner.prefill(row)
    output = runner.forward([row], [ref.draft])[0].logits
    found = [ref.at(output[1 + node], node) for node in range(-1, len(_PARENTS))]
    # Accept the branch that is not first in memory, then take one plain step: compaction works.
    path, leaf = _LEAVES[1][:2], _LEAVES[1][2]
    runner.commit([row], [path], [[ref.nodes[node] for node in (*path, leaf)]])
    found.append(ref.at(runner.forward([row], [EMPTY])[0].logits[0], leaf))
    runner.close(row)
    return found


def _check_batch(runner: Runner, ref: _Reference) -> list[_Finding]:
    """A tree beside a shorter row whose chain is the rest of the prompt."""
    row, short = runner.open(ref.prompt), runner.open(ref.prompt[:-4])
    runner.prefill(row)
    runner.prefill(short)
    chain = Draft.chain(ref.prompt[-4:], "self-test")
    tree, line = runner.forward([row, short], [ref.draft, chain])
    found = [ref.at(tree.logits[1 + node], node) for node in range(-1, len(_PARENTS))]
    return found + [ref.along(got, 0, _PROMPT - 5 + i) for i, got in enumerate(line.logits)]


def _check_packed(runner: Runner, ref: _Reference) -> list[_Finding]:
    """Beside a tree and a chain a plain row and a chunk, in an order that mixes lengths."""
    chunked, plain = runner.open(ref.prompt), runner.open(ref.prompt[:3])
    runner.prefill(plain)
    row, short = runner.open(ref.prompt), runner.open(ref.prompt[:-4])
    runner.prefill(row)
    rows = [plain, chunked, row, short]
    chain = Draft.chain(ref.prompt[-4:], "self-test")
    one, none, tree, line = runner.forward(rows, [EMPTY, EMPTY, ref.draft, chain], [1, 5, 1, 8])
    found = [ref.along(one.logits[0], 0, 2)]
    found += [ref.at(tree.logits[1 + node], node) for node in range(-1, len(_PARENTS))]
    found += [ref.along(got, 0, _PROMPT - 5 + i) for i, got in enumerate(line.logits)]
    assert not len(none.logits)
    # Accept the branch that is not first in memory, then go on: each row kept what is its own.
    path, leaf = _LEAVES[1][:2], _LEAVES[1][2]
    runner.commit(
        rows,
        [(), (), path, range(4)],
        [[ref.prompt[3]], (), [ref.nodes[node] for node in (*path, leaf)], [*chain.tokens, 0]],
    )
    outputs = runner.forward(rows[:3], [EMPTY] * 3)
    found += [
        ref.along(outputs[0].logits[0], 0, 3),
        ref.along(outputs[1].logits[0], 0, _PROMPT - 1),
    ]
    return [*found, ref.at(outputs[2].logits[0], leaf)]


def _check_chain(runner: Runner, ref: _Reference) -> list[_Finding]:
    """A chain accepted in part, then one accepted whole, then every token alone.

    The last belongs to it: a step without a draft must continue as the verified chains do.
    """
    row = runner.open(ref.prompt)
    runner.prefill(row)
    first, last = _LEAVES[0], _LEAVES[1]
    output = runner.forward([row], [_chain(ref, first)])[0].logits
    found = [ref.at(got, node) for got, node in zip(output, (-1, *first), strict=True)]
    state = first_recurrent_state(row.state)
    runner.commit([row], [[0]], [[ref.nodes[first[0]], ref.nodes[last[1]]]])
    output = runner.forward([row], [_chain(ref, last[2:])])[0].logits
    found += [ref.at(got, node) for got, node in zip(output, last[1:], strict=True)]
    runner.close(row)
    return found + _check_steps(runner, ref, state)


def _check_steps(runner: Runner, ref: _Reference, state: Tensor | None = None) -> list[_Finding]:
    """The first path, one token at a time from its very beginning; to end in `state`, if given.

    Small weights may hide from the logits that a state was not continued, but it shows itself.
    """
    ids = ref.prompt + [ref.nodes[node] for node in _LEAVES[0]]
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


def _state_finding(runner: Runner, state: Tensor, stepped: Tensor) -> _Finding:
    error = _distance(state.flatten(), stepped.flatten())
    return _Finding(error, _floor(runner.loaded), "the recurrent state differs")


def _check_generate(runner: Runner, ref: _Reference) -> list[_Finding]:
    """Steps that say what the model's own `generate` says."""
    model, steps = runner.loaded.model, len(_LEAVES[0])
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
    for theirs, token in zip(out.logits, out.sequences[0, _PROMPT:].tolist(), strict=True):
        ours = runner.forward([row], [EMPTY])[0].logits[0]
        found.append(_Finding(_distance(ours, theirs[0]), _floor(runner.loaded)))
        runner.commit([row], [[]], [[token]])
    runner.close(row)
    return found


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
    with _rounded(loaded):
        trial = [_whole(forward, path) for path in paths]
    # One-token passes and wide passes use other kernels: what sets them apart is rounding as well.
    alone = _distance(_whole(forward, prompt[:1])[0], logits[0][0])
    noise = [
        [max(_distance(a, b), alone) for a, b in zip(one, other, strict=True)]
        for one, other in zip(trial, logits, strict=True)
    ]
    for path in noise:  # which share the prompt: three trials of it
        path[:_PROMPT] = map(max, *(one[:_PROMPT] for one in noise))
    usual = statistics.median(change for path in noise for change in path)
    floor = _floor(loaded)

    def tolerance(change: float) -> float:
        most = math.inf if change > _KNIFE_EDGE * usual else max(_MOST_NOISE, change)
        return min(max(floor, _MARGIN * change), most)

    expected = [
        [_Expected(row, tolerance(change)) for row, change in zip(one, changes, strict=True)]
        for one, changes in zip(logits, noise, strict=True)
    ]
    shared = [(one[i], logits[0][i]) for one in logits[1:] for i in range(_PROMPT)]
    return _Reference(prompt, nodes, expected, max(_distance(a, b) for a, b in shared))


def _floor(loaded: LoadedModel) -> float:
    """A difference that is rounding in any model, by its type and its width.

    Results are rounded to the type; sums of `width` products, in any order, as float32 is.
    """
    sums = torch.finfo(torch.promote_types(loaded.dtype, torch.float32)).eps
    width = int(getattr(loaded.config, "hidden_size", 0) or 1)
    return _MARGIN * max(torch.finfo(loaded.dtype).eps, _MARGIN * sums * math.sqrt(width))


@contextmanager
def _rounded(loaded: LoadedModel) -> Iterator[None]:
    """Every embedding and every block's output off by a last bit, up or down at random."""
    share, generator = torch.finfo(loaded.dtype).eps, torch.Generator().manual_seed(0)

    def off(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (off(None, None, output[0]), *output[1:])
        kind: Any = {"dtype": torch.int8, "device": generator.device}  # whatever the default is
        sign = 2 * torch.randint(2, output.shape, generator=generator, **kind) - 1
        return output * (1 + share * sign.to(output.device, output.dtype))

    blocks = loaded.blocks if loaded.blocks is not None else ()
    hooks = [
        module.register_forward_hook(off)
        for module in (loaded.model.get_input_embeddings(), *blocks)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


def _position_sizes(loaded: LoadedModel) -> tuple[float, ...]:
    """`Capabilities.position_sizes`, read from a cache of the model's own.

    Configurations tell it in too many ways: shared heads, latent attention, sizes by layer.
    """
    try:
        output = Forward(loaded.model, None)([[loaded.vocab_size // 4]], [[0]], None, None, 1)
        layers = cache_of(output).layers
    except Exception:  # third-party code; `row_bytes` then asks the configuration
        return ()
    pairs = [(getattr(one, "keys", None), getattr(one, "values", None)) for one in layers]
    size = loaded.dtype.itemsize
    found = tuple(
        sum(t.nbytes / t.shape[-2] for t in pair if isinstance(t, Tensor) and t.numel()) / size
        for pair in pairs
    )
    return found if any(found) else ()


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
    own = unwrapped(model)
    if getattr(own, "_is_stateful", False) or recurrent_cache(config) is not None:
        return True
    types = set(getattr(config, "layer_types", None) or ())
    types |= set(getattr(config, "layers_block_type", None) or ())
    return bool(types & {"conv", "linear_attention", "mamba", "hybrid", "recurrent"})
