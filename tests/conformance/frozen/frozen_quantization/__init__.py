"""Frozen quantization for Jackfield."""
