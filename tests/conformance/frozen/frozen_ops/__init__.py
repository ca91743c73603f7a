"""Frozen ops for Jackfield."""
