"""Facts about a checkpoint, read from json files and headers with bounded memory: no weights, no torch, no
transformers.
"""

from jackfield.checkpoint.config_reader import JsonConfigReader
from jackfield.checkpoint.facts import read_facts
from jackfield.checkpoint.generation import GenerationDefaults, generation_defaults
from jackfield.checkpoint.gguf_header import GgufFile, read_gguf
from jackfield.checkpoint.pooling import PoolingDefaults, pooling_defaults
from jackfield.checkpoint.tensors import TensorSource, open_tensors

__all__ = [
    "GenerationDefaults",
    "GgufFile",
    "JsonConfigReader",
    "PoolingDefaults",
    "TensorSource",
    "generation_defaults",
    "open_tensors",
    "pooling_defaults",
    "read_facts",
    "read_gguf",
]
