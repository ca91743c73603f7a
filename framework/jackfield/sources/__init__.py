"""Where models come from: local paths, Python packages, the Hugging Face hub."""

from jackfield.sources.progress import Progress
from jackfield.sources.resolve import default_cache_dir, resolve_model

__all__ = ["Progress", "default_cache_dir", "resolve_model"]
