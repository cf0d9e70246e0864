"""Callbacks that fail."""

from __future__ import annotations

from typing import Any


class Raises:
    """A processor, or as `rule` a stop rule, that raises at its n-th call, in each copy of it."""

    def __init__(self, error: BaseException, call: int, rule: bool = False) -> None:
        self.error, self.left, self.rule = error, call, rule

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise self.error
        return None if self.rule else scores
