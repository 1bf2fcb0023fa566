"""Which source shards a run has to bring from the Hub, in which order, and how many at once.

    units          1     2     3     4          need = shards whose tensors a unit reads
    shard a        ■     ■                      held from its first unit to its last
    shard b              ■     ■
    peak held: a + b while unit 2 runs; one unit more is fetched ahead where the disk allows

A unit is whatever reads shards through its tasks: an output shard to be written (`convert`), or one
to be held against the source (`verify`). An order of the units with a small peak is looked for:
always the unit that needs the fewest bytes more, the first of those; the natural order stays if
that is no better. Neither bytes of the output nor a verdict depend on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from mmq.convert.checkpoint import INDEX_NAME, Checkpoint
from mmq.convert.hub_source import is_here
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.side_files import SideFile
from mmq.convert.work import (
    SOURCE,
    AnalyticKScale,
    AnalyticVScale,
    CopyTensor,
    DequantizeBf16,
    QuantizeMxfp8,
    QuantizeNvfp4,
    Task,
    WeightSource,
)
from mmq.hub.download import PARTIAL
from mmq.hub.snapshot import Snapshot

Needs = Mapping[int, frozenset[Path]]


class Unit(Protocol):
    """Work that can run once the shards its tasks read are here."""

    @property
    def index(self) -> int:
        """Its number among the units of a run."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Whatever reads the source."""


U = TypeVar("U", bound=Unit)


class RemoteShard(NamedTuple):
    """A file of a commit that is to lie at a path of ours."""

    snapshot: Snapshot
    name: str
    nbytes: int


@dataclass(frozen=True)
class DownloadPlan(Generic[U]):
    """What a run downloads.

    Attributes:
        remote: by the path that it will have.
        paths: origin → shard → path, for readers; local shards included.
        units: in the order in which they are to run.
        needs: unit number → downloads it reads.
        extra: files that no unit reads and that come all the same, by path: the side files.
        sides: the side files, where they will be.
    """

    remote: Mapping[Path, RemoteShard]
    paths: dict[str, dict[str, Path]]
    units: tuple[U, ...]
    needs: Needs
    extra: Mapping[Path, RemoteShard]
    sides: tuple[SideFile, ...]

    @property
    def used(self) -> set[Path]:
        """Downloads that any unit reads."""
        return {path for unit in self.units for path in self.needs[unit.index]}

    @property
    def nbytes(self) -> int:
        """All that is brought, if nothing is there yet."""
        return sum(self.remote[p].nbytes for p in self.used) + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        return sum(file.nbytes for file in self.extra.values())

    def peak(self, ahead: int, present: Iterable[Path] = ()) -> int:
        """Most bytes of shards held at a time while `ahead` units run or wait with what they need.

        Args:
            present: files of an earlier run, which take room from the start.
        """
        sizes = {path: remote.nbytes for path, remote in self.remote.items()}
        return peak_bytes(self.units, self.needs, sizes, ahead, frozenset(present))


def plan_downloads(
    checkpoints: Mapping[str, Checkpoint], units: Sequence[U], sides: Sequence[SideFile],
    folder: Path, *, keep: bool = False,
) -> DownloadPlan[U]:  # fmt: skip
    """What these units need that is not here.

    Args:
        checkpoints: what tasks read, by origin; the source among them.
        units: those that are not done, in their natural order.
        sides: files beside the source's weights.
        folder: downloads will lie below it, each commit by itself.
        keep: all of the source is to be there in the end, what no unit reads included.
    """
    remote: dict[Path, RemoteShard] = {}
    paths: dict[str, dict[str, Path]] = {}
    for origin, checkpoint in checkpoints.items():
        paths[origin] = {}
        for name, shard in checkpoint.shards.items():
            paths[origin][name] = shard.path
            if checkpoint.hub is not None and not is_here(shard):
                snapshot = checkpoint.hub.snapshot
                path = paths[origin][name] = folder / snapshot.slug / name
                if not is_kept(folder / snapshot.slug, path, shard.file_bytes):
                    remote[path] = RemoteShard(snapshot, name, shard.file_bytes)
    needs = {
        unit.index: frozenset(
            path for task in unit.tasks for origin, tensor in reads(task)
            # a header manifest's tensors are in no shard
            if tensor.shard and (path := paths[origin][tensor.shard]) in remote
        )
        for unit in units
    }  # fmt: skip
    sizes = {path: shard.nbytes for path, shard in remote.items()}
    ordered = order_units(units, needs, sizes)
    extra, placed = _sides(checkpoints[SOURCE], sides, folder)
    if keep:
        unread = {*paths[SOURCE].values()}.difference(*needs.values())
        extra |= {path: shard for path, shard in remote.items() if path in unread}
    return DownloadPlan(remote, paths, ordered, needs, extra, placed)


