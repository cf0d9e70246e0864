"""Speculative decoding for Hugging Face models: faster answers, the same answers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.core.sampling import SamplingParams
    from draftsmith.core.stats import Stats
    from draftsmith.drafters.registry import parse as drafter
    from draftsmith.engine.chat import Chat
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult
    from draftsmith.errors import DraftsmithError
    from draftsmith.integrations.transformers import accelerate, restore
    from draftsmith.text.grammar import Grammar
    from draftsmith.text.thoughts import Thoughts

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Drafter",
    "DraftsmithError",
    "Engine",
    "GenerationResult",
    "Grammar",
    "SamplingParams",
    "Stats",
    "Thoughts",
    "accelerate",
    "drafter",
    "restore",
]

_WHERE = {
    "Chat": "engine.chat:Chat",
    "Drafter": "core.drafter:Drafter",
    "DraftsmithError": "errors:DraftsmithError",
    "Engine": "engine.engine:Engine",
    "GenerationResult": "engine.result:GenerationResult",
    "Grammar": "text.grammar:Grammar",
    "SamplingParams": "core.sampling:SamplingParams",
    "Stats": "core.stats:Stats",
    "Thoughts": "text.thoughts:Thoughts",
    "accelerate": "integrations.transformers:accelerate",
    "drafter": "drafters.registry:parse",
    "restore": "integrations.transformers:restore",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `draftsmith --help` must not wait for torch and transformers."""
    if name not in _WHERE:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    module, attribute = _WHERE[name].split(":")
    return getattr(import_module(f"draftsmith.{module}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
