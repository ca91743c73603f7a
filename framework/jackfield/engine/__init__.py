"""The engine: requests in, outputs out."""
