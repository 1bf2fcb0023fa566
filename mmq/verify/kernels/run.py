"""Level kernels: run every operation where the machine can, and say where and how it ran.

An operation is executed natively on a GPU, emulated by Triton's interpreter on a CPU, or skipped
with a reason; nothing that was not run counts as passed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from mmq.console import Console
from mmq.convert.device import find_place
from mmq.errors import BadInputError, MachineError
from mmq.report.findings import Finding
from mmq.report.schema import KernelResult, KernelsReport
from mmq.verify.kernels import worker
from mmq.verify.kernels.operations import OPERATIONS
from mmq.verify.kernels.worker import Device, Outcome
from mmq.verify.log import LevelLog
from mmq.verify.subject import as_finding

_T = TypeVar("_T")
Status = Literal["native", "emulated", "skipped", "crashed"]

_INTERPRET = "TRITON_INTERPRET"


def check_kernels(
    out: str | None, device: str | None, log: LevelLog, console: Console
) -> KernelsReport:
    """Run the level; findings go to `log`.

    Args:
        out: a checkpoint, one of whose layers each operation runs on too.
        device: "cpu" for the interpreter, "cuda" for the GPU; None for the GPU if there is one.

    Raises:
        MachineError: `device` is "cuda" and there is none.
    """
    if device == "cuda":
        find_place("cuda")
    device = device or ("cuda" if gpu_is_there() else "cpu")
    with Worker(interpreted=device == "cpu") as process:
        where = process.call(worker.describe)
        if isinstance(where, str):
            log.leave_out(f"all kernels: {where}")
            return _nothing(where)
        console.note(f"level kernels: {_how(where)}")
        try:
            process.call(worker.prepare, out, where.native)
        except BadInputError as error:
            log.add(as_finding(error))
            out = None
        results = []
        for op in OPERATIONS:
            outcome = _outcome(process, op, out, where)
            results.append(_result(outcome, where))
            _take_in(outcome, results[-1], log)
            console.event("kernel", "", **results[-1].model_dump())
    return KernelsReport(
        device=where.name, backend=where.backend, target=where.target, triton=where.triton,
        torch=where.torch, results=results,
    )  # fmt: skip


def gpu_is_there() -> bool:
    """Whether PyTorch sees a GPU, of either maker."""
    import torch

    return torch.cuda.is_available()


def unmet(report: KernelsReport, require: str | None) -> MachineError | None:
    """What `--require` says to a report, and what every report must have: something that ran."""
    if not any(result.status in ("native", "emulated") for result in report.results):
        return MachineError(
            "kernels-not-run", "no kernel ran on this machine", got=report.device,
            hint="pip install 'mmq-toolkit[gpu]' (Linux); mmq doctor says what is missing",
        )  # fmt: skip
    if require is None:
        return None
    missing = [r.op for r in report.results if r.status != "native"]
    wrong = require not in ("native", report.target)
    if not missing and not wrong:
        return None
    what = f"{len(missing)} of {len(report.results)} operations" if missing else "the operations"
    return MachineError(
        "kernels-not-native",
        f"{what} did not run natively on {'a GPU' if require == 'native' else require}",
        where=", ".join(missing[:3]) + (" …" if len(missing) > 3 else ""),
        got=f"{report.target}, {report.device}", expected=require,
        hint=f"mmq verify --level kernels --device cuda --require {require} on such a machine",
    )  # fmt: skip


class Worker:
    """A fresh process that has the kernels, replaced when one ends it.

    Args:
        interpreted: run kernels in Triton's interpreter.
    """

    def __init__(self, *, interpreted: bool) -> None:
        self._interpreted = interpreted
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What `function` returns there.

        Raises:
            BrokenProcessPool: it ended the process; the next call starts another.
        """
        with _environment(self._interpreted):
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            future = self._pool.submit(function, *arguments)
        try:
            return future.result()
        except BrokenProcessPool:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process; the next call starts another."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


@contextmanager
def _environment(interpreted: bool) -> Iterator[None]:
    """The variable as a process that starts now is to find it."""
    before = os.environ.get(_INTERPRET)
    os.environ[_INTERPRET] = "1" if interpreted else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERPRET]
        else:
            os.environ[_INTERPRET] = before


def _outcome(process: Worker, op: str, out: str | None, where: Device) -> Outcome:
    try:
        outcome = process.call(worker.run_operation, op, out, where.native)
    except BrokenProcessPool as error:
        return Outcome(op, "", "", [], 0.0, error=f"the process ended: {error}")
    if outcome.error and where.native:
        process.stop()  # an error on the device may leave nothing usable behind
    return outcome


def _how(where: Device) -> str:
    if where.native:
        return f"natively on {where.name}, {where.target}, Triton {where.triton}"
    return (
        f"emulated: Triton interpreter, Triton {where.triton}, as if for {where.target}, at small"
        " sizes; says nothing about a GPU's own instructions"
    )


def _result(outcome: Outcome, where: Device) -> KernelResult:
    """One operation's entry: the case that is worst beside its bound stands for all."""
    found = outcome.comparisons
    # Among equals one with a bound says more than one without.
    worst = max(found, key=lambda c: (c.ratio, c.bound), default=None)
    status: Status = "native" if where.native else "emulated"
    if outcome.error:
        status = "crashed"
    elif not found:
        status = "skipped"
    return KernelResult(
        op=outcome.op,
        status=status,
        path=outcome.path,
        reason=outcome.error or (outcome.reason if found else outcome.left_out or "no cases"),
        target=where.target,
        cases=len(found),
        values=sum(c.values for c in found),
        worst=None if worst and not math.isfinite(worst.worst) else worst.worst if worst else 0.0,
        bound=worst.bound if worst else 0.0,
        exact=all(c.exact for c in found),
        seconds=round(outcome.seconds, 3),
    )


def _take_in(outcome: Outcome, result: KernelResult, log: LevelLog) -> None:
    """What an operation means for the level."""
    if outcome.error:
        log.run(outcome.op, 0, [Finding(
            "kernel-crashed", "error", f"{outcome.op}: the kernel could not be run",
            where=outcome.op, got=outcome.error.splitlines()[-1],
        )])  # fmt: skip
        return
    if result.status == "skipped":
        log.skip(f"{outcome.op}: {result.reason}")
        return
    log.run(outcome.op, result.cases)
    if outcome.left_out:
        log.skip(f"{outcome.op}, on the checkpoint's weights: {outcome.left_out}")
    for comparison in outcome.comparisons:
        if comparison.ratio > 1:
            log.add(Finding(
                "kernel-differs", "error",
                f"{outcome.op} is not what the reference gives",
                where=f"{outcome.op}; {comparison.case}",
                got=_difference(comparison.exact, comparison.worst, comparison.values),
                expected="the same bits" if comparison.exact else f"at most {comparison.bound:.3g}",
            ))  # fmt: skip


def _difference(exact: bool, worst: float, values: int) -> str:
    return f"{worst:,.0f} of {values:,} values differ" if exact else f"{worst:.3g} apart"


def _nothing(reason: str) -> KernelsReport:
    """A report of a machine that runs no kernel: each operation skipped, none passed."""
    return KernelsReport(
        device="none", backend="none", target="", triton="", torch="",
        results=[
            KernelResult(
                op=op, status="skipped", path="", reason=reason, target="", cases=0, values=0,
                worst=0.0, bound=0.0, exact=False, seconds=0.0,
            )
            for op in OPERATIONS
        ],
    )  # fmt: skip
