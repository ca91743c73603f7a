"""The engine's own suite: ``pytest --pyargs jackfield.testing.suite --attention-backend NAME``."""
