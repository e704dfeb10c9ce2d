"""Measuring what a machine does, on the ranks that will use it."""
