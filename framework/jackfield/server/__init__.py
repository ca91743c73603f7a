"""The HTTP server: OpenAI's API and others over an engine that runs."""
