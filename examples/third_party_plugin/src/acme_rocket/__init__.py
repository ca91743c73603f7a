"""One of every kind of plugin for Jackfield."""
