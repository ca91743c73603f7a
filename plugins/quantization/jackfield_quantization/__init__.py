"""The project's own quantization plugins."""
