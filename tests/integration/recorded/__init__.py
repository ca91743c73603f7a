"""Engines whose steps are recorded."""
