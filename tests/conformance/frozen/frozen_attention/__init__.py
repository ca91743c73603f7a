"""Frozen attention for Jackfield."""
