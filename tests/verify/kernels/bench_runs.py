"""What the interpreting process runs for the tests of `mmq bench`."""

from __future__ import annotations

import torch

from mmq.verify.kernels.bench_cases import kernel_work


def run_all(geometry, load):
    """(operation, FLOPs, bytes, whether its first result is finite) of every piece of work."""
    ran = []
    for work in kernel_work(geometry, load, torch.device("cpu")):
        result = work.run()
        first = result[0] if isinstance(result, tuple) else result
        finite = first is None or bool(first.float().isfinite().all())
        ran.append((work.op, work.flops, work.nbytes, finite))
    return ran
