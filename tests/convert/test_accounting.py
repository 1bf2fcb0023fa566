"""Every source tensor is converted, copied or dropped with a reason; every output tensor has a
source or is a known constant; and every shard is one that other readers open."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections import Counter

import numpy as np
import pytest
from hostile import INDEX, add_mtp, as_bf16, first, good, last
from in_process import run_mmq
from m3_source import Size, Tensor, layer, read_folder, read_shard, tensor
from safetensors import safe_open

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import build_plan
from mmq.convert.work import EXPERTS, AnalyticKScale, AnalyticVScale, CopyTensor, WriteScalar
from mmq.errors import MmqError

ITEM = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "I16": 2}
CONSTANTS = (WriteScalar, AnalyticKScale, AnalyticVScale)


def odd_tensors(rng):
    """Tensors of widths and lengths that would misalign their neighbours in name order."""
    prefix = rng.choice(["", "language_model.model.", f"{layer(1)}self_attn.", "vision_tower."])
    return {
        f"{prefix}a.flag": tensor("BOOL", np.ones(rng.randrange(1, 8))),
        f"{prefix}b.count": tensor("I64", np.arange(3), "<i8"),
        f"{prefix}c.bytes": tensor("U8", np.arange(rng.randrange(1, 8))),
        f"{prefix}d.wide": tensor("F64", np.ones(rng.randrange(1, 4)), "<f8"),
        f"{prefix}e.half": tensor("F16", np.ones(rng.randrange(1, 6)), "<f2"),
        f"{prefix}f.none": Tensor("BF16", (0, 7), b""),
        f"{prefix}g.scalar": tensor("F32", np.float32(3), "<f4"),
        f"{prefix}h.short": tensor("I16", np.arange(3), "<i2"),
    }


def random_source(seed):
    """A small MXFP8 checkpoint of random dimensions, shards and extras."""
    rng = random.Random(seed)
    layers = rng.randrange(2, 4)
    size = Size(
        layers=layers, dense=rng.randrange(layers), experts=rng.randrange(1, 5),
        hidden=rng.choice([64, 96, 128]), inter=rng.choice([32, 64, 96]), dense_inter=64,
        heads=2, kv_heads=1, head_dim=rng.choice([32, 64]), vocab=rng.choice([32, 49]),
    )  # fmt: skip
    source = good(size, shards=rng.randrange(1, 6))
    if rng.random() < 0.6:
        add_mtp(source)
    source.shards[rng.choice([first(source), last(source)])] |= odd_tensors(rng)
    return source


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders by kind: MXFP8 and BF16 checkpoints, and both NVFP4 layouts made of the former."""
    root = tmp_path_factory.mktemp("sources")
    folders = {}
    for seed in range(4):
        source = random_source(seed)
        mx = source.write(root / f"mxfp8-{seed}")
        folders[f"mxfp8-{seed}"] = mx
        folders[f"bf16-{seed}"] = as_bf16(source).write(root / f"bf16-{seed}")
        for layout in ("modelopt", "minimax"):
            name = f"{layout}-{seed}"
            options = ("--layout", layout, "--mtp", "keep", "--jobs", "1")
            assert run_mmq("convert", mx, root / name, *options)[0] == 0
            folders[name] = root / name
    return folders


def _kv_file(folder, path):
    layers = json.loads((folder / "config.json").read_bytes())["text_config"]["num_hidden_layers"]
    scales = {f"{layer(n)}self_attn.{p}_proj.{p}_scale": 0.5 for n in range(layers) for p in "kv"}
    path.write_text(json.dumps({"format": "mmq-kv-scales/1", "scales": scales}))
    return str(path)


def all_options(kv_file):
    """Every combination of what decides the tensors of an output."""
    for to, layout, mtp, kv, scales, ignore, size in itertools.product(
        ("nvfp4", "mxfp8", "bf16"), ("modelopt", "minimax"), ("drop", "keep"),
        (None, "analytic", "unit", "none", kv_file), (None, "unit", "none"),
        ((), ("*.layers.1.block_sparse_moe.experts.*", "*q_proj")), (40_000, 10**9),
    ):  # fmt: skip
        yield ConvertOptions(
            to=to, layout=layout, mtp=mtp, input_scales=scales, kv_scales=kv, ignore=ignore,
            max_shard_bytes=size,
        )  # fmt: skip


