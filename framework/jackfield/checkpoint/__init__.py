"""Facts about a checkpoint, read from json files and headers with bounded memory: no weights, no torch, no
transformers.
"""

from jackfield.checkpoint.cache_scales import CacheScales, cache_scales_path, find_cache_scales
from jackfield.checkpoint.config_reader import JsonConfigReader
from jackfield.checkpoint.facts import module_facts, read_facts
from jackfield.checkpoint.formats import LOAD_FORMATS, format_of, reads
from jackfield.checkpoint.generation import GenerationDefaults, generation_defaults
from jackfield.checkpoint.gguf_header import GgufFile, read_gguf
from jackfield.checkpoint.overrides import overridden
from jackfield.checkpoint.pooling import PoolingDefaults, pooling_defaults
from jackfield.checkpoint.tensors import TensorSource, open_tensors

__all__ = [
    "LOAD_FORMATS",
    "CacheScales",
    "GenerationDefaults",
    "GgufFile",
    "JsonConfigReader",
    "PoolingDefaults",
    "TensorSource",
    "cache_scales_path",
    "find_cache_scales",
    "format_of",
    "generation_defaults",
    "module_facts",
    "open_tensors",
    "overridden",
    "pooling_defaults",
    "read_facts",
    "read_gguf",
    "reads",
]
