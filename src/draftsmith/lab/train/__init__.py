"""SDSAT training: teaches a model to draft for itself (docs/training.md)."""
