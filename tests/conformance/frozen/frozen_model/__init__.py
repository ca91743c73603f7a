"""Frozen model for Jackfield."""
