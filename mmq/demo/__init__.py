"""`mmq demo`: the whole job on a small model made up on the spot."""

from mmq.demo.run import run_demo

__all__ = ["run_demo"]
