"""The project's own attention plugins."""
