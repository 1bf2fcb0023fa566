"""The safetensors header: read with hard limits, and written to a known length.

    file = u64 length N (little-endian) · N bytes of JSON, space-padded to 8 · data, no holes

Every check runs before a byte of data is read, and nothing is allocated beyond the file.
Source: safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from mmq.errors import BadInputError
from mmq.quantize.formats import DTYPE_BITS, tensor_nbytes

#: The reference implementation's own limit.
MAX_HEADER_BYTES = 100_000_000
LFS_MAGIC = b"version https://git-lfs"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIMS = 64


class TensorInfo(NamedTuple):
    """One tensor in a file: `offset` is absolute, in bytes; `shard` is relative to the root.

    A tuple rather than a dataclass: the release has 45,838 of them and listing takes a second.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


class ShardHeader(NamedTuple):
    """What a shard's header says.  `raw` is the JSON as stored (hashed for identity)."""

    tensors: list[TensorInfo]
    metadata: dict[str, str]
    raw: bytes
    file_bytes: int
    mtime_ns: int


def read_header(path: Path, shard: str) -> ShardHeader:
    """Read and check one shard's header.

    Raises:
        BadInputError: no regular file, LFS pointer, truncated or oversized header, bad JSON,
            unknown dtype, offsets out of range, overlapping or with holes, duplicate names.
    """
    try:
        stat = path.stat()
        if not S_ISREG(stat.st_mode):
            raise BadInputError("file-unreadable", f"{shard} is no regular file", where=str(path))
        with path.open("rb") as file:
            start = file.read(8)
            if (start + file.read(len(LFS_MAGIC) - 8)).startswith(LFS_MAGIC):
                raise lfs_pointer(shard, path)
            length = _header_length(start, stat.st_size, shard)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from None
    return ShardHeader(*_parse(raw, shard, stat.st_size), raw, stat.st_size, stat.st_mtime_ns)


def lfs_pointer(name: str, path: Path) -> BadInputError:
    """A few lines of text that stand where git should have put a large file."""
    return BadInputError(
        "lfs-pointer",
        f"{name} is a Git LFS pointer, not the file itself",
        where=str(path),
        hint="git lfs pull   (or download with: hf download)",
    )


def unreadable(path: Path, error: OSError) -> BadInputError:
    """A source file that the system does not let us read."""
    why = error.strerror or str(error)
    return BadInputError("file-unreadable", f"{path.name} cannot be read: {why}", where=str(path))


def _header_length(start: bytes, size: int, shard: str) -> int:
    if len(start) < 8:
        raise BadInputError(
            "header-truncated", f"{shard} has {size} bytes: no room for a header", where=shard
        )
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise BadInputError(
            "header-too-large",
            f"{shard} claims a header of {length} bytes",
            where=shard,
            got=length,
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    if 8 + length > size:
        raise BadInputError(
            "header-truncated",
            f"{shard} ends inside its header",
            where=shard,
            got=f"{size} bytes",
            expected=f"at least {8 + length}",
        )
    return int(length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return out


def _parse(raw: bytes, shard: str, size: int) -> tuple[list[TensorInfo], dict[str, str]]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if b"\\u" in raw:
            # half a surrogate pair is valid JSON, but no name that could be written again
            json.dumps(header, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            "header-not-json", f"the header of {shard} is not valid JSON: {error}", where=shard
        ) from None
    if not isinstance(header, dict):
        raise BadInputError("header-not-json", f"the header of {shard} is no object", where=shard)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadInputError(
            "header-metadata", f"__metadata__ of {shard} must map strings to strings", where=shard
        )
    data_start = 8 + len(raw)
    tensors = [_entry(name, spec, shard, data_start) for name, spec in header.items()]
    _check_tiling(tensors, shard, data_start, size)
    return tensors, metadata


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, spec: Any, shard: str, data_start: int) -> TensorInfo:
    where = f"{shard}: {name}"
    if not isinstance(spec, dict) or set(spec) != _FIELDS:
        raise BadInputError(
            "header-entry",
            f"{name} in {shard} is not described by dtype, shape and data_offsets",
            where=where,
        )
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadInputError(
            "dtype-unknown", f"{name} has dtype {dtype!r}, which mmq does not know", where=where,
            got=dtype, expected=", ".join(sorted(DTYPE_BITS)),
        )  # fmt: skip
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_size, shape)):
        raise BadInputError("header-shape", f"{name} has no valid shape", where=where, got=shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise BadInputError(
            "header-offsets", f"{name} has no valid data_offsets", where=where, got=offsets
        )
    begin, end = offsets
    try:
        nbytes = tensor_nbytes(dtype, tuple(shape))
    except ValueError as error:
        raise BadInputError("header-shape", f"{name}: {error}", where=where) from None
    if end - begin != nbytes:
        raise BadInputError(
            "header-size-mismatch",
            f"{name}: shape × dtype and data_offsets disagree",
            where=where,
            got=f"{end - begin} bytes at {offsets}",
            expected=f"{nbytes} bytes for {dtype} {shape}",
        )
    return TensorInfo(name, dtype, tuple(shape), shard, data_start + begin, nbytes)


def _check_tiling(tensors: list[TensorInfo], shard: str, data_start: int, size: int) -> None:
    """Tensors cover the data section exactly: no overlap, no hole, nothing after the last."""
    end = data_start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            kind = (
                "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            )
            raise BadInputError(
                "header-tiling",
                f"{tensor.name} {kind}",
                where=f"{shard}: {tensor.name}",
                got=f"offset {tensor.offset - data_start}",
                expected=f"offset {end - data_start}",
            )
        end += tensor.nbytes
    if end > size:
        raise BadInputError(
            "shard-truncated",
            f"{shard} ends {end - size:,} bytes before its header says",
            where=shard,
            got=f"{size:,} bytes",
            expected=f"{end:,} bytes",
            hint="download the shard again and compare its SHA-256 with the Hub's",
        )
    if end < size:
        raise BadInputError(
            "shard-trailing-bytes",
            f"{shard} has {size - end:,} bytes after its last tensor",
            where=shard,
            got=f"{size:,} bytes",
            expected=f"{end:,} bytes",
        )


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]
) -> bytes:
    """The header (length field, JSON, padding) of tensors stored back to back in this order.

    Args:
        tensors: (name, dtype, shape, nbytes).
        metadata: written sorted, so that equal input gives equal bytes.
    """
    quoted = json.dumps(dict(sorted(metadata.items())), separators=(",", ":"), ensure_ascii=False)
    parts = [f'"__metadata__":{quoted}']
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        end = begin + nbytes
        dims = ",".join(map(str, shape))
        # hub names need no escaping; json.dumps for the rare one that does
        key = f'"{name}"' if name.isascii() and name.isprintable() and not _ESCAPED & set(name) \
            else json.dumps(name, ensure_ascii=False)  # fmt: skip
        parts.append(f'{key}:{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{begin},{end}]}}')
        begin = end
    body = ("{" + ",".join(parts) + "}").encode("utf-8")
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


_ESCAPED = frozenset('"\\')
