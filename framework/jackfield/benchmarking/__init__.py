"""Measuring servers and engines: data sets, arrival times, timed requests, statistics, and pictures."""
