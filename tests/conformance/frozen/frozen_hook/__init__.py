"""Frozen hook for Jackfield."""
