"""The demo: inspect, plan, convert, verify and report, as a user would, on the bundled model.

Every step shows the command it stands for and calls what that command calls; the model stays where
it is. Running it again writes the same files again.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from mmq.console import Console
from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import build_plan
from mmq.convert.run import RunSettings, convert
from mmq.convert.sizes import parse_size
from mmq.convert.summary import checkpoint_summary, plan_summary, resource_summary
from mmq.demo.bundled import bundled_gates, bundled_model, bundled_texts
from mmq.errors import VerdictError
from mmq.report.schema import ConvertReport, VerifyReport
from mmq.report.tables import (
    convert_lines,
    inspect_lines,
    outcome_lines,
    percent_change,
    percent_text,
    plan_lines,
    size_text,
)
from mmq.report.verdict import verify_lines
from mmq.verify.logits.settings import LogitsSettings
from mmq.verify.run import verify

DEFAULT_FOLDER = Path("demo-out")
#: Small enough that the small model comes out in several shards.
SHARD_SIZE = "2MB"
#: Windows of 512 tokens that are scored, from five texts in turn.
WINDOWS = 10


def run_demo(console: Console, folder: Path | None = None) -> int:
    """Take the bundled model all the way; returns the exit code.

    Args:
        folder: default ./demo-out; output and reports go below it.

    Raises:
        MmqError: a step failed.
    """
    folder = folder or DEFAULT_FOLDER
    source, out = bundled_model(), folder / "nvfp4"
    console.event(
        "demo", "a small MiniMax-M3, trained on public text, as MXFP8", folder=str(folder)
    )
    options = ConvertOptions(max_shard_bytes=parse_size(SHARD_SIZE))

    _step(console, "inspect", source)
    _inspect(console, source, options)
    flags = ("--to", "nvfp4", "--max-shard-size", SHARD_SIZE)
    _step(console, "convert", source, out, *flags, "--dry-run")
    _dry_run(console, source, out, options)
    _step(console, "convert", source, out, *flags, "--overwrite", "--jobs", "1")
    report = _convert(console, source, out, options)
    texts = [word for text in bundled_texts() for word in ("--text", text)]
    gates = ("--gates", bundled_gates(), "--windows", str(WINDOWS))
    _step(console, "verify", out, "--against", source, "--level", "logits", *texts, *gates)
    verified = _verify(console, source, out)
    _figures(console, report.model_dump(), verified.model_dump())
    return 0 if verified.verdict in ("pass", "warn") else VerdictError.exit_code


def _step(console: Console, *words: str | Path) -> None:
    command = shlex.join(["mmq", *map(str, words)])
    console.event("command", f"\n$ {command}", command=command)


def _inspect(console: Console, source: Path, options: ConvertOptions) -> None:
    checkpoint = open_checkpoint(source)
    data = checkpoint_summary(checkpoint)
    plan = build_plan(checkpoint, options)
    outcome = plan_summary(plan, resource_summary(plan, None, 1))
    lines = [*inspect_lines(data), "", *outcome_lines(outcome)]
    console.result("\n".join(lines), {"command": "inspect", **data, "convert": outcome})


def _dry_run(console: Console, source: Path, out: Path, options: ConvertOptions) -> None:
    plan = build_plan(open_checkpoint(source), options)
    data = plan_summary(plan, resource_summary(plan, out, 1))
    console.result("\n".join(plan_lines(data)), {"command": "convert", "dry_run": True, **data})


def _convert(console: Console, source: Path, out: Path, options: ConvertOptions) -> ConvertReport:
    # restart: an interrupted demo leaves a run whose source is no longer the same file
    settings = RunSettings(jobs=1, restart=True, overwrite=True)
    report = convert(str(source), out, options, settings, console)
    assert report is not None, "overwrite never finds its work done"
    data = report.model_dump()
    text = "\n".join(convert_lines(data, str(source), str(out)))
    console.result(text, {"command": "convert", "out": str(out), **data})
    return report


def _verify(console: Console, source: Path, out: Path) -> VerifyReport:
    settings = LogitsSettings(texts=tuple(bundled_texts()), windows=WINDOWS, gates=bundled_gates())
    report = verify(
        str(out), str(source), "logits", strict=False, report_path=None, console=console,
        logits=settings,
    )  # fmt: skip
    data = report.model_dump()
    console.result("\n".join(verify_lines(data)), {"command": "verify", **data})
    return report


def _figures(console: Console, converted: dict[str, Any], verified: dict[str, Any]) -> None:
    """The two reports in a few lines."""
    before = converted["source"]["payload_bytes"]
    kv = converted["kv_scale_bytes"]
    after = converted["output"]["payload_bytes"] - kv
    quality = converted["quality"]
    change = percent_text(percent_change(before, after))
    experts = next(c for c in converted["components"] if c["component"] == "routed_experts")
    share = experts["after_bytes"] / experts["before_bytes"]
    checked = sum(sum(level["checks"].values()) for level in verified["levels"])
    rows = (
        ("weights", f"{before:,} → {after:,} B ({change}), and {kv} B of KV scales"),
        ("experts", f"{size_text(experts['after_bytes'])}, {share:.4f} of what they were"),
        ("quality", f"SQNR {quality['sqnr_db']:.2f} dB over {quality['tensors']} NVFP4 weights"),
        ("logits", _logits_text(verified["logits"])),
        ("verdict", f"{verified['verdict']}, {checked:,} things checked"),
    )
    lines = ["", "report", *(f"  {head:<9}{text}" for head, text in rows)]
    data = {
        "command": "demo", "verdict": verified["verdict"], "before_bytes": before,
        "after_bytes": after, "kv_scale_bytes": kv, "sqnr_db": quality["sqnr_db"],
        "checks": checked,
    }  # fmt: skip
    console.result("\n".join(lines), data)


def _logits_text(logits: dict[str, Any] | None) -> str:
    """The judged forward in one line."""
    if logits is None:
        return "not run"
    arm = logits["arms"][logits["judged"]]
    ppl, kld, top1 = arm["delta_ppl_percent"], arm["kld_mean"], arm["top1"]
    return (
        f"PPL {ppl['value']:+.2f} ± {ppl['se']:.2f} %, mean KLD {kld['value']:.4f} nats,"
        f" {100 * top1['value']:.1f} % the same most likely token, {logits['scored']:,} tokens"
    )
