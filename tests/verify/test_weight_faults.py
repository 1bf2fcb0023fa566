"""Faults in the bytes: every one is found, with tensor, row and block, own output or foreign."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import LM_HEAD, NORM, W1, W2, as_bf16, good
from m3_source import bf16, expert, layer
from planted import MANIFEST

W3 = expert(1, 0, "w3")
BLOCK_BYTES = 8


def codes_of(out, module):
    """Name of a module's packed codes."""
    return f"{module}.weight_packed" if "minimax" in out.folder.name else f"{module}.weight"


def swap_scales(out, module=W1):
    """Two neighbouring scale bytes exchanged where they differ most; returns (row, block)."""
    scale = out[f"{module}.weight_scale"].bytes_as("u1").astype(int)
    row, block = np.unravel_index(np.abs(np.diff(scale, axis=1)).argmax(), scale[:, 1:].shape)

    def swap(a):
        a[row, [block, block + 1]] = a[row, [block + 1, block]]

    out.poke(f"{module}.weight_scale", swap)
    return int(row), int(block)


def swap_nibbles_of_a_block(out):
    def swap(a):
        part = a[5, 8:16]
        a[5, 8:16] = part << 4 | part >> 4

    out.poke(codes_of(out, W1), swap)
    return 5, 1


def flip_one_code(out):
    """One code of the block's largest value turned to its negative."""
    packed = out[codes_of(out, W1)].bytes_as("u1")
    row, byte = np.argwhere((packed & 7) == 7)[3]
    out.poke(codes_of(out, W1), lambda a: a.__setitem__((row, byte), a[row, byte] ^ 8))
    return int(row), int(byte) // BLOCK_BYTES


def zero_a_block(out):
    out.poke(codes_of(out, W1), lambda a: a.__setitem__((7, slice(16, 24)), 0))
    return 7, 2


def exchange_two_blocks(out):
    def exchange(a):
        a[3, 0:8], a[3, 8:16] = a[3, 8:16].copy(), a[3, 0:8].copy()

    out.poke(codes_of(out, W1), exchange)
    return 3, 0


IN_ONE_BLOCK = [swap_scales, swap_nibbles_of_a_block, flip_one_code, zero_a_block,
                exchange_two_blocks]  # fmt: skip


@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
@pytest.mark.parametrize("fault", IN_ONE_BLOCK, ids=lambda f: f.__name__)
def test_one_block_of_a_foreign_tensor(fault, layout, request):
    out = request.getfixturevalue(layout).foreign()
    row, block = fault(out)
    judged = out.judge()
    finding = judged.one("block-error", codes_of(out, W1))
    blocks = 64 * 128 // 16
    assert (
        f"of {blocks} blocks" in finding.message and f"row {row}, block {block}" in finding.message
    )
    # in a tensor this small one block may move the SQNR as well
    assert judged.ids <= {"block-error", "sqnr-low", "gate-fail"}


@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
@pytest.mark.parametrize("fault", IN_ONE_BLOCK, ids=lambda f: f.__name__)
def test_one_block_of_our_own_tensor(fault, layout, request):
    out = request.getfixturevalue(layout)
    row, block = fault(out)
    judged = out.judge()
    name = f"{W1}.weight_scale" if fault is swap_scales else codes_of(out, W1)
    finding = judged.one("conversion-differs", name)
    assert f"row {row}, block {block}" in finding.message
    assert judged.ids - {"gate-fail"} == {"conversion-differs", "file-hash"}


def test_every_single_bit_counts_in_our_own_output(modelopt):
    """A code next to the right one is as good by any measure, and still not what mmq writes."""
    packed = modelopt[f"{W1}.weight"].bytes_as("u1")
    row, byte = np.argwhere((packed & 7) == 1)[0]
    modelopt.poke(f"{W1}.weight", lambda a: a.__setitem__((row, byte), a[row, byte] ^ 1))
    finding = modelopt.judge().one("conversion-differs", f"{W1}.weight")
    assert "1 of 4,096 bytes" in finding.message
    assert f"row {row}, block {byte // BLOCK_BYTES}" in finding.message
    assert (finding.got, finding.expected) == (f"{packed[row, byte] ^ 1:#04x}",
                                               f"{packed[row, byte]:#04x}")  # fmt: skip


