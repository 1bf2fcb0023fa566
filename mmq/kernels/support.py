"""Whether an operation runs on a target, how, and why not: what dispatch and `mmq doctor` ask."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: How an operation gets its result on a target.
Path = Literal["native", "fallback", "unsupported"]


class Support(NamedTuple):
    """The answer of a `supports(target, …)` function.

    Attributes:
        path: "native": the target's own instruction for this data type. "fallback": the same
            result by other instructions. "unsupported": our wrapper raises.
        reason: one clause: the instruction, or why there is none.
    """

    path: Path
    reason: str

    @property
    def ok(self) -> bool:
        return self.path != "unsupported"
