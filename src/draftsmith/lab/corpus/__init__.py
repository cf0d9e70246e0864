"""Builds corpora: texts chosen by the target's own perplexity, with a suffix array on disk."""
