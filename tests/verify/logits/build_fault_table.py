"""Plants each fault in a conversion of the bundled model and writes what the levels say.

    python tests/verify/logits/build_fault_table.py [--check]

Fills the markers of docs/verify.md; ten minutes on one core.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "verify"), str(TESTS / "verify" / "logits")]

from faults import FAULTS  # noqa: E402
from planted import Planted  # noqa: E402

from mmq.console import Console  # noqa: E402
from mmq.convert.options import ConvertOptions  # noqa: E402
from mmq.convert.run import RunSettings, convert  # noqa: E402
from mmq.demo.bundled import bundled_gates, bundled_model, bundled_texts  # noqa: E402
from mmq.report.schema import ArmFigures, VerifyReport  # noqa: E402
from mmq.verify.logits.settings import LogitsSettings  # noqa: E402
from mmq.verify.run import verify  # noqa: E402

PAGE = TESTS.parent / "docs" / "verify.md"
START, END = "<!-- faults -->", "<!-- /faults -->"
WINDOWS, CONTEXT = 10, 512
MOST_IDS = 4
#: KV faults are tried in these too: where a scale clips depends on the format.
OTHER_CACHES = ("nvfp4", "nvfp4-fp8-staged")


def judge(out: Path, source: Path, **changes: object) -> VerifyReport:
    """Level logits over the bundled texts, in silence."""
    settings = LogitsSettings(
        texts=tuple(bundled_texts()),
        windows=WINDOWS,
        context=CONTEXT,
        replay=False,
        gates=bundled_gates(),
        **changes,
    )
    quiet = Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())
    return verify(
        str(out), str(source), "logits", strict=False, report_path=None, console=quiet,
        logits=settings,
    )  # fmt: skip


def converted(folder: Path, **options: object) -> Planted:
    """The bundled model in NVFP4."""
    quiet = Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())
    options = {"max_shard_bytes": 2_000_000, **options}
    convert(str(bundled_model()), folder, ConvertOptions(**options), RunSettings(jobs=1), quiet)
    return Planted(folder, bundled_model())


def row(name: str, report: VerifyReport) -> str:
    """One line of the table."""
    levels = {level.level: level.status for level in report.levels}
    ids = {f.id for f in report.findings if f.severity == "error" and f.id != "gate-fail"}
    named = [f"`{id}`" for id in sorted(ids)]
    if len(named) > MOST_IDS:
        named = [*named[:MOST_IDS], f"{len(named) - MOST_IDS} more"]
    figures = "–"
    if report.logits is not None:
        arms = report.logits.arms
        figures = " | ".join(_figures(arms[arm]) for arm in ("weights", "kv"))
        worst = min(report.logits.layers, key=lambda layer: _cosine(layer, "weights"))
        cosine = f"{_cosine(worst, 'weights'):.4f} in layer {worst['layer']}"
    else:
        figures, cosine = "– | –", "–"
    return (
        f"| {name} | {levels['structure']} | {levels['weights']}:"
        f" {', '.join(named) or '–'} | {levels['logits']} | {figures} | {cosine} |"
    )


def _figures(arm: ArmFigures) -> str:
    delta, kld, top1 = arm.delta_ppl_percent, arm.kld_mean, arm.top1
    return f"{delta.value:+.2f} % · {kld.value:.4f} · {100 * top1.value:.1f} %"


def _cosine(layer: dict, arm: str) -> float:
    return layer["arms"][arm]["cosine"]["mean"]


def table() -> str:
    """The table, the sound conversion first."""
    lines = [
        "| fault | structure | weights | logits | `weights`: ΔPPL · KLD · top-1 | `kv`: the same |"
        " least cosine |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sound = converted(root / "sound")
        lines.append(row("none", judge(sound.folder, sound.source)))
        for mode in OTHER_CACHES:
            report = judge(sound.folder, sound.source, kv=mode)
            lines.append(row(f"none, `--kv {mode}`", report))
        coarse = converted(root / "max", scale_search="max")
        lines.append(row("none, `--scale-search max`", judge(coarse.folder, coarse.source)))
        for number, (name, fault) in enumerate(FAULTS.items()):
            damaged = Planted.copy(sound, root / f"fault{number}")
            fault.plant(damaged)
            lines.append(row(name, judge(damaged.folder, damaged.source)))
            for mode in OTHER_CACHES if name.startswith("KV") else ():
                report = judge(damaged.folder, damaged.source, kv=mode)
                lines.append(row(f"{name}, `--kv {mode}`", report))
    return "\n".join(lines)


def main() -> int:
    """Write the page, or compare with it under --check."""
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(START)
    new = f"{head}{START}\n{table()}\n{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
