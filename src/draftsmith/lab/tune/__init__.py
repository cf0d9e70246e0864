"""Finds a drafter's settings for a model: once, on a few prompts."""
