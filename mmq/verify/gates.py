"""Gates: figures held against a target and a limit, and what that makes of the verdict.

    pass           at the target or better
    warn           between target and limit
    fail           beyond the limit
    inconclusive   within two standard errors of target or limit: more tokens would decide

The defaults are anchored on published NVFP4 conversions of large models (docs/verify.md); a small
model has its own, in a YAML file beside it:

    gates:
      kld_mean: {target: 0.05, fail: 0.07}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mmq.errors import UsageError
from mmq.report.figures import plural
from mmq.report.findings import Finding
from mmq.report.schema import GateResult, Measure

Status = Literal["pass", "warn", "inconclusive", "fail"]

#: Distance from a limit, in standard errors, within which a figure decides nothing.
_SIGMAS = 2.0
_MAX_WINDOWS = 1_000_000


@dataclass(frozen=True)
class Gate:
    """Limits of one figure.

    Attributes:
        name: of the figure, as reports have it.
        higher_is_better: which side is the good one.
        meaning: of the figure, for messages.
    """

    name: str
    target: float
    fail: float
    higher_is_better: bool
    meaning: str

    def judge(self, measure: Measure, windows: int | None = None) -> GateResult:
        """Hold a figure against the limits.

        Args:
            windows: that it comes from, to say how many more would decide.
        """
        error = measure.se or 0.0
        near = [
            limit
            for limit in (self.target, self.fail)
            if error and abs(measure.value - limit) < _SIGMAS * error
        ]
        status: Status
        if not math.isfinite(measure.value):
            status = "fail"
        elif near:
            status = "inconclusive"
        elif self._beats(measure.value, self.target):
            status = "pass"
        else:
            status = "warn" if self._beats(measure.value, self.fail) else "fail"
        more = None
        if status == "inconclusive" and windows:
            more = max(_more_windows(measure.value - limit, error, windows) for limit in near)
        return GateResult(
            gate=self.name, value=measure.value, se=measure.se, target=self.target,
            fail=self.fail, status=status, more_windows=more,
        )  # fmt: skip

    def _beats(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher_is_better else value <= limit


def _more_windows(distance: float, error: float, windows: int) -> int:
    """Windows to add until `distance` is two standard errors, which shrink as 1/√windows."""
    if not distance:
        return _MAX_WINDOWS
    wanted = math.ceil(windows * (_SIGMAS * error / abs(distance)) ** 2)
    return min(max(1, wanted - windows), _MAX_WINDOWS)


DEFAULT_GATES: Mapping[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate("delta_ppl_percent", 1.0, 3.0, False, "perplexity above the source's, in percent"),
        Gate("kld_mean", 0.05, 0.07, False, "mean KLD from the source's distribution, in nats"),
        Gate("top1", 0.95, 0.90, True, "share of tokens with the source's most likely token"),
        Gate("kv_delta_ppl_percent", 0.5, 1.0, False, "the KV cache's share of it, in percent"),
        Gate("sqnr_db_mean", 20.3, 19.5, True, "mean SQNR of NVFP4 weights, in dB"),
        Gate("sqnr_db_min", 19.5, 19.5, True, "SQNR of the worst NVFP4 weight, in dB"),
    )
}
#: Target of the mean SQNR for a conversion that searched its scales.
SEARCHED_SQNR_DB = 21.5


def read_gates(path: Path | None, *, searched: bool = False) -> dict[str, Gate]:
    """The default gates, changed by a YAML file.

    Args:
        searched: whether the conversion chose its block scales by least error.

    Raises:
        UsageError: it cannot be read, or names a gate or key that does not exist.
    """
    gates = dict(DEFAULT_GATES)
    if searched:
        gates["sqnr_db_mean"] = replace(gates["sqnr_db_mean"], target=SEARCHED_SQNR_DB)
    if path is None:
        return gates
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(path, error) from None
    entries = data.get("gates") if isinstance(data, dict) else None
    if not isinstance(entries, dict):
        missing = not isinstance(data, dict) or "gates" not in data
        why = "has no `gates:`" if missing else "has nothing under `gates:`"
        raise UsageError(
            "gates-invalid", f"{path} {why}", where=str(path),
            got="an empty file" if data is None else data,
            expected="such as gates: {kld_mean: {target: 0.05, fail: 0.07}}",
        )  # fmt: skip
    for name, limits in entries.items():
        if name not in gates:
            raise _bad(path, str(name), name, ", ".join(gates))
        gates[name] = _changed(gates[name], limits, path)
    return gates


def _unreadable(path: Path, error: Exception) -> UsageError:
    """Why there is no YAML to be had, with the line at fault where there is one."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        where, why = f"{path}:{mark.line + 1}", getattr(error, "problem", None) or "no YAML"
    else:
        where = str(path)
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return UsageError("gates-unreadable", f"--gates {where}: {why}", where=where)


def _changed(gate: Gate, limits: Any, path: Path) -> Gate:
    expected = "{target: number, fail: number}"
    if not isinstance(limits, dict) or not set(limits) <= {"target", "fail"}:
        raise _bad(path, gate.name, limits, expected)
    for value in limits.values():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _bad(path, gate.name, limits, expected)
    changed = replace(
        gate,
        target=float(limits.get("target", gate.target)),
        fail=float(limits.get("fail", gate.fail)),
    )
    if not changed._beats(changed.target, changed.fail):
        raise _bad(path, gate.name, limits, "a target that is at least as strict as the limit")
    return changed


def _bad(path: Path, where: str, got: object, expected: str) -> UsageError:
    return UsageError(
        "gates-invalid", f"{path}: {where} is no gate's limits", where=where, got=got,
        expected=expected,
    )  # fmt: skip


def judge(
    gates: Mapping[str, Gate], measures: Mapping[str, Measure], windows: int | None = None
) -> list[GateResult]:
    """All gates whose figure was measured."""
    return [gate.judge(measures[name], windows) for name, gate in gates.items() if name in measures]


def gate_findings(results: Iterable[GateResult], where: str) -> Iterable[Finding]:
    """Failed gates as errors, warned ones as warnings, undecided ones as notes."""
    severity = {"fail": "error", "warn": "warning", "inconclusive": "note"}
    for result in results:
        if result.status == "pass":
            continue
        meaning = DEFAULT_GATES[result.gate].meaning
        text = f"{result.gate} ({meaning})"
        if result.status == "inconclusive":
            count = result.more_windows
            more = f"; {plural(count, 'more window')} would decide" if count else ""
            text += f" is within two standard errors of a limit{more}"
        else:
            text += " is beyond its limit" if result.status == "fail" else " misses its target"
        spread = "" if result.se is None else f" ± {result.se:.2g}"
        yield Finding(
            f"gate-{result.status}", severity[result.status], text, where=where,
            got=f"{result.value:.4g}{spread}",
            expected=f"target {result.target:g}, limit {result.fail:g}",
        )  # fmt: skip
