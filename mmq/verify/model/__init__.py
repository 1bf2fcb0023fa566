"""The M3 text model, streamed layer by layer over checkpoints of any format mmq reads."""
