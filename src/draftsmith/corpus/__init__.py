"""Texts to draft from: chosen by the target's own perplexity, kept in a suffix array on disk."""
