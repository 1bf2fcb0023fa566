"""Equal bytes for equal weights: whatever the number of jobs, the run, or the source's shards."""

from __future__ import annotations

import random

import pytest
from hostile import SMALL, add_mtp, good, scatter_scales, single_file
from in_process import run_mmq
from m3_source import hashes

#: These name the source's own shards, so they follow it; the report also holds timings.
OF_THE_SOURCE = ("mmq-convert.json", "mmq-manifest.json")
OPTIONS = ("--max-shard-size", "100KB")
LAYOUTS = [("--layout", "modelopt"), ("--layout", "minimax"), ("--to", "bf16")]
SEARCHES = [("--scale-search", "mse"), ("--scale-search", "four-over-six")]


def converted(source, out, *options, jobs="1"):
    code, events, _ = run_mmq("convert", source, out, *OPTIONS, *options, "--jobs", jobs)
    assert code == 0, events
    return out


def base():
    source = good()
    add_mtp(source)
    return source


@pytest.mark.parametrize("options", [*LAYOUTS, *SEARCHES], ids=" ".join)
def test_jobs_do_not_matter(tmp_path, options):
    folder = base().write(tmp_path / "src")
    one = hashes(converted(folder, tmp_path / "1", *options))
    assert len([n for n in one if n.startswith("model-")]) > 4
    assert hashes(converted(folder, tmp_path / "2", *options, jobs="2")) == one


@pytest.mark.parametrize("options", [*LAYOUTS, *SEARCHES], ids=" ".join)
def test_twice_is_the_same(tmp_path, options):
    folder = base().write(tmp_path / "src")
    first = hashes(converted(folder, tmp_path / "1", *options))
    again = base().write(tmp_path / "elsewhere" / "with other times")
    assert hashes(converted(again, tmp_path / "2", *options)) == first


def shuffled(source):
    """All tensors dealt to four shards in random order, scales apart from their weights."""
    names = list(source.all())
    random.Random(7).shuffle(names)
    tensors = source.all()
    source.shards = {
        f"part-{i}.safetensors": {n: tensors[n] for n in names[i::4]} for i in range(4)
    }


def reversed_names(source):
    source.shards = {s: dict(reversed(ts.items())) for s, ts in reversed(source.shards.items())}


def in_folders(source):
    source.shards = {f"weights/{i}/{s}": ts for i, (s, ts) in enumerate(source.shards.items())}


RESHARDINGS = {
    "one file": single_file,
    "scales before their weights": scatter_scales,
    "shuffled": shuffled,
    "reversed": reversed_names,
    "shards in folders": in_folders,
}


@pytest.mark.parametrize("options", [*LAYOUTS, ("--mtp", "keep")], ids=" ".join)
@pytest.mark.parametrize("how", RESHARDINGS)
def test_other_shards_give_the_same_bytes(tmp_path, how, options):
    wanted = hashes(converted(base().write(tmp_path / "src"), tmp_path / "1", *options))
    source = base()
    RESHARDINGS[how](source)
    folder = source.write(tmp_path / "other")
    got = hashes(converted(folder, tmp_path / "2", *options))
    assert set(got) == set(wanted)
    assert {n for n in got if got[n] != wanted[n]} <= set(OF_THE_SOURCE)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_other_shard_counts_give_the_same_bytes(tmp_path, shards):
    wanted = hashes(converted(good().write(tmp_path / "src"), tmp_path / "1"), OF_THE_SOURCE)
    folder = good(SMALL, shards=shards).write(tmp_path / "other")
    assert hashes(converted(folder, tmp_path / "2"), OF_THE_SOURCE) == wanted


def test_shard_size_moves_tensors_but_does_not_change_them(tmp_path):
    from m3_source import read_folder

    folder = good().write(tmp_path / "src")
    small = converted(folder, tmp_path / "1")
    large = tmp_path / "2"
    assert run_mmq("convert", folder, large, "--jobs", "1")[0] == 0
    assert read_folder(small) == read_folder(large)
