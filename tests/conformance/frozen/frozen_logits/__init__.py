"""Frozen logits for Jackfield."""
