"""Scheduling policies of the project."""
