"""The references with table look-ups where they would take longest: for machines without numba."""
