"""mmq's own JSON read back: the report as a model, or an error that says why it is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from mmq.errors import BadInputError
from mmq.report.escape import shortened
from mmq.report.file_names import CONVERT_REPORT, VERIFY_REPORT
from mmq.report.schema import SCHEMA_VERSION, ConvertReport, VerifyReport

Report = ConvertReport | VerifyReport

#: Names of the reports that mmq writes, by kind; the verdict comes first.
REPORT_NAMES = {"verify": VERIFY_REPORT, "convert": CONVERT_REPORT}
_MODELS: dict[str, type[ConvertReport] | type[VerifyReport]] = {
    "convert": ConvertReport, "verify": VerifyReport,
}  # fmt: skip
_HINT = "mmq report takes mmq-convert.json or mmq-verify.json, or the folder they are in"


class Reports(NamedTuple):
    """The reports of one output: one file's, or those of a folder."""

    verify: VerifyReport | None
    convert: ConvertReport | None

    @property
    def found(self) -> list[Report]:
        """Those there are, the verification first."""
        return [r for r in (self.verify, self.convert) if r is not None]


def reports_of(report: Report) -> Reports:
    """One report as `Reports`."""
    return Reports(
        report if isinstance(report, VerifyReport) else None,
        report if isinstance(report, ConvertReport) else None,
    )


def read_reports(path: Path) -> Reports:
    """The report in a file, or both of an output folder.

    Raises:
        BadInputError: nothing there, or it is no report of a version that this mmq knows.
    """
    if path.is_dir():
        paths = [p for n in REPORT_NAMES.values() if (p := path / n).is_file()]
        if not paths:
            raise BadInputError(
                "report-not-found", f"{path} has no report of mmq's", where=str(path),
                expected=" or ".join(REPORT_NAMES.values()),
                hint="mmq verify OUT --against SRC writes one",
            )  # fmt: skip
    else:
        paths = [path]
    found = [read_report(p) for p in paths]
    return Reports(
        next((r for r in found if isinstance(r, VerifyReport)), None),
        next((r for r in found if isinstance(r, ConvertReport)), None),
    )


def read_report(path: Path) -> Report:
    """One report.

    Raises:
        BadInputError: the file is absent, no JSON, no report, of another version, or damaged.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadInputError(
            "report-not-found", f"there is no file {path}", where=str(path), hint=_HINT
        ) from None
    except OSError as error:
        raise BadInputError(
            "report-unreadable", f"{path}: {error.strerror or error}", where=str(path)
        ) from None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            "report-not-json", f"{path} is not JSON: {shortened(error, 200)}", where=str(path),
            hint=_HINT,
        ) from None  # fmt: skip
    return parse_report(value, str(path))


def parse_report(value: object, where: str) -> Report:
    """A report from its JSON value; `where` names it in errors."""
    kind = value.get("kind") if isinstance(value, dict) else None
    version = value.get("schema_version") if isinstance(value, dict) else None
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None or version is None:
        raise BadInputError(
            "report-foreign", f"{where} is not a report of mmq's", where=where,
            got=f"kind {_told(kind)}, schema_version {_told(version)}",
            expected="kind 'convert' or 'verify', and a schema_version", hint=_HINT,
        )  # fmt: skip
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise BadInputError(
            "report-version",
            f"{where} has schema_version {shortened(version, 40)}, which this mmq does not know",
            where=where, got=shortened(version, 40), expected=str(SCHEMA_VERSION),
            hint="render it with the mmq that wrote it",
        )  # fmt: skip
    try:
        return model.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _invalid(error, where) from None


def _told(value: object) -> str:
    return "absent" if value is None else repr(shortened(value, 40))


def _invalid(error: Exception, where: str) -> BadInputError:
    count, place, reason = 1, "", shortened(error, 200)
    if isinstance(error, ValidationError):
        problems = error.errors(include_input=False, include_url=False)
        count = len(problems)
        place = ".".join(map(str, problems[0]["loc"]))
        reason = problems[0]["msg"]
    more = f" (and {count - 1} more)" if count > 1 else ""
    return BadInputError(
        "report-invalid", f"{where} does not obey the report schema: {place}: {reason}{more}",
        where=where, got=shortened(place, 200),
    )  # fmt: skip


def as_json(report: Report) -> str:
    """The report as mmq writes it; what JSON or UTF-8 has not is written another way.

    NaN and infinities become words; half a surrogate pair becomes its escape.
    """
    text = json.dumps(_finite(report.model_dump()), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value
