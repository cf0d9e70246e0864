"""Which of several ways to compute is taken."""

from __future__ import annotations

from draftsmith.model.measure import cheapest

FLOAT = {("float32", 1), ("float32", 2)}


def test_plain_and_wide_passes_count_alike() -> None:
    # A processor without bfloat16 arithmetic: plain passes are cheaper in it, wide ones costly.
    ways = {("float32", 1): {1: 1.0, 16: 2.0}, ("bfloat16", 1): {1: 0.6, 16: 6.0}}
    assert cheapest(ways, FLOAT) == ("float32", 1)
    ways = {("float32", 1): {1: 1.0, 16: 2.0}, ("bfloat16", 2): {1: 0.6, 16: 1.1}}
    assert cheapest(ways, FLOAT) == ("bfloat16", 2)


def test_the_usual_way_is_kept_unless_another_is_clearly_cheaper() -> None:
    ways = {
        ("float32", 1): {1: 1.0, 16: 2.0},
        ("bfloat16", 1): {1: 0.95, 16: 1.9},
        ("float32", 2): {1: 2.0, 16: 2.0},
    }
    assert cheapest(ways, FLOAT) == ("float32", 1)
    assert cheapest({("bfloat16", 1): {1: 1.0, 16: 2.0}}, FLOAT) == ("bfloat16", 1)


def test_without_a_pass_of_16_the_widest_narrower_one_counts() -> None:
    ways = {"float32": {1: 1.0, 8: 1.5, 64: 9.0}, "bfloat16": {1: 0.5, 8: 5.0, 64: 6.0}}
    assert cheapest(ways, {"float32"}) == "float32"
    assert cheapest({"float32": {1: 1.0}, "bfloat16": {1: 0.5}}, {"float32"}) == "bfloat16"
