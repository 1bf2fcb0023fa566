"""The forwards that a comparison consists of: whose weights, and what the KV cache does.

source     the source's weights, an exact cache           what all others are compared with
weights    OUT's weights, an exact cache                  what quantised weights cost
kv         the source's weights, OUT's cache              what the KV cache costs
both       OUT's weights and cache                        what ships; gates judge this one
replay     OUT's weights, the source's routing and blocks what is left without near-tie flips
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmq.verify.model.operations import EXACT_CACHE, CacheFormat, CacheMode

Side = Literal["source", "candidate"]
ArmName = Literal["source", "weights", "kv", "both", "replay"]

#: Names that --kv takes → (format, staged).
KV_MODES: dict[str, tuple[CacheFormat, bool]] = {
    "exact": ("exact", False), "bf16": ("bf16", False), "fp8": ("fp8", False),
    "nvfp4": ("nvfp4", False), "nvfp4-fp8-staged": ("nvfp4", True),
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One forward over all windows.

    Attributes:
        side: whose weights.
        mode: of the cache, without a layer's scales.
        replay: take experts and blocks from the arm "source".
    """

    name: ArmName
    side: Side
    mode: CacheMode = EXACT_CACHE
    replay: bool = False


def choose_arms(mode: CacheMode, *, replay: bool) -> tuple[Arm, ...]:
    """The arms of a run, the source's first.

    Args:
        mode: of the cache to be judged; an exact one leaves the arms "kv" and "both" out.
        replay: whether to add the replay.
    """
    arms = [Arm("source", "source"), Arm("weights", "candidate")]
    if mode != EXACT_CACHE:
        arms += [Arm("kv", "source", mode), Arm("both", "candidate", mode)]
    if replay:
        arms.append(Arm("replay", "candidate", replay=True))
    return tuple(arms)


def judged_arm(arms: tuple[Arm, ...]) -> ArmName:
    """The arm whose figures the gates judge: what would ship."""
    return "both" if any(a.name == "both" for a in arms) else "weights"
