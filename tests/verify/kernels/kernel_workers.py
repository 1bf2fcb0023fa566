"""Stand-ins for the process of level kernels, so that tests share one and plant things in it."""

from __future__ import annotations

from mmq.verify.kernels import worker


class SharedWorker:
    """Calls go to the tests' own process; `instead` may replace the run of an operation."""

    def __init__(self, process, instead=None, *first):
        self.process, self.instead, self.first = process, instead, first

    def __call__(self, *, interpreted):
        assert interpreted
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def call(self, function, *arguments):
        if self.instead is not None and function is worker.run_operation:
            return self.process.call(self.instead, *self.first, *arguments)
        return self.process.call(function, *arguments)

    def stop(self):
        raise AssertionError("an emulated error is no reason for another process")
