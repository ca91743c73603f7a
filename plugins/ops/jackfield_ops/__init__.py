"""The project's own ops plugins."""
