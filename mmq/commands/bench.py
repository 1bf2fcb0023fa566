"""`mmq bench`."""

from __future__ import annotations

import click

from mmq.errors import UsageError
from mmq.invocation import Run, global_options


@click.command()
@click.option("--kernels", is_flag=True, help="The operations of the model's forward.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="cuda (ROCm too): the Triton kernels beside the roofline; cpu: the references beside a"
    " bare matrix product.",
)  # fmt: skip
@global_options
@click.pass_obj
def bench(run: Run, /, kernels: bool, device: str) -> int:
    """Throughput against the limits, on the machine it runs on.

    Conversion is timed by `mmq convert` itself: see timing in mmq-convert.json.
    """
    if not kernels:
        raise UsageError(
            "bench-what", "say what to time", expected="--kernels", hint="mmq bench --kernels"
        )
    from mmq.verify.kernels.bench import bench_kernels, bench_lines

    found = bench_kernels(device, run.console)
    run.console.result("\n".join(bench_lines(found)), {"command": "bench", **found.as_dict()})
    return 0
