"""The adaptive rows learn apart from their table, and end in it."""

from __future__ import annotations

import pytest
import torch

from draftsmith.lab.train.rows import AdaptiveRows


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
