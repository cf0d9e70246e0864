"""Everything that measures, tunes or trains; only its own commands load it."""
