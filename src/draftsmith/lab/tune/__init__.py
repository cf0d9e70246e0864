"""Finding the settings of a drafter that suit a model: once, on a few prompts."""
