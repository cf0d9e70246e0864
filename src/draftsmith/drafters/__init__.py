"""Drafters: one idea, one file, named after its paper."""
