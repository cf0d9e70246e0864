"""The small models that ship with the package."""
