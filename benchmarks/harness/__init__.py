"""Harness that all benchmarks share, and a folder for each claim that needs more than its script."""