def _sides(
    source: Checkpoint, sides: Sequence[SideFile], folder: Path
) -> tuple[dict[Path, RemoteShard], tuple[SideFile, ...]]:
    """(side files to bring, all of them where they will be)."""
    if source.hub is None:
        return {}, tuple(sides)
    snapshot = source.hub.snapshot
    commit = folder / snapshot.slug
    lacking: dict[Path, RemoteShard] = {}
    placed = []
    for side in sides:
        if not side.path.is_file():
            side = side._replace(path=commit / side.name)
            if not is_kept(commit, side.path, side.nbytes):
                lacking[side.path] = RemoteShard(snapshot, side.name, side.nbytes)
        placed.append(side)
    return lacking, tuple(placed)


def is_kept(commit: Path, path: Path | None = None, nbytes: int = 0) -> bool:
    """Whether a commit's folder is a checkpoint that was kept, and holds this file.

    The index comes last, so what lies beside it was meant to stay.
    """
    if not (commit / INDEX_NAME).is_file():
        return False
    return path is None or (path.is_file() and path.stat().st_size == nbytes)


def reads(task: Task) -> Iterator[tuple[str, TensorInfo]]:
    """(origin, tensor) of all that a task reads, what other tasks consume included."""
    if isinstance(task, CopyTensor):
        yield SOURCE, task.source
    elif isinstance(task, QuantizeNvfp4):
        for weight in task.weights:
            yield from _weight(weight)
    elif isinstance(task, QuantizeMxfp8 | DequantizeBf16):
        yield from _weight(task.weight)
    elif isinstance(task, AnalyticKScale | AnalyticVScale):
        yield SOURCE, task.norm
        if isinstance(task, AnalyticVScale):
            yield from _weight(task.weight)
    else:
        for tensor in task.consumes:
            yield SOURCE, tensor


def _weight(weight: WeightSource) -> Iterator[tuple[str, TensorInfo]]:
    for tensor in weight.tensors:
        yield weight.origin, tensor


def order_units(units: Sequence[U], needs: Needs, sizes: Mapping[Path, int]) -> tuple[U, ...]:
    """The natural order, or one that holds fewer bytes at a time."""
    natural = tuple(units)
    if not sizes:
        return natural
    greedy = tuple(_fewest_first(units, needs, sizes))
    return min((natural, greedy), key=lambda order: peak_bytes(order, needs, sizes, 1))


def _fewest_first(units: Sequence[U], needs: Needs, sizes: Mapping[Path, int]) -> Iterator[U]:
    """Always the unit that needs the fewest bytes more."""
    by_index = {unit.index: unit for unit in units}
    wanted: dict[Path, list[int]] = {}
    lacking: dict[int, int] = {}
    for unit in units:
        lacking[unit.index] = sum(sizes[path] for path in needs[unit.index])
        for path in needs[unit.index]:
            wanted.setdefault(path, []).append(unit.index)
    heap = [(nbytes, index) for index, nbytes in lacking.items()]
    heapq.heapify(heap)
    while heap:
        nbytes, index = heapq.heappop(heap)
        if lacking.get(index) != nbytes:
            continue  # out of date: a newer entry is in the heap, or it is done
        del lacking[index]
        for path in needs[index]:
            for other in wanted.pop(path, ()):
                if other in lacking:
                    lacking[other] -= sizes[path]
                    heapq.heappush(heap, (lacking[other], other))
        yield by_index[index]


def peak_bytes(
    units: Sequence[Unit], needs: Needs, sizes: Mapping[Path, int], ahead: int,
    present: frozenset[Path] = frozenset(),
) -> int:  # fmt: skip
    """See `DownloadPlan.peak`: each shard is held from `ahead` − 1 units before its first to its
    last."""
    first: dict[Path, int] = {}
    last: dict[Path, int] = {}
    for step, unit in enumerate(units):
        for path in needs[unit.index]:
            first.setdefault(path, 0 if path in present else max(0, step - ahead + 1))
            last[path] = step
    change = [0] * (len(units) + 1)
    for path, start in first.items():
        change[start] += sizes[path]
        change[last[path] + 1] -= sizes[path]
    peak = held = 0
    for delta in change:
        held += delta
        peak = max(peak, held)
    return peak


def present_files(paths: Iterable[Path]) -> set[Path]:
    """Those of which an earlier run left something."""
    return {p for p in paths if p.exists() or p.with_name(p.name + PARTIAL).exists()}
