"""Measuring: replay recorded answers through the real loop."""
