"""mmq: MiniMax-M3 MXFP8 checkpoints to NVFP4, verified."""

__version__ = "0.1.0"
