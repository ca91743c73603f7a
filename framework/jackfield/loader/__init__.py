"""Fills a built model from a checkpoint."""

from jackfield.loader.projections import load_projection
from jackfield.loader.reading import ReadAhead
from jackfield.loader.sharded_state import load_sharded_state, save_rank
from jackfield.loader.streams import READERS, open_stream
from jackfield.loader.weights import fill_weights, finalize, load_dummy, load_weights

__all__ = [
    "READERS",
    "ReadAhead",
    "fill_weights",
    "finalize",
    "load_dummy",
    "load_projection",
    "load_sharded_state",
    "load_weights",
    "open_stream",
    "save_rank",
]
