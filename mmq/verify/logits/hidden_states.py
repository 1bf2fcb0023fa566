"""Hidden states of all arms between layers, in files, so that a killed run goes on at its layer.

Each arm has two files, F32 [T, M], memory-mapped: a layer reads one and writes the other, and the
state file that names the finished layer is replaced only when the written ones are on disk. The
page cache holds them as long as there is memory; when there is not, the disk does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmq.convert.writer import disk_error, json_bytes, write_file
from mmq.verify.logits.arms import Arm

_STATE = "state.json"

Mapped = np.memmap[Any, np.dtype[np.float32]]


class HiddenStates:
    """The files of one run.

    Args:
        folder: made if it is not there; another run's state in it is discarded.
        fingerprint: what the run depends on.

    Attributes:
        layer: the next layer to run.
        embedded: whether the inputs of layer `layer` are there.
        record: what the layers so far left for the report.
    """

    def __init__(
        self, folder: Path, arms: Sequence[Arm], tokens: int, hidden: int,
        fingerprint: dict[str, Any],
    ) -> None:  # fmt: skip
        self.folder = folder
        self._shape = (tokens, hidden)
        self._arms = arms
        self._fingerprint = fingerprint
        self.layer, self.embedded = 0, False
        self.record: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        if not self._resume():
            self._reserve()

    def _files(self) -> list[Path]:
        return [self._file(arm.name, parity) for arm in self._arms for parity in (0, 1)]

    def _file(self, arm: str, parity: int) -> Path:
        return self.folder / f"hidden-{arm}-{parity}.f32"

    def _reserve(self) -> None:
        """Files of full length: a write through a mapping that finds no room kills the process."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for file in self._files():
            try:
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                try:
                    os.posix_fallocate(fd, 0, self._bytes)
                finally:
                    os.close(fd)
            except OSError as error:
                self.remove()
                raise disk_error(error, file, self._bytes) from None

    def _resume(self) -> bool:
        try:
            state = json.loads((self.folder / _STATE).read_bytes())
            whole = all(f.stat().st_size == self._bytes for f in self._files())
            if state["fingerprint"] != self._fingerprint or not whole:
                return False
            self.layer, self.record = int(state["layer"]), list(state["record"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self.embedded = True
        return True

    @property
    def _bytes(self) -> int:
        return self._shape[0] * self._shape[1] * 4

    def inputs(self, arm: str) -> Mapped:
        """What layer `layer` reads."""
        return self._map(arm, self.layer % 2)

    def outputs(self, arm: str) -> Mapped:
        """What layer `layer` writes."""
        return self._map(arm, (self.layer + 1) % 2)

    def _map(self, arm: str, parity: int) -> Mapped:
        return np.memmap(self._file(arm, parity), np.float32, "r+", shape=self._shape)

    def embedding_written(self) -> None:
        """Layer 0's inputs are complete."""
        self._save()
        self.embedded = True

    def layer_written(self, record: dict[str, Any]) -> None:
        """The layer's outputs are complete; they are the next one's inputs."""
        self.layer += 1
        self.record.append(record)
        self._save()

    def _save(self) -> None:
        for arm in self._arms:
            self.inputs(arm.name).flush()
        state = {"fingerprint": self._fingerprint, "layer": self.layer, "record": self.record}
        write_file(self.folder / _STATE, json_bytes(state))

    def remove(self) -> None:
        """The run is reported: nothing is left to resume."""
        shutil.rmtree(self.folder, ignore_errors=True)


def flat(mapped: Mapped) -> npt.NDArray[np.float32]:
    """A mapping as a plain array that shares its memory."""
    return np.asarray(mapped)
