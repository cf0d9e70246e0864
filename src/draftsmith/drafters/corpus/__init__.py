"""A corpus on disk, and look-ups in it. `draftsmith corpus build` (lab/corpus) writes it."""
