"""Checkpoints as files: open, plan, stream, write, journal, finalize. No arithmetic."""
