"""Importance weights: one number for each input column, in the same search."""

from __future__ import annotations

import numpy as np
import pytest
import sample_blocks

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

SEARCHES = ["mse", "four-over-six"]
BACKENDS = ["cpu", "torch-table", "reference"]
COLUMNS = 320


@pytest.fixture(scope="module")
def weights_OK():
    return sample_blocks.lognormal_rows_with_outliers(12 * COLUMNS // 16, 41).reshape(12, COLUMNS)


def quantize(values, search="mse", importance=None, backend="auto"):
    s2 = nvfp4_global_scale(ops.float_amax(values, "F32"), search)
    return ops.quantize_nvfp4_from_float(
        values, "F32", s2, search=search, importance=importance, backend=backend
    )


def importances():
    """Ordinary, wild, and with columns that do not count."""
    rng = np.random.default_rng(43)
    ordinary = rng.lognormal(0, 1, COLUMNS)
    wild = np.exp2(rng.uniform(-120, 120, COLUMNS))
    sparse = np.where(rng.random(COLUMNS) < 0.5, 0, ordinary)
    single = np.where(np.arange(COLUMNS) % 16 == 5, 1, 0)
    return {
        "ordinary": ordinary,
        "wild": wild,
        "sparse": sparse,
        "one of sixteen": single,
        "none": np.zeros(COLUMNS),
        "smallest": np.full(COLUMNS, np.finfo(np.float32).smallest_subnormal),
        "largest": np.full(COLUMNS, np.finfo(np.float32).max),
    }


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unit_weights_change_nothing(weights_OK, search, backend):
    ones = np.ones(COLUMNS, np.float32)
    plain = quantize(weights_OK, search, backend=backend)
    weighted = quantize(weights_OK, search, ones, backend)
    assert weighted.packed.tobytes() == plain.packed.tobytes()
    assert weighted.scale.tobytes() == plain.scale.tobytes()
    assert weighted.error == plain.error


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", importances())
def test_backends_agree(weights_OK, search, name):
    importance = importances()[name].astype(np.float32)
    definition = quantize(weights_OK, search, importance, "reference")
    for backend in ("cpu", "torch-table"):
        ours = quantize(weights_OK, search, importance, backend)
        np.testing.assert_array_equal(ours.scale, definition.scale)
        np.testing.assert_array_equal(ours.packed, definition.packed)
        assert ours.error == definition.error


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_and_their_values_agree(weights_OK, search, backend):
    importance = importances()["ordinary"].astype(np.float32)
    codes, scale, _ = ops.quantize_mxfp8(weights_OK, "F32")
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale), search)
    options = {"search": search, "importance": importance, "backend": backend}
    from_codes = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, **options)
    values = ops.dequantize_mxfp8_f32(codes, scale)
    from_values = ops.quantize_nvfp4_from_float(values, "F32", s2, **options)
    np.testing.assert_array_equal(from_codes.scale, from_values.scale)
    np.testing.assert_array_equal(from_codes.packed, from_values.packed)


def test_a_common_power_of_two_changes_nothing(weights_OK):
    importance = importances()["ordinary"].astype(np.float32)
    plain = quantize(weights_OK, importance=importance)
    scaled = quantize(weights_OK, importance=importance * np.float32(2.0**-20))
    np.testing.assert_array_equal(scaled.packed, plain.packed)
    np.testing.assert_array_equal(scaled.scale, plain.scale)


def test_weights_are_used_where_they_stand(weights_OK):
    """Columns that count a thousand times gain, those beside them pay."""
    important = np.arange(COLUMNS) % 16 == 3
    importance = np.where(important, 1000, 1).astype(np.float32)
    error = {}
    for name, weights in (("plain", None), ("weighted", importance)):
        out = quantize(weights_OK, importance=weights)
        s2 = nvfp4_global_scale(ops.float_amax(weights_OK, "F32"), "mse")
        restored = ops.dequantize_nvfp4_f32(out.packed, out.scale, s2)
        error[name] = ((restored.astype(np.float64) - weights_OK) ** 2).sum(axis=0)
    assert error["weighted"][important].sum() < 0.5 * error["plain"][important].sum()
    assert error["weighted"].sum() > error["plain"].sum()
    assert (error["weighted"] * importance).sum() < (error["plain"] * importance).sum()


def test_columns_that_do_not_count_are_given_up():
    """With weight on small elements alone the largest may saturate: far below the `max` code."""
    values = np.full((1, 16), 2.0**-7, np.float32)
    values[0, 0] = 1.0
    importance = np.ones(16, np.float32)
    importance[0] = 0
    out = quantize(values, importance=importance)
    s2 = nvfp4_global_scale(np.float32(1), "mse")
    restored = ops.dequantize_nvfp4_f32(out.packed, out.scale, s2)[0]
    assert np.abs(restored[1:] / 2.0**-7 - 1).max() < 0.03
    assert restored[0] < 0.1


def test_how_far_down_depends_on_the_weight_of_the_largest():
    """It counts for 1 to 1/1000: at some weight scales too small for it begin to win."""
    blocks = np.abs(sample_blocks.gaussian(6400, seed=47)).reshape(-1, 16)
    blocks = -np.sort(-blocks, axis=1)  # the largest first
    blocks[:, 0] *= 1.5
    distances = []
    for weight in np.geomspace(1, 1e-3, 16):
        importance = np.ones(16, np.float32)
        importance[0] = weight
        definition = quantize(blocks, importance=importance, backend="reference")
        ours = quantize(blocks, importance=importance, backend="cpu")
        np.testing.assert_array_equal(ours.scale, definition.scale)
        first = quantize(blocks, "four-over-six")
        distances.append((ours.scale.astype(int) - first.scale).min())
    assert distances[0] > -16 > distances[-1]


@pytest.mark.parametrize(
    ("importance", "complaint"),
    [
        (np.ones(COLUMNS - 1, np.float32), r"expected float32 \[320\]"),
        (np.ones((1, COLUMNS), np.float32), r"expected float32 \[320\]"),
        (np.ones(COLUMNS), r"float64 \[320\]"),
        (np.full(COLUMNS, -1, np.float32), "not negative"),
        (np.full(COLUMNS, np.nan, np.float32), "finite"),
        (np.full(COLUMNS, np.inf, np.float32), "finite"),
    ],
    ids=["short", "matrix", "float64", "negative", "nan", "inf"],
)
def test_unusable_weights_are_refused(weights_OK, importance, complaint):
    with pytest.raises(ValueError, match=complaint):
        quantize(weights_OK, importance=importance)
    codes, scale, _ = ops.quantize_mxfp8(weights_OK, "F32")
    with pytest.raises(ValueError, match=complaint):
        ops.quantize_nvfp4_from_mxfp8(
            codes, scale, np.float32(1), search="mse", importance=importance
        )


def test_max_scaling_has_no_use_for_weights(weights_OK):
    with pytest.raises(ValueError, match="max"):
        quantize(weights_OK, "max", np.ones(COLUMNS, np.float32))