#: Why a combination may be refused; anything else is a failure.
REFUSALS = {
    "option-conflict", "nothing-to-convert", "already-converted", "target-unsupported",
    "ignore-splits-experts",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mxfp8", "bf16", "modelopt", "minimax"])
@pytest.mark.parametrize("seed", range(4))
def test_every_tensor_is_accounted_for(sources, tmp_path, kind, seed):
    folder = sources[f"{kind}-{seed}"]
    source = open_checkpoint(folder)
    planned, refused = 0, Counter()
    for options in all_options(_kv_file(folder, tmp_path / "kv.json")):
        try:
            plan = build_plan(source, options)
        except MmqError as error:
            refused[error.id] += 1
            continue
        planned += 1
        check_plan(plan, source)
    assert planned and set(refused) <= REFUSALS, refused


def check_plan(plan, source):
    consumed = Counter(t.name for u in plan.units for task in u.tasks for t in task.consumes)
    dropped = Counter(d.tensor.name for d in plan.dropped)
    assert consumed + dropped == Counter(list(source.tensors))
    assert all(d.reason for d in plan.dropped)
    written = Counter(o.name for u in plan.units for o in u.outputs)
    assert set(written.values()) == {1}
    for unit in plan.units:
        check_unit(unit, plan)
    assert plan.output_bytes == sum(o.nbytes for u in plan.units for o in u.outputs)


def check_unit(unit, plan):
    for task in unit.tasks:
        assert task.consumes or isinstance(task, CONSTANTS)
        if isinstance(task, CopyTensor):
            assert task.output.nbytes == task.source.nbytes
    length = struct.unpack("<Q", unit.header[:8])[0]
    assert len(unit.header) == 8 + length and length % 8 == 0
    header = json.loads(unit.header[8:])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert list(header) == [o.name for o in unit.outputs]
    end = 0
    for name, spec in header.items():
        assert spec["data_offsets"][0] == end, name
        assert end % ITEM.get(spec["dtype"], 1) == 0, f"{name} is misaligned"
        end = spec["data_offsets"][1]
    assert end == unit.data_bytes
    groups = {group_of(o.name) for o in unit.outputs}
    assert unit.data_bytes <= plan.options.max_shard_bytes or len(groups) == 1


def group_of(name):
    """What must not be split: an expert, or a module."""
    before, experts, after = name.partition(".experts.")
    return f"{before}{experts}{after.split('.')[0]}" if experts else name.rpartition(".")[0]


RUNS = [
    ("mxfp8", ()),
    ("mxfp8", ("--mtp", "keep", "--max-shard-size", "40KB")),
    ("mxfp8", ("--layout", "minimax", "--max-shard-size", "40KB")),
    ("mxfp8", ("--kv-scales", "unit", "--input-scales", "none")),
    ("mxfp8", ("--to", "bf16", "--max-shard-size", "40KB")),
    ("bf16", ("--mtp", "keep")),
    ("bf16", ("--to", "mxfp8", "--max-shard-size", "40KB")),
    ("modelopt", ("--layout", "minimax")),
    ("minimax", ("--max-shard-size", "40KB")),
    ("minimax", ("--to", "bf16")),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "kind, options", RUNS, ids=lambda v: v if isinstance(v, str) else "".join(v)
)
def test_other_readers_open_every_shard(sources, tmp_path, kind, options, seed):
    folder, out = sources[f"{kind}-{seed}"], tmp_path / "out"
    code, events, _ = run_mmq("convert", folder, out, *options, "--jobs", "1")
    assert code == 0, events
    total = 0
    for path in sorted(out.glob("*.safetensors")):
        ours = read_shard(path)
        total += sum(len(t.data) for t in ours.values())
        with safe_open(path, framework="pt") as theirs:
            assert set(theirs.keys()) == set(ours)
            assert theirs.metadata() == {"format": "pt"}
            for name, t in ours.items():
                piece = theirs.get_slice(name)
                assert (piece.get_dtype(), tuple(piece.get_shape())) == (t.dtype, t.shape)
                assert theirs.get_tensor(name).nbytes == len(t.data)
    index = json.loads((out / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == total
    report = json.loads((out / "mmq-convert.json").read_bytes())
    assert report["output"]["payload_bytes"] == total
    assert report["output"]["tensors"] == len(read_folder(out))
    table = (out / "tensors.csv").read_text("utf-8").splitlines()[1:]
    assert sum(report["dropped"].values()) == len(_manifest(out)["dropped"])
    assert len(table) == len({line.split(",")[0] for line in table})


def _manifest(out):
    return json.loads((out / "mmq-manifest.json").read_bytes())


def test_experts_from_another_checkpoint_are_accounted_for(sources):
    source = open_checkpoint(sources["mxfp8-1"])
    other = str(sources["bf16-1"])
    plan = build_plan(source, ConvertOptions(experts_from=other, mtp="keep"))
    ours, theirs = Counter(), set()
    for task in (task for unit in plan.units for task in unit.tasks):
        weights = getattr(task, "weights", ())
        foreign = {t for w in weights if w.origin == EXPERTS for t in w.tensors}
        theirs |= {t.name for t in foreign}
        ours.update(t.name for t in task.consumes if t not in foreign)
    ours.update(d.tensor.name for d in plan.dropped)
    assert ours == Counter(list(source.tensors))
    assert theirs == {f"{name}.weight" for name in plan.quantised}
