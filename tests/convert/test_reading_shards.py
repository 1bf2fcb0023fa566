"""Damaged, missing and odd files: refused by name before a byte is written, or read for what they
are. Tests carry the row of the case list they stand for (R1 …)."""

from __future__ import annotations

import json
import os

import pytest
from hostile import (
    INDEX,
    NORM,
    W1,
    W2,
    bf16,
    dangle,
    expert,
    first,
    good,
    header_length,
    keep_in_index,
    last,
    layer,
    lfs_pointer,
    lose_shards,
    on_disk,
    scatter_scales,
    shard_bytes,
    single_file,
    tag_scales_e8m0,
)
from m3_source import Tensor, read_folder


def refused(outcome, id, *words, code=4):
    """Stopped before writing anything, with a message that names the thing at fault."""
    assert (outcome.code, outcome.error["id"]) == (code, id), outcome.events
    text = " ".join(str(v) for v in outcome.error.values())
    for word in words:
        assert str(word) in text, f"{word} is not in: {text}"
    assert not outcome.finished
    assert not outcome.out.exists()


@pytest.fixture
def same_as_good(good_output):
    """Asserts that an outcome's files are those of the good source, but for the ones left out."""

    def check(outcome, *leave_out):
        ours, theirs = outcome.hashes, good_output.hashes
        assert set(ours) == set(theirs)
        assert {n for n in ours if ours[n] != theirs[n]} <= set(leave_out)

    return check


def test_R1_absent_shards_are_all_listed(convert):
    source = good()
    names = [first(source), last(source)]
    lose_shards(source, *names)
    refused(convert(source), "shard-missing", "2 shard(s)", *names)


def test_R2_index_names_a_tensor_its_shard_does_not_hold(convert):
    source = good()
    shard = keep_in_index(source, f"{W2}.weight")
    refused(convert(source), "index-tensor-missing", f"{W2}.weight", shard)


def test_R2_index_names_the_wrong_shard(convert):
    source = good()
    source.weight_map = {n: s for s, tensors in source.shards.items() for n in tensors}
    source.weight_map[NORM] = first(source)
    refused(convert(source), "index-tensor-missing", NORM, first(source), last(source))


def test_R2_shard_holds_a_tensor_the_index_does_not_know(convert):
    source = good()
    source.weight_map = {n: s for s, ts in source.shards.items() for n in ts if n != NORM}
    refused(convert(source), "index-tensor-unlisted", NORM, last(source))


def test_R2_tensor_in_two_shards(convert):
    source = good()
    source.shards[first(source)][NORM] = source[NORM]
    refused(convert(source), "tensor-twice", NORM, first(source), last(source))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a\\b", "a\0b", ""])
def test_R2_index_leads_outside_the_folder(convert, name):
    source = good()
    source.weight_map = dict.fromkeys(source.all(), name)
    refused(convert(source), "index-path", INDEX)


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.pth", "model.gguf"])
def test_R4_stray_weights_beside_the_index_stay_out(convert, same_as_good, name):
    source = good()
    junk = {n: t._replace(data=b"\x11" * len(t.data)) for n, t in source.all().items()}
    source.files[name] = shard_bytes(junk, {"format": "pt"})
    outcome = convert(source)
    same_as_good(outcome)
    assert outcome.findings["stray-weights"]["where"] == name
    assert not (outcome.out / name).exists()


def test_R6_scales_in_other_shards_than_their_weights(convert, same_as_good):
    source = good()
    scatter_scales(source)
    same_as_good(convert(source), "mmq-manifest.json")


def test_R8_scales_tagged_e8m0_read_as_bytes(convert, same_as_good):
    source = good()
    tag_scales_e8m0(source)
    outcome = convert(source)
    same_as_good(outcome, "mmq-manifest.json", "tensors.csv")
    assert {t.dtype for n, t in outcome.tensors.items() if n.endswith("_inv")} == {"U8"}


