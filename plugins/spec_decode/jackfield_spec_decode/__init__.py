"""The project's own spec decode plugins."""
