"""Speculative decoding for Hugging Face models: faster answers, the same answers."""

__version__ = "0.1.0"
