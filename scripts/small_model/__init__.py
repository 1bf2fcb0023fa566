"""How the bundled small model was made: texts, tokenizer, training, rebalancing, release."""

import ctypes
import os
import sys

# before torch loads OpenMP: threads that spin while they wait slow each other down on busy cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if sys.platform == "linux":
    # glibc gives every large tensor back to the system, and fetching it again costs half a step:
    # M_MMAP_MAX 0, M_TRIM_THRESHOLD 2 GB (malloc.h)
    _libc = ctypes.CDLL(None)
    _libc.mallopt(-4, 0)
    _libc.mallopt(-1, 2_000_000_000)

#: What was set, for the log of a run.
SETTINGS = f"OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}"
