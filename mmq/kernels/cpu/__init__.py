"""Table-driven numba implementations, bit-equal to the references."""
