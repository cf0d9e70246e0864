"""Measures drafters: replays of recorded answers, and live runs."""
