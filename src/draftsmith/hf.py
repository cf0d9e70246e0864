"""Deprecated name of `draftsmith.integrations.transformers`; it goes with version 0.3."""

import warnings

from draftsmith.integrations.transformers import *  # noqa: F403

warnings.warn(
    "draftsmith.hf is now draftsmith.integrations.transformers; the old name goes with version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
