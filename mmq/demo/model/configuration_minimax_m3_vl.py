"""Stands for the release's remote code; copied as it is."""
