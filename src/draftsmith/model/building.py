"""One thread at a time builds a model."""

from __future__ import annotations

import threading

BUILDING = threading.RLock()
"""Held while transformers makes or reads a model.

Meanwhile it changes torch's initialization functions and default dtype for the whole process. Two
threads that overlap can leave both changed, and models with wrong weights.
"""