@pytest.mark.parametrize("name", ["shard", INDEX, "config.json"])
def test_R12_lfs_pointer_is_called_one(convert, name):
    source = good()
    name = first(source) if name == "shard" else name
    on_disk(source, name, lambda raw: lfs_pointer())
    refused(convert(source), "lfs-pointer", "Git LFS pointer", name, "git lfs pull")


def test_R12_lfs_pointer_among_side_files_warns(convert):
    source = good()
    source.files["tokenizer.json"] = lfs_pointer(8_000_000)
    outcome = convert(source)
    assert outcome.code == 0
    assert outcome.findings["side-file-lfs-pointer"]["where"] == "tokenizer.json"
    assert outcome.findings["side-file-lfs-pointer"]["severity"] == "warning"


@pytest.mark.parametrize("cut", [1, 100, 100_000])
def test_R13_truncated_shard(convert, cut):
    source = good()
    on_disk(source, last(source), lambda raw: raw[:-cut])
    size = len(shard_bytes(source.shards[last(source)], source.metadata))
    refused(
        convert(source), "shard-truncated", last(source), f"{size - cut:,} bytes", f"{size:,} bytes"
    )


def test_R13_bytes_after_the_last_tensor(convert):
    source = good()
    on_disk(source, last(source), lambda raw: raw + b"\0" * 8)
    refused(convert(source), "shard-trailing-bytes", last(source), "8 bytes")


@pytest.mark.parametrize("keep", [0, 3, 8, 50])
def test_R13_file_ends_inside_its_header(convert, keep):
    source = good()
    on_disk(source, first(source), lambda raw: raw[:keep])
    refused(convert(source), "header-truncated", first(source))


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 100_000_001])
def test_R14_huge_header_length(convert, length):
    source = good()
    on_disk(source, first(source), header_length(length))
    refused(convert(source), "header-too-large", first(source), length)


@pytest.mark.parametrize(
    "start", [b"\xff\xfe\x00{", b"[[[[", b'{"a"', b"null", b"\x00\x00\x00\x00"], ids=repr
)
def test_R14_unreadable_header(convert, start):
    source = good()
    on_disk(source, first(source), lambda raw: raw[:8] + start + raw[8 + len(start) :])
    refused(convert(source), "header-not-json", first(source))


def _edited(change):
    """The good source with one header entry changed."""
    source = good()
    source.header_edits[last(source)] = lambda header: change(header, header[NORM])
    return source


HEADER_FAULTS = {
    "shape": (lambda h, t: t.update(shape=[127]), "header-size-mismatch"),
    "negative-dimension": (lambda h, t: t.update(shape=[-1, -128]), "header-shape"),
    "float-dimension": (lambda h, t: t.update(shape=[128.0]), "header-shape"),
    "no-dtype": (lambda h, t: t.pop("dtype"), "header-entry"),
    "offsets-reversed": (lambda h, t: t["data_offsets"].reverse(), "header-size-mismatch"),
    "offsets-negative": (lambda h, t: t.update(data_offsets=[-256, 0]), "header-offsets"),
    "overlap": (
        lambda h, t: t.update(data_offsets=[o - 2 for o in t["data_offsets"]]),
        "header-tiling",
    ),
    "hole": (
        lambda h, t: t.update(data_offsets=[o + 2 for o in t["data_offsets"]]),
        "header-tiling",
    ),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_R14_header_entries_that_cannot_be_true(convert, fault):
    change, id = HEADER_FAULTS[fault]
    source = _edited(change)
    refused(convert(source), id, last(source))


def test_R14_half_a_surrogate_pair_is_no_name(convert):
    def rename(header, entry):
        header["half \ud800"] = header.pop(NORM)

    source = good()
    source.header_edits[last(source)] = lambda header: rename(header, header[NORM])
    shard = last(source)
    text = json.dumps(NORM).encode()
    source.header_edits.clear()
    on_disk(
        source, shard, lambda raw: raw.replace(text, rb'"\ud800' + b"n" * (len(text) - 8) + b'"')
    )
    refused(convert(source), "header-not-json", shard)


def test_R16_unknown_dtype(convert):
    source = _edited(lambda h, t: t.update(dtype="X7_MADEUP"))
    refused(convert(source), "dtype-unknown", NORM, "X7_MADEUP", last(source))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0,)])
