"""Speculative decoding for Hugging Face models: faster answers, the same answers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.chat import Chat
    from draftsmith.core.drafter import Drafter
    from draftsmith.core.result import GenerationResult, Stats
    from draftsmith.core.sampling import SamplingParams
    from draftsmith.drafters.registry import parse as drafter
    from draftsmith.engine import Engine
    from draftsmith.errors import DraftsmithError
    from draftsmith.hf import accelerate, restore

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Drafter",
    "DraftsmithError",
    "Engine",
    "GenerationResult",
    "SamplingParams",
    "Stats",
    "accelerate",
    "drafter",
    "restore",
]

_WHERE = {
    "Chat": "chat:Chat",
    "Drafter": "core.drafter:Drafter",
    "DraftsmithError": "errors:DraftsmithError",
    "Engine": "engine:Engine",
    "GenerationResult": "core.result:GenerationResult",
    "SamplingParams": "core.sampling:SamplingParams",
    "Stats": "core.result:Stats",
    "accelerate": "hf:accelerate",
    "drafter": "drafters.registry:parse",
    "restore": "hf:restore",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `draftsmith --help` must not wait for torch and transformers."""
    if name not in _WHERE:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    module, attribute = _WHERE[name].split(":")
    return getattr(import_module(f"draftsmith.{module}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
