"""What all benchmarks share. Nothing is imported here: the process that only starts the ranks needs no torch."""
