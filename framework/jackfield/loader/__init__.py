"""Fills a built model from a checkpoint."""

from jackfield.loader.weights import load_dummy, load_weights

__all__ = ["load_dummy", "load_weights"]
