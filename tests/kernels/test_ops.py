"""The dispatcher: what it refuses, what it imports, which backend it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numba
import numpy as np
import pytest

from mmq.kernels import ops
from mmq.kernels.cpu import code_blocks, float_blocks, jit

ONE = np.float32(1)


def u8(*shape):
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (u8(2, 48), u8(2, 1)),
        (u8(2, 64), u8(2, 1)),
        (u8(2, 64), u8(3, 2)),
        (u8(64), u8(2)),
        (u8(2, 0), u8(2, 0)),
        (u8(2, 64), u8(2, 2).astype(np.int8)),
    ],
    ids=str,
)
def test_mxfp8_shapes_are_checked(codes, scale):
    for op in (ops.mxfp8_amax, ops.dequantize_mxfp8, ops.dequantize_mxfp8_f32):
        with pytest.raises(ValueError, match="MXFP8 codes"):
            op(codes, scale)
    with pytest.raises(ValueError, match="MXFP8 codes"):
        ops.quantize_nvfp4_from_mxfp8(codes, scale, ONE)


def test_shape_errors_name_both_shapes():
    with pytest.raises(ValueError, match=r"\[2, 64\].*\[2, 1\]"):
        ops.mxfp8_amax(u8(2, 64), u8(2, 1))


def test_nvfp4_shapes_are_checked():
    for op in (ops.dequantize_nvfp4, ops.dequantize_nvfp4_f32):
        with pytest.raises(ValueError, match="packed NVFP4"):
            op(u8(2, 12), u8(2, 1), ONE)
        with pytest.raises(ValueError, match="packed NVFP4"):
            op(u8(2, 16), u8(2, 1), ONE)


@pytest.mark.parametrize("s2", [0, -1, np.nan, np.inf, 2.0**-127])
def test_unusable_global_scales_are_refused(s2):
    with pytest.raises(ValueError, match="global scale"):
        ops.quantize_nvfp4_from_mxfp8(u8(1, 32), u8(1, 1), np.float32(s2))
    with pytest.raises(ValueError, match="global scale"):
        ops.quantize_nvfp4_from_float(np.zeros((1, 16), np.float32), "F32", np.float32(s2))
    with pytest.raises(ValueError, match="global scale"):
        ops.dequantize_nvfp4(u8(1, 8), u8(1, 1), np.float32(s2))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.zeros((2, 24), np.float32), "F32"),
        (np.zeros(16, np.float32), "F32"),
        (np.zeros((2, 32), np.float32), "BF16"),
        (np.zeros((2, 32), np.uint16), "F32"),
        (np.zeros((2, 32), np.float64), "F64"),
    ],
)
def test_float_inputs_are_checked(values, dtype):
    with pytest.raises(ValueError, match=r"shape|read as"):
        ops.quantize_nvfp4_from_float(values, dtype, ONE)
    with pytest.raises(ValueError, match=r"shape|read as"):
        ops.quantize_mxfp8(values, dtype)


@pytest.mark.parametrize("backend", ["cpu", "torch-table", "reference"])
def test_any_memory_layout(random_mxfp8, backend):
    """Mapped files give read-only, unaligned memory; slices give gaps. The bytes stay the same."""
    codes, scale = random_mxfp8(6, 64, seed=17)
    bits = ops.dequantize_mxfp8(codes, scale)
    plain = ops.quantize_nvfp4_from_mxfp8(codes, scale, ONE, backend=backend)
    plain_float = ops.quantize_nvfp4_from_float(bits, "BF16", ONE, backend=backend)
    kernels = code_blocks.quantize_nvfp4_codes_max, float_blocks.quantize_nvfp4_floats
    compiled_before = [len(kernel.signatures) for kernel in kernels]
    gaps = np.repeat(codes, 2, axis=1)[:, ::2]
    frozen = np.frombuffer(codes.tobytes(), np.uint8).reshape(codes.shape)
    for form in (gaps, frozen, np.asfortranarray(codes)):
        out = ops.quantize_nvfp4_from_mxfp8(form, scale, ONE, backend=backend)
        np.testing.assert_array_equal(out.packed, plain.packed)
    for dtype, source in (("BF16", bits), ("F32", ops.dequantize_mxfp8_f32(codes, scale))):
        raw = np.frombuffer(b"\0" + source.tobytes(), np.uint8)[1:]
        unaligned = raw.view(source.dtype).reshape(codes.shape)
        assert not unaligned.flags.aligned
        out = ops.quantize_nvfp4_from_float(unaligned, dtype, ONE, backend=backend)
        np.testing.assert_array_equal(out.packed, plain_float.packed)
    assert [len(kernel.signatures) for kernel in kernels] == compiled_before


def test_inputs_are_not_written(random_mxfp8):
    codes, scale = random_mxfp8(2, 64, seed=19)
    before = codes.copy(), scale.copy()
    for backend in ("cpu", "reference"):
        ops.quantize_nvfp4_from_mxfp8(codes, scale, ONE, backend=backend)
        ops.dequantize_mxfp8(codes, scale, backend=backend)
    assert codes.flags.writeable
    np.testing.assert_array_equal(codes, before[0])
    np.testing.assert_array_equal(scale, before[1])


def test_threads_do_not_disturb_each_other(random_mxfp8):
    codes, scale = random_mxfp8(64, 512, seed=23)
    scales = [np.float32(2.0**-n) for n in (10, 13)]
    want = {s2: ops.quantize_nvfp4_from_mxfp8(codes, scale, s2) for s2 in scales}
    wrong = []

    def work(s2):
        for _ in range(20):
            out = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2)
            if out.packed.tobytes() != want[s2].packed.tobytes():
                wrong.append(s2)

    threads = [threading.Thread(target=work, args=(s2,)) for s2 in scales]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_import_is_light():
    run_python(
        "import sys, mmq.kernels.ops, mmq.quantize.global_scale\n"
        "assert not {'torch', 'numba'} & set(sys.modules), 'heavy import'"
    )


def test_fast_backend_does_not_import_torch():
    run_python(
        "import sys, numpy as np; from mmq.kernels import ops\n"
        "ops.dequantize_mxfp8(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8))\n"
        "assert 'numba' in sys.modules and 'torch' not in sys.modules"
    )


@pytest.mark.parametrize(
    ("before", "environment", "why"),
    [
        ("import sys; sys.modules['numba'] = None\n", {}, "import of numba halted"),
        ("", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"),
    ],
    ids=["missing", "not allowed to compile"],
)
def test_without_numba_torch_serves_with_one_warning(before, environment, why):
    done = run_python(
        before + "import numpy as np; from mmq.kernels import ops\n"
        "codes = np.arange(32, dtype=np.uint8)[None]; scale = np.full((1, 1), 120, np.uint8)\n"
        "for _ in range(2): out = ops.quantize_nvfp4_from_mxfp8(codes, scale, np.float32(1))\n"
        "print(ops.resolve_backend(), out.packed.tobytes().hex())",
        **environment,
    )
    codes = np.arange(32, dtype=np.uint8)[None]
    ours = ops.quantize_nvfp4_from_mxfp8(codes, np.full((1, 1), 120, np.uint8), ONE)
    assert done.stdout.split() == ["torch-table", ours.packed.tobytes().hex()]
    assert done.stderr.count("numba cannot be used") == 1
    assert why in done.stderr


def test_any_change_of_source_leaves_compiled_code_behind(tmp_path):
    """numba's disk cache misses changes in other files: callers would run stale arithmetic."""
    package = Path(jit.__file__).parent
    assert jit.cache_folder().name == f"numba-{jit.source_digest(package)}"
    for path in package.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert jit.source_digest(tmp_path) == jit.source_digest(package)
    seen = {jit.source_digest(package)}
    for path in sorted(tmp_path.glob("*.py")):
        path.write_text(path.read_text("utf-8") + "#", "utf-8")
        assert jit.source_digest(tmp_path) not in seen
        seen.add(jit.source_digest(tmp_path))
    (tmp_path / "jit.py").rename(tmp_path / "jut.py")
    assert jit.source_digest(tmp_path) not in seen


