"""Frozen experts for Jackfield."""
