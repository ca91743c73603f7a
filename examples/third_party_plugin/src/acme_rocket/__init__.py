"""An attention backend for Jackfield."""
