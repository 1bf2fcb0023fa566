"""One digest of everything the fast backend computes: the same on every processor.

Sources of all kinds through all operations and searches; inputs are made with integer arithmetic.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale


def numbers(count, seed):
    """U32 by xorshift: no library's generator takes part."""
    out = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)
    for shift in (13, 17, 5):
        out ^= (out << np.uint32(shift)) if shift != 17 else (out >> np.uint32(shift))
    return out


def tensors():
    """BF16 bits [O, K]: exponents within 2, 8 and 30 octaves, and every finite number."""
    for seed, octaves in ((1, 2), (2, 8), (3, 30)):
        raw = numbers(24 * 416, seed)
        exponent = 120 - (raw >> 16) % octaves
        yield ((raw & 0x807F) | (exponent << 7)).astype(np.uint16).reshape(24, 416)
    yield np.array([b for b in range(65536) if b & 0x7F80 != 0x7F80], np.uint16).reshape(-1, 128)


def digest(backend="cpu"):
    """SHA-256 over bytes and error sums of all operations."""
    sha = hashlib.sha256()

    def add(out):
        for part in out if isinstance(out, tuple) else (out,):
            sha.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())

    for bits in tensors():
        codes, exponents, error = ops.quantize_mxfp8(bits, "BF16", backend=backend)
        f32 = ops.dequantize_mxfp8_f32(codes, exponents, backend=backend)
        importance = ((numbers(bits.shape[1], 7) >> 24) / 32).astype(np.float32)
        add((codes, exponents, error, f32))
        add(ops.dequantize_mxfp8(codes, exponents, backend=backend))
        amax = ops.mxfp8_amax(codes, exponents, backend=backend)
        for search in ops.SEARCHES:
            s2 = nvfp4_global_scale(amax, search)
            options = {"search": search, "backend": backend}
            out = ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, **options)
            add(out)
            add(ops.quantize_nvfp4_from_float(bits, "BF16", s2, **options))
            add(ops.quantize_nvfp4_from_float(f32, "F32", s2, **options))
            if search != "max":
                options["importance"] = importance
                add(ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, **options))
            add(ops.dequantize_nvfp4(out.packed, out.scale, s2, backend=backend))
    return sha.hexdigest()
