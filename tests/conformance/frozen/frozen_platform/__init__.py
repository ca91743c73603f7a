"""Frozen platform for Jackfield."""
