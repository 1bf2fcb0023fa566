"""One report schema for conversion and verification, and its renderings."""
