"""Damaged headers, indexes and configs of any kind end in a BadInputError, and cost no more memory
than the file has bytes."""

from __future__ import annotations

import copy
import json
import struct
import tracemalloc

import numpy as np
import pytest
from hostile import INDEX, config, good
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from m3_source import shard_bytes, tensor

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.configs import build_configs
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import ConversionPlan, build_plan
from mmq.convert.safetensors_header import header_bytes, read_header
from mmq.errors import BadInputError, MmqError

FUZZ = settings(
    max_examples=300, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

TENSORS = {
    "a": tensor("F32", np.zeros((2, 3)), "<f4"),
    "b": tensor("BF16", np.zeros(5), "<u2"),
    "empty": tensor("U8", np.zeros((0, 4))),
    "c.weight": tensor("F8_E4M3", np.zeros((4, 4))),
}
VALID = shard_bytes(TENSORS, {"format": "pt"})
_HEADER = json.loads(VALID[8 : 8 + struct.unpack("<Q", VALID[:8])[0]])

_NUMBERS = st.one_of(
    st.integers(), st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**40]),
    st.floats(), st.booleans(),
)  # fmt: skip
_JSON = st.recursive(
    st.none() | _NUMBERS | st.text(max_size=8),
    lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=4), one, max_size=4),
    max_leaves=6,
)
_SHAPES = st.lists(_NUMBERS, max_size=70) | _JSON
_OFFSETS = st.lists(_NUMBERS, min_size=2, max_size=2) | _JSON
_DTYPES = st.sampled_from(["F32", "F4", "F6_E2M3", "C64", "f32", "X", ""]) | _JSON


@st.composite
def headers(draw):
    """The valid header with up to three things changed."""
    header = copy.deepcopy(_HEADER)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(list(header) or ["x"]))
        kind = draw(
            st.sampled_from(["dtype", "shape", "data_offsets", "entry", "drop", "key", "add"])
        )
        spec = header.get(name)
        if kind == "drop":
            header.pop(name, None)
        elif kind == "add":
            header[draw(st.text(max_size=5))] = draw(_JSON)
        elif kind == "key" and isinstance(spec, dict):
            spec[draw(st.text(max_size=5))] = draw(_JSON)
        elif kind == "entry" or not isinstance(spec, dict):
            header[name] = draw(_JSON)
        else:
            values = {"dtype": _DTYPES, "shape": _SHAPES, "data_offsets": _OFFSETS}
            spec[kind] = draw(values[kind])
    return header


def framed(text, length=None):
    return struct.pack("<Q", len(text) if length is None else length) + text


