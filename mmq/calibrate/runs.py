"""Which model and which tokens statistics come from, and when two of them may be added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmq.errors import UsageError

Run = dict[str, Any]


def merged_runs(
    model: Mapping[str, Any], runs: Sequence[Run], other_model: Mapping[str, Any],
    other_runs: Sequence[Run], where: str,
) -> list[Run]:  # fmt: skip
    """The runs of both, in an order that does not depend on which came first.

    Args:
        where: the file that the others come from.

    Raises:
        UsageError: another model, or tokens that were seen already.
    """
    if model["norms_sha256"] != other_model["norms_sha256"]:
        raise UsageError(
            "calibrations-differ", f"{where} was made from another model", where=where,
            got=other_model["norms_sha256"], expected=model["norms_sha256"],
        )  # fmt: skip
    seen = {run["tokens_sha256"] for run in runs}
    for run in other_runs:
        if run["tokens_sha256"] in seen:
            raise UsageError(
                "calibration-twice", f"{where} has tokens that another file has too",
                where=where, got=run["tokens_sha256"], expected="other tokens",
            )  # fmt: skip
    return sorted([*runs, *other_runs], key=lambda run: str(run["tokens_sha256"]))
