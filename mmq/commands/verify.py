"""`mmq verify`."""

from __future__ import annotations

from typing import Any

import click

from mmq.commands.paths import expanded, optional_path
from mmq.errors import VerdictError
from mmq.invocation import Run, global_options

_CACHE_FORMATS = ("exact", "bf16", "fp8", "nvfp4")


@click.command()
@click.argument("out")
@click.option("--against", metavar="SRC", help="The checkpoint OUT was converted from.")
@click.option(
    "--level", type=click.Choice(["structure", "weights", "logits"]),
    help="Highest level to run.  [default: weights with --against, else structure]",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="Let warnings fail (exit 3).")
@click.option(
    "--allow-inconclusive", is_flag=True,
    help="Exit 0 where figures are too close to a limit to decide.",
)  # fmt: skip
@click.option(
    "--gates", metavar="FILE", help="Limits other than the default ones (YAML; docs/verify.md)."
)
@click.option(
    "--text", "texts", multiple=True, metavar="FILE",
    help="Level logits: text to score, UTF-8; repeatable, each file is reported by itself.",
)  # fmt: skip
@click.option(
    "--tokens", metavar="FILE.npy",
    help="Level logits: token ids instead, [T], or windows [W, L] padded with -1.",
)  # fmt: skip
@click.option(
    "--windows", type=click.IntRange(min=0), help="Windows to score, 0 for all.  [default: 32]"
)
@click.option(
    "--context", type=click.IntRange(min=2),
    help="Tokens of a window.  [default: twice what block selection needs to bind; 4096 for M3]",
)  # fmt: skip
@click.option(
    "--layers", type=click.IntRange(min=1), help="Run the first layers only; gives no logits."
)
@click.option(
    "--kv", type=click.Choice(["auto", *_CACHE_FORMATS, "nvfp4-fp8-staged"]), default="auto",
    show_default=True, help="KV cache to judge; auto: what OUT's config declares.",
)  # fmt: skip
@click.option(
    "--index-k", type=click.Choice(["auto", *_CACHE_FORMATS]), default="auto", show_default=True,
    help="Format of the indexer's keys beside it.",
)  # fmt: skip
@click.option(
    "--replay/--no-replay", default=True, show_default=True,
    help="Also run OUT with the source's routing and block selection.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
    help="Of the forward's matrix products.",
)  # fmt: skip
@click.option(
    "--work-dir", metavar="DIR",
    help="Hidden states while a logits run lasts.  [default: .mmq-verify beside the report]",
)  # fmt: skip
@click.option(
    "-o", "--output", "report_path", metavar="FILE",
    help="Where the report goes.  [default: mmq-verify.json in OUT]",
)  # fmt: skip
@global_options
@click.pass_obj
def verify(
    run: Run, /, out: str, against: str | None, level: str | None, strict: bool,
    allow_inconclusive: bool, report_path: str | None, **logits: Any,
) -> int:  # fmt: skip
    """Check OUT, alone or against the checkpoint it came from; exit 3 when it fails.

    \b
    structure   headers, configs, names, what loaders insist on
    weights     every stored value against the source's
    logits      perplexity and parity of both models on the same tokens
    """
    from mmq.report.verdict import verify_lines
    from mmq.verify.run import verify as run_verify

    report = run_verify(
        expanded(out), expanded(against), level, strict=strict,
        report_path=optional_path(report_path), console=run.console, logits=_settings(logits),
    )  # fmt: skip
    data = report.model_dump()
    run.console.result("\n".join(verify_lines(data)), {"command": "verify", **data})
    fine = {"pass"} | (set() if strict else {"warn"})
    fine |= {"inconclusive"} if allow_inconclusive else set()
    return 0 if report.verdict in fine else VerdictError.exit_code


def _settings(words: dict[str, Any]) -> Any:
    """LogitsSettings from the options above."""
    from mmq.verify.logits.settings import LogitsSettings

    words["texts"] = tuple(path for word in words["texts"] if (path := optional_path(word)))
    words["work"] = words.pop("work_dir")
    for key in ("tokens", "gates", "work"):
        words[key] = optional_path(words[key])
    return LogitsSettings(**words)
