"""The version of everything that decides output bytes."""

#: Bumped whenever the same source and options would give different bytes.
NUMERICS_VERSION = 2
