"""What a card tells, in words and cells: sizes, results with their errors, origin, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmq.publish.experts import Experts, experts_of
from mmq.publish.folder import OutputFolder
from mmq.publish.provenance import Provenance
from mmq.publish.serve import Serving
from mmq.publish.traits import Traits
from mmq.report.escape import markdown, markdown_code
from mmq.report.figures import fixed, with_error
from mmq.report.logits_text import figure_texts
from mmq.report.schema import ConvertReport, LogitsReport, VerifyReport
from mmq.report.tables import percent_change, percent_text, size_text, unit_for

_FORMATS = {"modelopt": "NVFP4", "minimax": "NVFP4", "mxfp8": "MXFP8", "bf16": "BF16"}
#: Patterns of --ignore that are told.
MOST_PATTERNS = 8
_COLUMNS = ["forward", "PPL", "ΔPPL %", "mean KLD", "99 % KLD", "top-1 %", "top-5 %"]


@dataclass(frozen=True)
class CardFacts:
    """Everything a card is made of.

    Attributes:
        blame: why it should not have been published, "" for nothing.
        manifest_sha256: of mmq-manifest.json, which names every file's hash.
    """

    repo: str
    folder: OutputFolder
    traits: Traits
    provenance: Provenance
    servings: tuple[Serving, ...]
    manifest_sha256: str
    blame: str = ""

    @property
    def convert(self) -> ConvertReport | None:
        """What converting it measured, if that is there."""
        return self.folder.convert

    @property
    def verify(self) -> VerifyReport | None:
        """What verifying it found, if anybody did."""
        return self.folder.verify

    @property
    def options(self) -> Mapping[str, Any]:
        """The conversion's, as the manifest has them."""
        options = self.folder.manifest.get("options")
        return options if isinstance(options, Mapping) else {}

    @property
    def experts(self) -> Experts:
        """Where the routed experts come from."""
        return experts_of(self.folder.convert, self.options, m31=self.traits.m31)

    @property
    def title(self) -> str:
        """What it is, before escaping."""
        source = self.provenance.repo.partition("/")[2] or "The source"
        return f"{source} in {_FORMATS[self.traits.layout]}"


class Sizes(NamedTuple):
    """The size table and what goes with it."""

    caption: str
    columns: list[str]
    rows: list[tuple[str, ...]]
    lines: list[str]


class Results(NamedTuple):
    """Figures of level logits, each with one standard error where there is one."""

    sentence: str
    columns: list[str]
    rows: list[tuple[str, ...]]
    gates: list[tuple[str, ...]]
    lines: list[str]


