"""The project's own platforms plugins."""
