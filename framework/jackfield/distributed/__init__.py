"""Collectives over parallel groups."""

from jackfield.distributed.communicators import SingleCommunicator, TorchCommunicator

__all__ = ["SingleCommunicator", "TorchCommunicator"]