def summary(facts: CardFacts) -> str:
    """What was made into what."""
    by = f"Converted by mmq {markdown(facts.folder.versions.get('mmq', ''))}."
    source = markdown_code(facts.provenance.repo) or "the source"
    ignored = _ignored(facts.options)
    if facts.traits.layout == "bf16":
        return f"{_capital(source)} with every quantised weight as BF16{ignored}. {by}"
    if facts.traits.layout == "mxfp8":
        linears = "attention, indexer, dense and shared MLPs, routed experts"
        return f"The linear layers of {source} ({linears}) as MXFP8{ignored}. {by}"
    names = {"modelopt": "ModelOpt's", "minimax": "MiniMax-M3.1's"}[facts.traits.layout]
    return (
        f"The routed experts of {source} in NVFP4{facts.experts.how}{ignored}; all other tensors"
        " are the source's, byte for byte, apart from what is listed as dropped or added below."
        f" Tensor names: {names}. {by}"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ignored(options: Mapping[str, Any]) -> str:
    """The modules that were told to stay as they are."""
    patterns = options.get("ignore")
    if not isinstance(patterns, list) or not patterns:
        return ""
    shown = ", ".join(markdown_code(p) for p in patterns[:MOST_PATTERNS])
    more = f" and {len(patterns) - MOST_PATTERNS} more" if len(patterns) > MOST_PATTERNS else ""
    return f", but for the modules that `--ignore` names, which stay as they were ({shown}{more})"


def sizes(facts: CardFacts) -> Sizes:
    """Bytes by component (and format, where the report has it), measured at both ends."""
    report = facts.convert
    if report is None:
        return Sizes("Files", ["files", "bytes"], [("weights", f"{facts.traits.file_bytes:,}")], [])
    before, after = report.source.payload_bytes, report.output.payload_bytes
    unit = unit_for(before)
    entries = [(f"{s.component} {s.format}", s.before_bytes, s.after_bytes) for s in report.sizes]
    if not entries:
        entries = [(c.component, c.before_bytes, c.after_bytes) for c in report.components]
    rows: list[tuple[str, ...]] = []
    for name, old, new in [*entries, ("total", before, after)]:
        change = percent_text(percent_change(old, new)) if old != new and new else ""
        rows.append((markdown(name), unit.decimal(old), unit.decimal(new), change))
    columns = ["component", f"before, {unit.name}", f"after, {unit.name}", "change"]
    weights = after - report.kv_scale_bytes
    lines = [f"Weights: {size_text(before)} before, {size_text(weights)} after"
             f" ({percent_text(percent_change(before, weights))})."]  # fmt: skip
    if report.kv_scale_bytes:
        lines.append(f"Added: K and V scales, {report.kv_scale_bytes:,} B.")
    lines += [f"Copied whole: {markdown_code(k + '/')}, {size_text(v)}."
              for k, v in report.side_folder_bytes.items()]  # fmt: skip
    lines += [f"Dropped: {n:,} tensors ({markdown(k)})." for k, n in report.dropped.items()]
    quality = report.quality
    if quality.sqnr_db is not None:
        worst = quality.worst_tensor_sqnr_db
        told = "" if worst is None else f"; worst tensor {fixed(worst, 2)} dB"
        lines.append(f"SQNR of the quantised weights: {fixed(quality.sqnr_db, 2)} dB over all"
                     f" values of {quality.tensors:,} tensors{told}.")  # fmt: skip
    return Sizes("Size by component, without file headers", columns, rows, lines)


def results(facts: CardFacts) -> Results | None:
    """Perplexity and parity with their convention; None where level logits did not run."""
    logits = facts.verify.logits if facts.verify else None
    if logits is None:
        return None
    rows = [(markdown(f"{name} (judged)" if name == logits.judged else name), *figure_texts(arm))
            for name, arm in logits.arms.items()]  # fmt: skip
    gates: list[tuple[str, ...]] = [
        (markdown(g.gate), with_error(g.value, g.se), f"{g.target:g}", f"{g.fail:g}", g.status)
        for g in logits.gates
    ]
    sentence = (
        f"{logits.scored:,} tokens scored in {logits.windows:,} windows; the source's perplexity is"
        f" {with_error(logits.source_perplexity.value, logits.source_perplexity.se)}."
    )
    return Results(sentence, _COLUMNS, rows, gates, _convention(logits))


def _convention(logits: LogitsReport) -> list[str]:
    stated = [f"{k} {_shown(v)}" for k, v in logits.convention.items() if not isinstance(v, dict)]
    settings = [f"{k} {_shown(v)}" for k, v in logits.settings.items() if not isinstance(v, dict)]
    return [
        "± is one standard error, from the spread between windows. KLD is KL(source ‖ this),"
        " natural logarithm, over the full vocabulary. PPL is exp(Σ NLL / Σ tokens).",
        f"Tokens: {markdown(', '.join(stated))}; SHA-256 {markdown_code(logits.tokens_sha256)}.",
        f"Forward (mmq's own): {markdown(', '.join(settings))}.",
    ]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def provenance_lines(facts: CardFacts) -> list[str]:
    """Source, versions and hashes."""
    origin, manifest = facts.provenance, facts.folder.manifest
    name = markdown_code(origin.repo) or "a folder"
    if origin.commit:
        source = f"Source: {name} at commit `{origin.commit}`."
    else:
        source = f"Source: {name}, commit unknown; it is the files whose hashes are below."
    kinds = {s.whole for s in origin.shards}
    of = "files" if kinds == {True} else "file headers" if kinds == {False} else "files or headers"
    told = ", ".join(f"{markdown(k)} {markdown(v)}" for k, v in facts.folder.versions.items())
    return [
        source,
        *_calibration(manifest.get("calibration")),
        f"Source {of}, one SHA-256 over all: `{origin.digest}`.",
        "Weights, configs and copied files, each with its SHA-256: `mmq-manifest.json`"
        f" (`{facts.manifest_sha256}`). Reports, recipe and card were made after it.",
        f"Versions: {told}; numerics {markdown(manifest.get('numerics_version', ''))}.",
    ]


def _calibration(told: object) -> list[str]:
    """Numbers that came from data: which option, how many tokens, and the hash of the file."""
    lines = []
    for option, made in told.items() if isinstance(told, Mapping) else ():
        if isinstance(made, Mapping):
            tokens, observer = made.get("tokens"), made.get("observer")
            how = f", observer {markdown(observer)}" if observer else ""
            on = f"measured on {tokens:,} tokens" if isinstance(tokens, int) else "from a file"
            flag = markdown_code("--" + str(option).replace("_", "-"))
            lines.append(
                f"{flag}: {on}{how}; file SHA-256 {markdown_code(made.get('sha256', ''))}."
            )
    return lines


def limit_lines(facts: CardFacts) -> list[str]:
    """What a user should not expect."""
    traits = facts.traits
    lines = list(facts.experts.limits) if traits.layout in ("modelopt", "minimax") else []
    if not (facts.verify and facts.verify.logits):
        lines.append("No perplexity or parity was measured.")
    else:
        lines.append("Perplexity and parity hold for the tokens named, not for other languages,"
                     " longer contexts, images or tasks.")  # fmt: skip
    lines.append("No benchmark was run, and no server started.")
    if traits.layout == "modelopt":
        lines.append("transformers 5.24 cannot load this layout;"
                     " `mmq convert OUT OUT-bf16 --to bf16` makes one it can.")  # fmt: skip
    if traits.layout == "minimax":
        lines.append("transformers 5.24 loads all but the experts and leaves those random, with a"
                     " warning only: do not use it here.")  # fmt: skip
    if traits.vision:
        lines.append("The vision tower is copied as it is; no image was put through it.")
    return lines
