"""The project's own models plugins."""
