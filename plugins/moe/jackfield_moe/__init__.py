"""The project's own moe plugins."""
