"""Tables of costs."""

from __future__ import annotations

import pytest

from draftsmith.lab.bench.cost import CostTable, Point, Slope, recorded


def test_recorded_costs_hold_what_was_measured() -> None:
    points = [Point(b, c, p, b * (9 + p + c / 100), 0.0, 0.0)
              for b in (1, 4) for c in (100, 200, 300) for p in (1, 65)]  # fmt: skip
    table = CostTable("m", "cpu", "float32", 1, "", {}, tuple(points), {})
    cost = recorded(table)
    assert cost.relative(8) == pytest.approx((9 + 9 + 2) / (9 + 1 + 2))
    assert cost.at(4).relative(8) == pytest.approx((9 + 3 + 2) / (9 + 1 + 2))  # two for each row
    assert recorded(Slope(0.1)).at(2).relative(1) == pytest.approx(1.2 / 1.1)
