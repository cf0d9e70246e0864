"""Tool calls in generated text: a parser for each format, and the table of formats."""