def test_compiled_code_calls_nothing_from_other_folders():
    """The digest covers one folder: what compiled code uses must be there, or be constants."""
    package = Path(jit.__file__).parent
    outside = {
        line.split()[1]
        for path in package.glob("*.py")
        if "@jit" in path.read_text("utf-8")
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("from ..")
    }
    assert outside == {"..results", "..tables"}


def test_nan_stays_in_bounds():
    """Callers scan first. If one does not, codes mean nothing, but memory is not left."""
    codes = np.full((1, 32), 0x7F, np.uint8)
    for exponent in (0, 127, 254, 255):
        out = ops.quantize_nvfp4_from_mxfp8(codes, np.array([[exponent]], np.uint8), ONE)
        assert (out.scale < 0x7F).all()
    for bad in (np.nan, np.inf, -np.inf):
        values = np.array([[bad, *range(31)]], np.float32)
        assert (ops.quantize_nvfp4_from_float(values, "F32", ONE).scale < 0x7F).all()
        assert ops.quantize_mxfp8(values, "F32").codes[0, 0] & 0x7F == 0x7E


def test_backend_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.resolve_backend() == "cpu"
    with pytest.raises(ValueError, match="unknown backend"):
        ops.mxfp8_amax(u8(1, 32), u8(1, 1), backend="gpu")


def test_compiled_code_goes_where_it_can_be_written(monkeypatch, tmp_path):
    chosen, home = tmp_path / "chosen", tmp_path / "home"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(chosen))
    assert jit.cache_folder().parent == chosen
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert jit.cache_folder().parent == Path(jit.__file__).parent / "__pycache__"
    monkeypatch.setattr(jit, "_is_writable", lambda folder: home in folder.parents)
    assert jit.cache_folder().parent == home / "mmq"


def test_compiled_code_of_other_versions_goes_when_it_is_idle(tmp_path):
    ours, idle, busy = (tmp_path / f"numba-{digit * 16}" for digit in "abc")
    foreign = tmp_path / "numba-of-others"
    for folder in (ours, idle, busy, foreign):
        (folder / "inner").mkdir(parents=True)
    week_ago = time.time() - 7 * 86400
    for folder in (ours, idle, foreign):
        os.utime(folder, (week_ago, week_ago))
    jit.tidy(ours)
    assert sorted(tmp_path.iterdir()) == [ours, busy, foreign]
    assert time.time() - ours.stat().st_mtime < 60
    jit.tidy(tmp_path / "absent" / "numba-x")  # nothing to do, nothing raised


def test_compiles_without_a_cache_folder(monkeypatch):
    """Where nothing is writable numba refuses to cache; importing the kernels must still work."""
    real = numba.njit

    def njit(*args, cache=False, **settings):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **settings)

    monkeypatch.setattr(numba, "njit", njit)
    assert jit.jit(lambda x: x + 1)(1) == 2
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    assert jit.jit(lambda x: x + 2)(1) == 3
