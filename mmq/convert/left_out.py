"""What lies beside a model and is no part of it: credentials, leftovers, training state, claims.

    .env, id_rsa, server.pem              keys and settings of whoever made the model
    train.log, x.tmp, x.incomplete        leftovers of a run, an editor, a download
    optimizer.pt, checkpoint-500/         state of a training: several times the weights
    vllm-recipe.yaml, .eval_results/      true of the source alone

No loader reads any of these. Names are compared without case, at every depth; a folder takes all
that is in it along. Names that begin with a dot are left out as well, but for `.gitattributes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from mmq.report.findings import Finding

#: Where tools keep what is theirs; nobody expects it to be copied, so nothing is said.
TOOL_FOLDERS = frozenset(
    {".git", ".cache", ".huggingface", ".mmq", ".ds_store", "__pycache__", ".ipynb_checkpoints"}
)
_KEPT = (".gitattributes",)
#: Reason → names. The Trainer's: transformers, trainer.py (TRAINER_STATE_NAME and its neighbours);
#: random_states_*, sampler*, pytorch_model_fsdp_*: accelerate, utils/constants.py;
#: global_step*, latest, zero_to_fp32.py: DeepSpeed, runtime/engine.py.
_NAMES = {
    "true of the source alone": (".eval_results", "vllm-recipe.yaml"),
    "state of a training": (
        "optimizer.pt", "optimizer.bin", "optimizer_[0-9]*", "scheduler.pt", "scheduler.bin",
        "scaler.pt", "rng_state*.pth", "random_states_*.pkl", "sampler*.bin",
        "pytorch_model_fsdp_[0-9]*", "trainer_state.json", "training_args.bin",
        "checkpoint-[0-9]*", "global_step[0-9]*", "latest", "zero_to_fp32.py",
        "events.out.tfevents*", "wandb",
    ),
    "leftovers": (
        "*.log", "*.tmp", "*.temp", "*.lock", "*.incomplete", "*.partial", "*.part", "*.aria2",
        "*.crdownload", "*.bak", "*.orig", "*.swp", "*~", "*.pyc", "nohup.out", "slurm-*.out",
        "thumbs.db", "desktop.ini",
    ),
    "private files": ("_netrc", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*", "id_ecdsa*"),
}  # fmt: skip
_HIDDEN = "hidden files"
#: Names of one reason that are told one by one.
MOST_NAMES = 12


class LeftOut(NamedTuple):
    """A file or folder that is not copied; a folder's name ends in a slash.

    Attributes:
        reason: what it is; "" for a tool's own folder, of which nothing is said.
    """

    name: str
    reason: str


def left_out(name: str) -> LeftOut | None:
    """The outermost part of a path (`/` between its parts) that is not copied; None to copy it."""
    parts = name.split("/")
    for at, part in enumerate(parts):
        reason = _reason(part.lower())
        if reason is not None:
            end = "/" if at + 1 < len(parts) else ""
            return LeftOut("/".join(parts[: at + 1]) + end, reason)
    return None


def _reason(part: str) -> str | None:
    if part in TOOL_FOLDERS:
        return ""
    for reason, patterns in _NAMES.items():
        if any(fnmatchcase(part, pattern) for pattern in patterns):
            return reason
    return _HIDDEN if part.startswith(".") and part not in _KEPT else None


def left_out_notes(found: Iterable[LeftOut]) -> Iterator[Finding]:
    """One note for each reason, with the names."""
    names: dict[str, list[str]] = {}
    for name, reason in sorted(set(found)):
        names.setdefault(reason, []).append(name)
    for reason, those in names.items():
        if reason:
            told = ", ".join(those[:MOST_NAMES])
            more = f" and {len(those) - MOST_NAMES:,} more" if len(those) > MOST_NAMES else ""
            yield Finding(
                "side-file-left-out", "note", f"not copied ({reason}): {told}{more}",
                where=those[0],
            )  # fmt: skip