def exchange(out, one, other):
    """All tensors of two modules exchanged."""
    suffixes = [n.rpartition(".")[2] for n in out.shard_index() if n.startswith(f"{one}.")]
    for suffix in suffixes:
        a, b = (out[f"{m}.{suffix}"] for m in (one, other))
        for name, t in ((f"{one}.{suffix}", b), (f"{other}.{suffix}", a)):
            storage = "<f4" if t.dtype == "F32" else "u1"
            out.poke(name, lambda _, t=t, storage=storage: t.bytes_as(storage))


WHOLE_TENSORS = {
    "swap nibbles": lambda out: out.poke(codes_of(out, W1), lambda a: a << 4 | a >> 4),
    "zero the codes": lambda out: out.poke(codes_of(out, W1), np.zeros_like),
    "transpose": lambda out: out.poke(codes_of(out, W1), lambda a: a.reshape(a.shape[::-1]).T),
    "exchange experts": lambda out: exchange(out, W1, expert(1, 1, "w1")),
    "shift scales": lambda out: out.poke(f"{W1}.weight_scale", lambda a: np.roll(a, 1, axis=1)),
    "double scales": lambda out: out.poke(f"{W1}.weight_scale", lambda a: np.minimum(a + 8, 126)),
    "swizzle scales": lambda out: out.poke(
        f"{W1}.weight_scale", lambda a: a.reshape(2, 32, 8).transpose(1, 0, 2).reshape(a.shape)
    ),
}


@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
@pytest.mark.parametrize("fault", WHOLE_TENSORS)
def test_whole_tensors_of_a_foreign_output(fault, layout, request):
    out = request.getfixturevalue(layout).foreign()
    WHOLE_TENSORS[fault](out)
    judged = out.judge()
    judged.one("sqnr-low", codes_of(out, W1))
    assert not [f for f in judged.of("sqnr-low") if expert(2, 0, "w1") in f.where]


@pytest.mark.parametrize("fault", WHOLE_TENSORS)
def test_whole_tensors_of_our_own_output(fault, modelopt):
    WHOLE_TENSORS[fault](modelopt)
    judged = modelopt.judge()
    assert any(f.where.startswith(W1) for f in judged.of("conversion-differs"))
    # what is stored is measured, not what should have been
    assert judged.report.metrics["sqnr_db_min"] < 19.5


@pytest.mark.parametrize(
    ("layout", "suffix"), [("modelopt", "weight_scale_2"), ("minimax", "weight_global_scale")]
)
@pytest.mark.parametrize("change", [lambda a: 1 / a, lambda a: a * 2, lambda a: a * 1.25],
                         ids=["inverted", "doubled", "quarter more"])  # fmt: skip
def test_wrong_global(change, layout, suffix, request):
    out = request.getfixturevalue(layout)
    out.poke(f"{W2}.{suffix}", change)
    out.judge().one("conversion-differs", f"{W2}.{suffix}")
    out.foreign().judge().one("sqnr-low", codes_of(out, W2))


def test_unusable_global_compares_nothing_but_fails(modelopt):
    modelopt.set_scalar(f"{W2}.weight_scale_2", np.nan)
    for judged in (modelopt.judge(), modelopt.foreign().judge()):
        judged.one("scalar-invalid", f"{W2}.weight_scale_2")
        assert judged.report.metrics["quantised_tensors"] == 23


@pytest.mark.parametrize(
    "name",
    [NORM, LM_HEAD, f"{layer(0)}self_attn.q_proj.weight", f"{layer(1)}block_sparse_moe.gate.weight",
     f"{layer(0)}self_attn.q_proj.weight_scale_inv", "patch_merge_mlp.linear_2.bias",
     "vision_tower.vision_model.embeddings.patch_embedding.weight"],
)  # fmt: skip
def test_passthrough_byte(name, modelopt):
    source = good()[name]

    def flip(a):
        a.view("u1").reshape(-1)[77] ^= 1

    modelopt.poke(name, flip)
    for judged in (modelopt.judge(), modelopt.foreign().judge()):
        finding = judged.one("passthrough-differs", name)
        width = {"BF16": 2, "F32": 4}.get(source.dtype, 1)
        row = 77 // (len(source.data) // source.shape[0])
        place = f"row {row}, " if len(source.shape) > 1 else f"element {77 // width}"
        assert place in finding.message and f"1 of {len(source.data):,} bytes" in finding.message
        assert int(finding.got, 16) == int(finding.expected, 16) ^ 1


def test_kv_scale_is_recomputed(modelopt):
    name = f"{layer(2)}self_attn.v_proj.v_scale"
    modelopt.poke(name, lambda a: np.nextafter(a, np.float32(1)))
    modelopt.judge().one("kv-scale-differs", name)
    assert modelopt.foreign().judge().verdict == "pass"


