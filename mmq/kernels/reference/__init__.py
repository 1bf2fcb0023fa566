"""Readable torch references: the normative definition of every operation."""
