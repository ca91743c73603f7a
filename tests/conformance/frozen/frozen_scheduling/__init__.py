"""Frozen scheduling for Jackfield."""
