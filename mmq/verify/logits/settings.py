"""What a logits run was asked for: the command line's words, without anything heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmq.errors import UsageError

#: Windows when the command line does not say.
DEFAULT_WINDOWS = 32


@dataclass(frozen=True)
class LogitsSettings:
    """The command line's words.

    Attributes:
        texts, tokens: one of the two.
        context: tokens of a window; None for twice what selection needs to leave blocks out.
        windows: None for `DEFAULT_WINDOWS`, 0 for all.
        layers: run only this many.
        kv: "auto" takes what OUT's config declares.
        index_k: format of index keys in the arms with a cache; "auto" for the same as K and V
            where the layout says so, else exact.
        dtype: of the matrix products, "float32" or "bfloat16".
        gates: file with other limits.
        work: folder for hidden states; by default beside the report.
    """

    texts: tuple[Path, ...] = ()
    tokens: Path | None = None
    context: int | None = None
    windows: int | None = None
    layers: int | None = None
    kv: str = "auto"
    index_k: str = "auto"
    replay: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    gates: Path | None = None
    work: Path | None = None

    def check(self) -> None:
        """Raises UsageError where the words contradict each other."""
        if bool(self.texts) == (self.tokens is not None):
            raise UsageError(
                "text-needed", "--level logits scores tokens: give --text FILE… or --tokens FILE",
                hint="mmq verify OUT --against SRC --level logits --text wiki.test.raw",
            )  # fmt: skip
        if self.context is not None and self.context < 2:
            raise UsageError("option-value", "--context must be at least 2", got=self.context)
