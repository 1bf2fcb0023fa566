"""`mmq demo`: the whole job on the bundled small model."""

from mmq.demo.run import run_demo

__all__ = ["run_demo"]
