"""Frozen drafter for Jackfield."""
