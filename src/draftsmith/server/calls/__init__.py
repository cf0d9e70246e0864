"""Tool calls in what a model writes: one parser for each format, and the table of formats."""
