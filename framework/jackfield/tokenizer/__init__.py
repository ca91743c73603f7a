"""Text to ids and back: tokenizers of HF folders and of GGUF files, and incremental decoding."""

from jackfield.tokenizer.common import ids_in
from jackfield.tokenizer.detokenizer import IncrementalDetokenizer
from jackfield.tokenizer.load import has_tokenizer, load_tokenizer
from jackfield.tokenizer.wrapper import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "has_tokenizer", "ids_in", "load_tokenizer"]