def test_input_scale_is_compared(modelopt):
    modelopt.set_scalar(f"{W2}.input_scale", 2.0)
    modelopt.judge().one("conversion-differs", f"{W2}.input_scale")


def test_other_numerics_are_compared_by_value(modelopt):
    with modelopt.json(MANIFEST) as manifest:
        manifest["numerics_version"] = 99
    judged = modelopt.judge()
    assert judged.verdict == "pass"
    assert "numerics version is 99" in judged.skipped
    swap_scales(modelopt)
    modelopt.judge().one("block-error", f"{W1}.weight")


def test_bf16_and_mxfp8_conversions_are_recomputed(make, good_folder):
    out = make(good_folder, to="bf16")
    out.poke(f"{W1}.weight", lambda a: a.__setitem__((9, 40), a[9, 40] ^ 1))
    assert "row 9" in out.judge().one("conversion-differs", f"{W1}.weight").message


def test_change_of_layout_is_compared(conversions, make):
    out = make(conversions["modelopt"].folder, "minimax", layout="minimax")
    out.poke(f"{W1}.weight_packed", lambda a: a.__setitem__((2, 9), a[2, 9] ^ 0x11))
    finding = out.judge().one("conversion-differs", f"{W1}.weight_packed")
    assert "row 2, block 1" in finding.message
    # one ulp of a reciprocal is a matter of taste, two are not
    out.poke(f"{W2}.weight_global_scale", lambda a: np.nextafter(a, np.float32(0)))
    out.judge().one("conversion-differs", f"{W2}.weight_global_scale")
    judged = out.foreign().judge()
    judged.one("conversion-differs", f"{W2}.weight_global_scale", "note")
    out.poke(f"{W2}.weight_global_scale", lambda a: np.nextafter(a, np.float32(0)))
    out.judge().one("conversion-differs", f"{W2}.weight_global_scale")


def test_weights_quantised_from_another_source(make, good_folder, tmp_path):
    """From a BF16 release instead of the MXFP8 one: allowed one step, and said so."""
    other = as_bf16(good())
    rng = np.random.default_rng(3)
    for name, t in other.all().items():
        if ".experts." in name:
            values = t.f64() * (1 + rng.uniform(-1 / 17, 1 / 17, t.shape))
            other[name] = bf16(values)
    experts = other.write(tmp_path / "bf16")
    out = make(good_folder, experts_from=str(experts)).foreign()
    judged = out.judge()
    assert judged.verdict == "pass"
    finding = judged.one("rounding-not-nearest", judged.of("rounding-not-nearest")[0].where, "note")
    assert "24 weight(s)" in finding.message
    zero_a_block(out)
    out.judge().one("block-error", f"{W1}.weight")


def test_blocks_too_small_for_a_normal_scale(make, tmp_path):
    source = good()
    values = source.values(W1) / 16
    values[0, 0] = 2.0**7
    source.set_values(W1, values)
    out = make(source.write(tmp_path / "source"))
    assert out.judge().verdict == "pass"
    assert out.foreign().judge().verdict == "pass"
    faint = out[f"{W1}.weight_scale"].bytes_as("u1") < 8

    def flush(a):
        a.reshape(*faint.shape, 8)[faint] = 0

    out.poke(f"{W1}.weight", flush)
    out.poke(f"{W1}.weight_scale", lambda a: np.where(faint, 0, a))
    judged = out.judge()
    judged.one("blocks-subnormal", f"{W1}.weight", "warning")
    assert judged.ids == {"blocks-subnormal"}


def test_in_pieces(monkeypatch, modelopt):
    """Weights larger than a piece are compared piece by piece: counts add up, rows are right."""
    monkeypatch.setattr("mmq.convert.stream.CHUNK_BYTES", 1024)  # eight rows
    assert modelopt.judge().report.metrics["sqnr_db_min"] > 20
    before = modelopt[f"{W1}.weight"].bytes_as("u1")
    modelopt.poke(f"{W1}.weight", lambda a: a.__setitem__((slice(37, 62), slice(8, 16)), 0x99))
    count = np.count_nonzero(before != modelopt[f"{W1}.weight"].bytes_as("u1"))
    finding = modelopt.judge().one("conversion-differs", f"{W1}.weight")
    assert f"{count:,} of 4,096 bytes" in finding.message and "row 37, block 1" in finding.message
    finding = modelopt.foreign().judge().one("block-error", f"{W1}.weight")
    assert "25 of 512 blocks" in finding.message and "row 37, block 1" in finding.message
