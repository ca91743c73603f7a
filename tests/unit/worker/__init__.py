"""Tests of the worker: recorded steps."""
