"""The objectives against sums written out by hand, and the adaptive rows, which learn apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from draftsmith.lab.train.batches import Batch
from draftsmith.lab.train.loss import loss_of
from draftsmith.lab.train.rows import AdaptiveRows

A, V = 6, 7
IDS = torch.tensor([[0, 1, 2, 3, 4], [5, 4, 3, 2, 1]])
DEPTHS = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 0]])
BATCH = Batch(IDS, DEPTHS)
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(0))


def logits(ids: Tensor) -> Tensor:
    """(R, T, V): a model whose distribution depends on the two last tokens."""
    before = torch.nn.functional.pad(ids, (1, 0))[:, :-1]
    return TABLE[ids] + 0.5 * TABLE[before].flip(-1)


def minus_log(row: list[int], position: int, label: int) -> float:
    """-log p(label), the distribution without the adaptive token, from the definition."""
    fed = torch.tensor([row])
    scores = logits(fed)[0, position].tolist()
    mass = sum(math.exp(score) for token, score in enumerate(scores) if token != A)
    return -math.log(math.exp(scores[label]) / mass)


MIXED = [[0, A, A, 3], [5, 4, A, 2]]
PLAIN = [[0, 1, 2, 3], [5, 4, 3, 2]]
LABELS = [[1, 2, 3, 4], [4, 3, 2, 1]]
REPLACED = [(0, 1), (0, 2), (1, 2)]
ALL = [(row, position) for row in range(2) for position in range(4)]


def summed(rows: list[list[int]], at: list[tuple[int, int]]) -> float:
    return sum(minus_log(rows[r], t, LABELS[r][t]) for r, t in at)


def test_improved_is_equation_9() -> None:
    loss = loss_of("improved", logits, BATCH, [A], BATCH.labels.numel(), w=0.7)
    plain, adaptive = summed(PLAIN, ALL), summed(MIXED, REPLACED)
    assert float(loss.total) == pytest.approx((plain / 8 + 0.7 * adaptive / 8) / 2, rel=1e-5)
    assert float(loss.standard) == pytest.approx(plain, rel=1e-5)
    assert float(loss.adaptive) == pytest.approx(adaptive, rel=1e-5)


def test_basic_is_equation_8() -> None:
    loss = loss_of("basic", logits, BATCH, [A], BATCH.labels.numel())
    assert float(loss.total) == pytest.approx(summed(MIXED, ALL) / 8, rel=1e-5)
    standard = [at for at in ALL if at not in REPLACED]
    assert float(loss.standard) == pytest.approx(summed(MIXED, standard), rel=1e-5)
    assert float(loss.adaptive) == pytest.approx(summed(MIXED, REPLACED), rel=1e-5)


def test_plain_is_equation_7() -> None:
    loss = loss_of("plain", logits, BATCH, [A], BATCH.labels.numel())
    assert float(loss.total) == pytest.approx(summed(PLAIN, ALL) / 8, rel=1e-5)


@pytest.mark.parametrize("objective", ["improved", "basic", "plain"])
def test_parts_of_a_step_add_up_to_it(objective: str) -> None:
    positions = BATCH.labels.numel()
    whole = loss_of(objective, logits, BATCH, [A], positions)
    parts = [
        loss_of(objective, logits, BATCH.part(slice(r, r + 1)), [A], positions) for r in range(2)
    ]
    assert float(whole.total) == pytest.approx(float(parts[0].total + parts[1].total), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_rows_are_looked_up_learnt_and_folded(scale: float) -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 3)
    if scale != 1:
        table.embed_scale = scale  # type: ignore[assignment]
        table.register_forward_hook(lambda _, __, found: found * scale)
    before = table.weight.detach().clone()
    ids = torch.tensor([[0, 4, 5], [4, 1, 4]])
    plain = table(ids)
    rows = AdaptiveRows(table, (4, 2))
    assert torch.equal(table(ids), plain), "nothing is learnt yet"
    table(ids).sum().backward()
    assert rows.learnt.grad is not None
    assert rows.learnt.grad.tolist() == [[3 * scale] * 3, [0.0] * 3]
    assert table.weight.grad is not None
    assert not table.weight.grad[4].any(), "the table's own row is left alone"
    assert table.weight.grad[5].any()
    with torch.no_grad():
        rows.learnt.add_(torch.tensor([[1.0], [2.0]]))
    taught = table(ids)
    rows.fold()
    torch.testing.assert_close(table(ids), taught)
    torch.testing.assert_close(table.weight[[4, 2]], before[[4, 2]] + torch.tensor([[1.0], [2.0]]))
    assert torch.equal(table.weight[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    assert [name for name, _ in table.named_parameters()] == ["weight"]
