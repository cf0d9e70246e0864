"""Measuring, tuning and training; only its own commands load it."""
