"""`mmq verify --level kernels`: verdicts, what was not run, what --require asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest
from in_process import run_mmq
from kernel_workers import SharedWorker

from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings
from mmq.convert.run import convert as run_convert
from mmq.demo.bundled import bundled_model
from mmq.report.kernel_lines import kernel_lines
from mmq.report.schema import KernelResult, KernelsReport, VerifyReport
from mmq.verify.kernels import operations as ops
from mmq.verify.kernels import run, worker
from mmq.verify.kernels.run import Worker, unmet

FEW = (ops.STAGING, ops.ROUTER)


@pytest.fixture
def level(interpreting, monkeypatch):
    """`mmq verify --level kernels …` on some operations: exit code, events, result."""

    def call(*arguments, operations=FEW, instead=None, first=()):
        monkeypatch.setattr(run, "OPERATIONS", operations)
        monkeypatch.setattr(run, "Worker", SharedWorker(interpreting, instead, *first))
        code, events, _ = run_mmq("verify", "--level", "kernels", *arguments)
        return code, events, events[-1]

    return call


def of(events, kind):
    return [event for event in events if event["event"] == kind]


def test_emulated_on_a_cpu(level, tmp_path):
    code, events, result = level("--device", "cpu", "-o", tmp_path / "report.json")
    assert code == 0
    assert result["verdict"] == "pass"
    assert [r["op"] for r in result["kernels"]["results"]] == list(FEW)
    assert {r["status"] for r in result["kernels"]["results"]} == {"emulated"}
    assert result["kernels"]["backend"] == "interpreter"
    (note,) = [n for n in of(events, "note") if "level kernels" in n["message"]]
    assert "emulated: Triton interpreter" in note["message"]
    written = VerifyReport.model_validate_json((tmp_path / "report.json").read_bytes())
    assert written.kernels is not None
    assert len(of(events, "kernel")) == len(FEW)
    assert [level.level for level in written.levels] == ["kernels"]
    text = "\n".join(kernel_lines(written.kernels))
    assert "emulated: Triton interpreter" in text
    assert "2 operations: 2 emulated" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("fault", "op"),
    [("a staged code", ops.STAGING), ("router scores 1e-4 off", ops.ROUTER)],
)
def test_planted_fault_fails_and_names_operation_and_case(level, fault, op):
    from parity_faults import run_with

    code, events, result = level(instead=run_with, first=(fault,))
    assert code == 3
    assert result["verdict"] == "fail"
    found = of(events, "finding")
    assert {finding["id"] for finding in found} == {"kernel-differs"}
    assert all(finding["where"].startswith(f"{op}; small: ") for finding in found)
    if op == ops.STAGING:
        assert found[0]["where"].endswith("all codes × all scales")
        assert found[0]["got"] == "1 of 65,536 values differ"
        assert found[0]["expected"] == "the same bits"


def test_a_fault_counts_more_than_the_machine(level):
    from parity_faults import run_with

    code, events, _ = level("--require", "native", instead=run_with, first=("a staged code",))
    assert code == 3
    assert not of(events, "error")


def test_a_kernel_that_raises(level):
    from parity_faults import crash

    code, events, result = level(instead=crash)
    assert code == 3
    (finding,) = of(events, "finding")
    assert (finding["id"], finding["where"]) == ("kernel-crashed", ops.ROUTER)
    assert "illegal memory access" in finding["got"]
    assert [r["status"] for r in result["kernels"]["results"]] == ["emulated", "crashed"]


def test_a_process_that_ends_is_replaced():
    with Worker(interpreted=True) as process:
        assert process.call(os.getenv, "TRITON_INTERPRET") == "1"
        with pytest.raises(BrokenProcessPool):
            process.call(os._exit, 3)
        assert process.call(os.getpid) != os.getpid()
    with Worker(interpreted=False) as process:
        assert process.call(os.getenv, "TRITON_INTERPRET") == "0"


@pytest.mark.parametrize("require", ["native", "sm_100", "gfx950"])
def test_require_is_not_met_by_emulation(level, require):
    """sm_100 is what the interpreter pretends to be, and yet none."""
    code, events, result = level("--require", require)
    assert code == 6
    (error,) = of(events, "error")
    assert error["id"] == "kernels-not-native"
    assert error["expected"] == require
    assert result["verdict"] == "pass"


def test_no_gpu(level):
    code, events, _ = level("--device", "cuda")
    assert code == 6
    assert of(events, "error")[0]["id"] in ("device-missing", "backend-missing")


def test_without_triton_nothing_counts_as_passed(tmp_path):
    """In a process, and its children, that cannot import it."""
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "verify", "--level", "kernels", "--json", "-o", "k.json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert of(events, "error")[0]["id"] == "kernels-not-run"
    report = VerifyReport.model_validate_json((tmp_path / "k.json").read_bytes())
    assert report.verdict == "inconclusive"
    assert report.levels[0].status == "skipped"
    assert report.kernels is not None
    assert [r.op for r in report.kernels.results] == list(ops.OPERATIONS)
    assert {(r.status, r.reason) for r in report.kernels.results} == {
        ("skipped", "needs triton: no triton here")
    }


def some_report(target="sm_100", **statuses):
    return KernelsReport(
        device="B200", backend="cuda", target=target, triton="3.9", torch="2.13",
        results=[
            KernelResult(
                op=op, status=status, path="native", reason="", target=target, cases=1, values=1,
                worst=0.0, bound=0.0, exact=True, seconds=0.0,
            )
            for op, status in statuses.items()
        ],
    )  # fmt: skip


def test_what_require_means():
    everything = some_report(a="native", b="native")
    assert unmet(everything, None) is None
    assert unmet(everything, "native") is None
    assert unmet(everything, "sm_100") is None
    other = unmet(everything, "sm_103")
    assert other is not None
    assert other.exit_code == 6
    for status in ("emulated", "skipped", "crashed"):
        one_not = some_report(a="native", b=status)
        assert unmet(one_not, None) is None
        error = unmet(one_not, "native")
        assert error is not None
        assert error.where == "b"
    nothing = unmet(some_report(a="skipped"), None)
    assert nothing is not None
    assert nothing.id == "kernels-not-run"


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["--level", "kernels", "--against", "x"], "option-conflict"),
        (["x", "--require", "native"], "option-conflict"),
        (["x", "--device", "cpu", "--level", "structure"], "option-conflict"),
        ([], "usage"),
        (["--level", "weights"], "usage"),
        (["--level", "kernels", "--require", "sm_89"], "usage"),
    ],
)
def test_usage(arguments, id):
    code, events, _ = run_mmq("verify", *arguments)
    assert code == 2
    assert of(events, "error")[0]["id"] == id


@pytest.fixture(scope="module")
def small_output(tmp_path_factory):
    """The bundled model in NVFP4."""
    import io

    from mmq.console import Console

    out = tmp_path_factory.mktemp("kernels") / "out"
    quiet = Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())
    run_convert(str(bundled_model()), out, ConvertOptions(), RunSettings(jobs=1), quiet)
    return out


def test_on_a_layer_of_a_checkpoint(level, small_output, interpreting):
    """The router's own weights, the cache's own scales; nothing is written."""
    before = sorted(path.name for path in small_output.iterdir())
    some = ops.write_op("fp8"), ops.ROUTER
    code, _, result = level(small_output, operations=some)
    assert code == 0, result
    assert result["checkpoint"]["tensors"] > 100
    assert sorted(path.name for path in small_output.iterdir()) == before
    assert interpreting.call(worker.prepare, str(small_output), False) == ["small", "layer 1"]
    outcome = interpreting.call(worker.run_operation, ops.ROUTER, str(small_output), False)
    cases = [c.case for c in outcome.comparisons]
    assert sum(case.startswith("layer 1: ") for case in cases) == len(cases) / 2


def test_a_large_layer_is_cut_for_the_interpreter(interpreting, small_output):
    """One rank's heads, and some columns and rows of what is left; the name says so."""
    from parity_faults import on_a_cut_layer

    some = ops.projection_op("bf16"), ops.ROUTER, ops.W4A4
    name, cases = interpreting.call(on_a_cut_layer, str(small_output), *some)
    assert name == "layer 1, 128 of 256 columns, 64 of 96 rows"
    assert {case.case.split(": ")[0] for case in cases} == {name}
    assert [case for case in cases if case.ratio > 1] == []


@pytest.mark.slow
def test_all_operations_on_a_layer_of_a_checkpoint(level, small_output):
    code, _, result = level(small_output, operations=ops.OPERATIONS)
    assert code == 0, result
    assert {r["status"] for r in result["kernels"]["results"]} == {"emulated"}


def test_a_checkpoint_without_nvfp4_experts(level):
    """What it lacks is skipped and says so; the operation ran on made-up weights all the same."""
    code, _, result = level(bundled_model(), operations=(ops.W4A16,))
    assert code == 0
    (skipped,) = result["levels"][0]["skipped"]
    assert skipped == (
        f"{ops.W4A16}, on the checkpoint's weights: the experts of layer 1 are not NVFP4"
    )


def test_a_checkpoint_that_is_not_there(level, tmp_path):
    code, events, _ = level(tmp_path / "none")
    assert code == 4
    assert of(events, "error")[0]["id"] == "out-not-found"
