"""`.eval_results/mmq.yaml`: a measured figure where the Hub's leaderboards look for it.

The Hub ties a result to a benchmark dataset and a task of it, which only the one who chose the text
can name (`--eval-dataset ORG/NAME:TASK[@REVISION]`); without that nothing is written.
Format: huggingface/hub-docs, eval_results.yaml; entries are built and read back by huggingface_hub.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import yaml

from mmq.errors import MmqError, UsageError
from mmq.report.escape import plain
from mmq.report.figures import with_error
from mmq.report.schema import LogitsReport, VerifyReport

EVAL_NAME = ".eval_results/mmq.yaml"
_WORD = re.compile(r"(?P<id>[\w.-]+/[\w.-]+):(?P<task>[\w.-]+)(@(?P<revision>[0-9a-f]{40}))?")


class EvalDataset(NamedTuple):
    """A dataset on the Hub, a task of it, and its commit ("" for none)."""

    id: str
    task: str
    revision: str


def parse_dataset(word: str) -> EvalDataset:
    """`ORG/NAME:TASK[@REVISION]`.

    Raises:
        UsageError: another form.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        raise UsageError(
            "option-value", f"--eval-dataset {word} names no dataset and task", got=word,
            expected="ORG/NAME:TASK, or ORG/NAME:TASK@COMMIT",
        )  # fmt: skip
    return EvalDataset(match["id"], match["task"], match["revision"] or "")


def eval_text(report: VerifyReport | None, dataset: EvalDataset) -> str:
    """The file: the judged forward's perplexity, its error and convention in the notes.

    Raises:
        UsageError: level logits did not run, or its perplexity is no number.
    """
    from huggingface_hub import (
        EvalResultEntry,
        eval_result_entries_to_yaml,
        parse_eval_result_entries,
    )

    logits = report.logits if report else None
    if logits is None or logits.judged not in logits.arms:
        raise UsageError(
            "eval-no-figures", "--eval-dataset needs figures, and level logits did not run",
            hint="mmq verify OUT --against SRC --level logits --text FILE",
        )  # fmt: skip
    perplexity = logits.arms[logits.judged].perplexity.value
    if not math.isfinite(perplexity):
        raise UsageError(
            "eval-no-figures", f"--eval-dataset needs figures, and the perplexity is {perplexity}"
        )
    entry = EvalResultEntry(
        dataset_id=dataset.id, task_id=dataset.task, dataset_revision=dataset.revision or None,
        value=round(perplexity, 6), notes=_notes(logits),
    )  # fmt: skip
    data = eval_result_entries_to_yaml([entry])
    if parse_eval_result_entries(data) != [entry]:
        raise MmqError("eval-invalid", f"{EVAL_NAME} would not read back as it was written")
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000))


def _notes(logits: LogitsReport) -> str:
    arm = logits.arms[logits.judged]
    convention = ", ".join(
        f"{k} {v}" for k, v in logits.convention.items() if not isinstance(v, dict)
    )
    return plain(
        f"token perplexity (lower is better) {with_error(arm.perplexity.value, arm.perplexity.se)};"
        f" source {with_error(logits.source_perplexity.value, logits.source_perplexity.se)};"
        f" mean KLD {with_error(arm.kld_mean.value, arm.kld_mean.se)} nats; {logits.scored} tokens"
        f" in {logits.windows} windows; {convention}; tokens SHA-256 {logits.tokens_sha256};"
        " ± is one SE"
    )
