"""The same bytes whatever vectors the processor has: compiled anew with features taken away."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import arm_assembly
import every_byte
import pytest

X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 features")


def run_as(tmp_path, cpu, features):
    """Digest and LLVM's idea of the processor, from a process without compiled code to reuse."""
    code = (
        "import every_byte, numba; from mmq.kernels.cpu import code_blocks as c\n"
        "print(every_byte.digest())\n"
        "print('zmm' in str(c.quantize_nvfp4_codes_mse.inspect_asm()),"
        " 'ymm' in str(c.quantize_nvfp4_codes_mse.inspect_asm()))"
    )
    settings = {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(every_byte.__file__).parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@X86
def test_without_avx(tmp_path):
    """Plain x86-64: vectors of 16 bytes, no FMA."""
    assert run_as(tmp_path, "generic", "") == [every_byte.digest(), "False", "False"]


@X86
@pytest.mark.slow
def test_with_avx2_alone(tmp_path):
    features = "+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+sse4.2"
    assert run_as(tmp_path, "haswell", features) == [every_byte.digest(), "False", "True"]


@pytest.mark.slow
def test_nothing_is_fused_on_arm(tmp_path):
    """The kernels compiled for AArch64, whose multiply-adds every processor has."""
    done = subprocess.run(
        [sys.executable, arm_assembly.__file__],
        env=os.environ | {"NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    fused = {name: (int(adds), int(products)) for name, adds, products in rows}
    adds, _ = fused.pop("asks_for_it")
    assert adds > 0, "the search for them finds none"
    assert len(fused) == 4
    for name, (adds, products) in fused.items():
        assert adds == 0, name
        assert products > 10, name


def test_every_byte_is_the_definition():
    """So that the digests compared above are right, and not only equal."""
    assert every_byte.digest() == every_byte.digest("reference")