def test_R17_empty_tensors_keep_their_shape(convert, shape):
    source = good()
    source.shards[first(source)][f"{layer(0)}marker.weight"] = Tensor("BF16", shape, b"")
    assert convert(source).tensors[f"{layer(0)}marker.weight"] == ("BF16", shape, b"")


@pytest.mark.parametrize("named", ["folder", "file"])
@pytest.mark.parametrize("name", ["model.safetensors", "odd name.safetensors"])
def test_R18_single_file_without_index(convert, good_output, tmp_path, name, named):
    source = good()
    single_file(source)
    source.shards = {name: source.all()}
    folder = source.write(tmp_path / "src")
    outcome = convert(folder / name if named == "file" else folder)
    assert outcome.tensors == good_output.tensors


def test_R18_several_files_without_index(convert):
    source = good()
    source.indexed = False
    refused(convert(source), "index-missing", "3 weight files")


def test_R18_folder_without_weights(convert, tmp_path):
    (tmp_path / "src").mkdir()
    refused(convert(tmp_path / "src"), "no-weights", tmp_path / "src")


@pytest.mark.parametrize("total", [1, 10**30, 1e999, float("nan"), "many", None, True])
def test_R19_sizes_come_from_headers_not_from_the_index(convert, good_output, total):
    source = good()
    source.total_size = -7  # replaced below: None would mean "compute it"
    on_disk(source, INDEX, lambda raw: raw.replace(b"-7", json.dumps(total).encode()))
    outcome = convert(source)
    assert outcome.code == 0
    payload = outcome.json("mmq-convert.json")["source"]["payload_bytes"]
    assert payload == sum(len(t.data) for t in good().all().values())
    if isinstance(total, int) and total is not True:
        assert outcome.findings["index-total-size"]["severity"] == "warning"
        assert outcome.findings["index-total-size"]["got"] == f"{total:,}"


@pytest.mark.parametrize("name", ["shard", INDEX, "config.json"])
def test_R22_dangling_links_are_named_with_their_target(convert, name):
    source = good()
    name = first(source) if name == "shard" else name
    target = "../../blobs/" + "0" * 64
    dangle(source, name, target)
    refused(convert(source), "link-dangling", name, target)


def test_R22_dangling_side_file(convert):
    source = good()
    dangle(source, "merges.txt", "../gone")
    refused(convert(source), "side-file-link-dangling", "merges.txt", "../gone")


def test_R22_links_into_a_cache_are_followed(convert, same_as_good, tmp_path):
    folder = good().write(tmp_path / "src")
    (tmp_path / "blobs").mkdir()
    for path in [p for p in folder.iterdir() if p.is_file()]:
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(f"../blobs/{path.name}")
    outcome = convert(folder)
    same_as_good(outcome)
    assert not any(p.is_symlink() for p in outcome.out.rglob("*"))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_R22_shard_that_is_no_file(convert, kind):
    source = good()
    lose_shards(source, first(source))
    make = os.mkdir if kind == "folder" else os.mkfifo
    source.after.append(lambda folder: make(folder / first(source)))
    refused(convert(source), "file-unreadable", first(source))


def test_good_source_converts_every_expert(good_output, good_folder):
    out = good_output.tensors
    assert out[f"{expert(2, 3, 'w2')}.weight"].dtype == "U8"
    assert out[NORM] == read_folder(good_folder)[NORM] == bf16(good()[NORM].f64())
    assert out[f"{W1}.weight_scale_2"].shape == ()
