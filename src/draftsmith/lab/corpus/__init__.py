"""Building corpora: texts chosen by the target's own perplexity, in a suffix array on disk."""