def read(tmp_path, raw):
    """What `read_header` makes of bytes; anything but a header or a BadInputError fails."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    try:
        header = read_header(path, path.name)
    except BadInputError as error:
        assert error.message and error.where
        return error.id
    end = 8 + len(header.raw)
    for t in sorted(header.tensors, key=lambda t: (t.offset, t.nbytes)):
        assert t.offset == end and t.nbytes >= 0
        end += t.nbytes
    assert end == len(raw)
    # what was read can be written again
    again = header_bytes([(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors], {})
    assert json.loads(again[8:])
    return header


def test_the_valid_file_is_valid(tmp_path):
    assert [t.name for t in read(tmp_path, VALID).tensors] == list(TENSORS)


@FUZZ
@given(headers(), st.binary(max_size=70), st.booleans())
def test_changed_headers(tmp_path, header, tail, keep_data):
    text = json.dumps(header).encode()
    read(tmp_path, framed(text) + (VALID[-50:] if keep_data else tail))


@FUZZ
@given(st.binary(max_size=200), st.none() | st.integers(0, 2**64 - 1))
def test_random_bytes(tmp_path, raw, length):
    read(tmp_path, raw)
    read(tmp_path, framed(raw, length))


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1,
                max_size=4), st.integers(0, len(VALID)))  # fmt: skip
def test_flipped_bytes_and_cuts(tmp_path, flips, cut):
    raw = bytearray(VALID)
    for position, value in flips:
        raw[position] = value
    read(tmp_path, bytes(raw))
    read(tmp_path, bytes(raw[:cut]))


def entry(shape, offsets, dtype="U8"):
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'.encode()


BOMBS = {
    "lists": (b"[" * 1_000_000, "header-not-json"),
    "objects": (b'{"a":' * 200_000, "header-not-json"),
    "closed": (b"[" * 50_000 + b"]" * 50_000, "header-not-json"),
    "in an entry": (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "header-not-json"),
    "long number": (b'{"a": ' + b"9" * 100_000 + b"}", "header-not-json"),
    "twice": (b'{"a":1,"a":2}', "header-not-json"),
    "entry twice": (
        entry("[0]", "[0,0]").replace(b'"U8"', b'"U8","dtype":"U8"'),
        "header-not-json",
    ),
    "metadata of numbers": (b'{"__metadata__":{"format":1}}', "header-metadata"),
    "metadata of lists": (b'{"__metadata__":[]}', "header-metadata"),
    "NaN": (entry("[NaN]", "[0,0]"), "header-shape"),
    "Infinity": (entry("[0]", "[0,Infinity]"), "header-offsets"),
    "bool": (entry("[true]", "[0,1]"), "header-shape"),
    "bool offset": (entry("[1]", "[false,true]"), "header-offsets"),
    "float": (entry("[0]", "[0.0,0.0]"), "header-offsets"),
    "negative": (entry("[-1,-1]", "[0,1]"), "header-shape"),
    "too many dimensions": (entry(str([1] * 65), "[0,1]"), "header-shape"),
    "beyond 63 bits": (entry(f"[{2**63}]", f"[0,{2**63}]"), "header-shape"),
    "product beyond 64 bits": (entry(f"[{2**32},{2**32}]", "[0,0]"), "header-size-mismatch"),
    "product that wraps": (entry(f"[{2**62}]", "[0,0]", "F32"), "header-size-mismatch"),
    "half a byte": (entry("[1]", "[0,0]", "F4"), "header-shape"),
    "dtype unknown": (entry("[1]", "[0,1]", "u8"), "dtype-unknown"),
    "surrogate": (entry("[0]", "[0,0]").replace(b'"a"', rb'"\ud800"'), "header-not-json"),
    "byte order mark": (b"\xef\xbb\xbf{}", "header-not-json"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_known_bombs(tmp_path, name):
    text, id = BOMBS[name]
    assert read(tmp_path, framed(text) + b"\0") == id


@pytest.mark.parametrize("length", [100, 10**8, 10**8 + 1, 2**40, 2**63, 2**64 - 1])
def test_a_claim_allocates_nothing(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(framed(b"{}", length))
    tracemalloc.start()
    try:
        with pytest.raises(BadInputError):
            read_header(path, path.name)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_shape_allocates_nothing(tmp_path):
    text = entry(f"[{2**62}]", f"[0,{2**62}]")
    tracemalloc.start()
    try:
        assert read(tmp_path, framed(text)) == "shard-truncated"
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return good().write(tmp_path_factory.mktemp("fuzz") / "src")


def opens_or_refuses(folder):
    try:
        return build_plan(open_checkpoint(folder), ConvertOptions())
    except MmqError as error:
        assert error.message
        return error


@FUZZ
@given(st.one_of(
    st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), _JSON, max_size=3),
    st.dictionaries(
        st.text(max_size=6) | st.just("language_model.model.norm.weight"),
        st.text(max_size=300) | _JSON | st.sampled_from(
            ["model-00003-of-00003.safetensors", ".", "..", "/", "a/../b", "figures", "config.json",
             "x" * 300, "\ud800", "./model-00003-of-00003.safetensors", "//"]
        ), max_size=4,
    ).map(lambda weight_map: {"weight_map": weight_map}),
    _JSON,
))  # fmt: skip
def test_indexes(folder, index):
    (folder / INDEX).write_text(json.dumps(index))
    assert isinstance(opens_or_refuses(folder), MmqError)


@FUZZ
@given(st.binary(max_size=60))
def test_index_of_random_bytes(folder, raw):
    (folder / INDEX).write_bytes(raw)
    assert isinstance(opens_or_refuses(folder), MmqError)


def _paths(value, prefix=()):
    yield prefix
    items = value.items() if isinstance(value, dict) else ()
    for key, item in items:
        yield from _paths(item, (*prefix, key))


@FUZZ
@given(st.sampled_from([p for p in _paths(config()) if p]), _JSON, st.booleans())
def test_configs(tmp_path_factory, path, value, drop):
    source = tmp_path_factory.getbasetemp() / "fuzzed-config"
    if not source.exists():
        good().write(source)
    changed = config()
    part = changed
    for key in path[:-1]:
        part = part[key]
    if drop:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    (source / "config.json").write_text(json.dumps(changed))
    plan = opens_or_refuses(source)
    if isinstance(plan, ConversionPlan):
        assert json.dumps(build_configs(plan))
