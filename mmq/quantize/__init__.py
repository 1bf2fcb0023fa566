"""Numerics and policy: knows tensors, never files."""
