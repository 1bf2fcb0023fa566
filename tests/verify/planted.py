"""A converted checkpoint on disk, faults to plant in it, and what verify says then."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from m3_source import INDEX, Tensor, read_folder, read_shard, shard_bytes

from mmq.console import Console
from mmq.report.schema import FindingEntry, VerifyReport
from mmq.verify.run import verify

CONFIG, HF_CONFIG, MANIFEST = "config.json", "hf_quant_config.json", "mmq-manifest.json"


@dataclass(frozen=True)
class Judged:
    """A verdict, and access to its findings."""

    report: VerifyReport

    @property
    def verdict(self) -> str:
        return self.report.verdict

    @property
    def ids(self) -> set[str]:
        """Ids of errors and warnings."""
        return {f.id for f in self.report.findings if f.severity != "note"}

    def of(self, id: str) -> list[FindingEntry]:
        return [f for f in self.report.findings if f.id == id]

    def one(self, id: str, where: str, severity: str = "error") -> FindingEntry:
        """The finding of that id about that thing; there must be one."""
        found = [f for f in self.of(id) if f.where == where]
        assert len(found) == 1, [f"{f.severity} {f.id} {f.where}" for f in self.report.findings]
        assert found[0].severity == severity
        assert severity != "error" or self.verdict == "fail"
        return found[0]

    @property
    def skipped(self) -> str:
        return "\n".join(s for level in self.report.levels for s in level.skipped)


def judge(out: Path | str, against: Path | str | None = None, level: str | None = None) -> Judged:
    """verify(), in silence; the report goes where it goes by default."""
    quiet = Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())
    source = None if against is None else str(against)
    report = verify(str(out), source, level, strict=False, report_path=None, console=quiet)
    return Judged(report)


@dataclass(frozen=True)
class Planted:
    """A private copy of a conversion, to be damaged."""

    folder: Path
    source: Path

    @classmethod
    def copy(cls, conversion: Planted, folder: Path) -> Planted:
        shutil.copytree(conversion.folder, folder)
        return cls(folder, conversion.source)

    def judge(self, level: str | None = None) -> Judged:
        """Against the source."""
        return judge(self.folder, self.source, level)

    def alone(self) -> Judged:
        """Without the source."""
        return judge(self.folder)

    def foreign(self) -> Planted:
        """As if another tool had written it: no manifest."""
        (self.folder / MANIFEST).unlink()
        return self

    @contextlib.contextmanager
    def json(self, name: str = CONFIG) -> Iterator[dict[str, Any]]:
        """A JSON file's value, written back afterwards."""
        path = self.folder / name
        value = json.loads(path.read_bytes())
        yield value
        path.write_text(json.dumps(value))

    @contextlib.contextmanager
    def quantization(self) -> Iterator[list[dict[str, Any]]]:
        """The quantisation blocks of both config files, to be edited alike."""
        with contextlib.ExitStack() as stack:
            blocks = [stack.enter_context(self.json(CONFIG))["quantization_config"]]
            if (self.folder / HF_CONFIG).exists():
                blocks.append(stack.enter_context(self.json(HF_CONFIG))["quantization"])
            yield blocks

    def shard_index(self) -> dict[str, str]:
        """Tensor → shard."""
        return json.loads((self.folder / INDEX).read_bytes())["weight_map"]

    def shard_of(self, name: str) -> Path:
        return self.folder / self.shard_index()[name]

    def __getitem__(self, name: str) -> Tensor:
        return read_shard(self.shard_of(name))[name]

    def poke(self, name: str, change: Callable[[np.ndarray], Any]) -> None:
        """Change a tensor in place: F32 values, BF16 bits, or bytes."""
        path = self.shard_of(name)
        raw = bytearray(path.read_bytes())
        length = struct.unpack("<Q", raw[:8])[0]
        spec = json.loads(raw[8 : 8 + length])[name]
        begin, end = (8 + length + offset for offset in spec["data_offsets"])
        dtype = {"F32": "<f4", "BF16": "<u2"}.get(spec["dtype"], "u1")
        array = np.frombuffer(raw[begin:end], dtype).reshape(spec["shape"]).copy()
        new = change(array)
        array = array if new is None else np.asarray(new, dtype)
        raw[begin:end] = array.tobytes()
        assert len(raw) == path.stat().st_size
        path.write_bytes(raw)

    def set_scalar(self, name: str, value: float) -> None:
        self.poke(name, lambda a: np.full(a.shape, value))

    @contextlib.contextmanager
    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """All tensors, to add, drop or retype; written back into one shard with its index."""
        stored = read_folder(self.folder)
        yield stored
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        name = "model-00001-of-00001.safetensors"
        (self.folder / name).write_bytes(shard_bytes(stored, {"format": "pt"}))
        total = sum(len(t.data) for t in stored.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(stored, name)}
        (self.folder / INDEX).write_text(json.dumps(index))
