"""Chooses tokens from logits: parameters per slot, one vectorized pass per step."""

from jackfield.sampling.sampler import Sampler
from jackfield.sampling.state import SamplingState

__all__ = ["Sampler", "SamplingState"]
