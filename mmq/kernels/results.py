"""What the operations return, and what a backend has to offer.

Dimensions, here and in every kernel file: O output rows, K input columns, G = K/32 MXFP8 blocks of
a row, B = K/16 NVFP4 blocks of a row, P = K/2 packed bytes of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]
F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
AnyArray: TypeAlias = npt.NDArray[Any]


class ErrorSums(NamedTuple):
    """How far quantised values q lie from their sources x, over some rows.

    Attributes:
        signal: Σx², F64.
        noise: Σ(x − q)², F64, with q the exact product of element, block scale and tensor scale.
        max_error: max |x − q|, F64.
    """

    signal: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0

    def merge(self, other: ErrorSums) -> ErrorSums:
        """Sums over both sets of rows (a set of whole tensors, say).

        Between chunks of one tensor prefer `running=` of the quantize functions: it adds row by
        row, so that the total does not depend on where the chunks were cut.
        """
        return ErrorSums(
            self.signal + other.signal,
            self.noise + other.noise,
            max(self.max_error, other.max_error),
        )

    def __add__(self, other: object) -> ErrorSums:
        if not isinstance(other, ErrorSums):
            return NotImplemented
        return self.merge(other)

    def extended_by(self, rows_O3: F64) -> ErrorSums:
        """These sums, then each row's (signal, noise, max_error) added in row order."""
        signal, noise, max_error = self
        # An explicit loop: np.sum adds pairwise and Python 3.12's sum() compensates, so both would
        # make the total depend on how many rows one call was given.
        for row_signal, row_noise, row_max in rows_O3.tolist():
            signal += row_signal
            noise += row_noise
            max_error = max(max_error, row_max)
        return ErrorSums(signal, noise, max_error)


class ScaleChoice(NamedTuple):
    """How `quantize_nvfp4_…` picks the block scales, and what it reports.

    Attributes:
        search: "max", "mse" or "four-over-six".
        importance: F32 [K], finite and not negative: what a squared error in each input column
            counts. None: every column counts 1.
        errors: whether to compute the error sums.
    """

    search: str = "max"
    importance: F32 | None = None
    errors: bool = True


MAX_SCALES = ScaleChoice()


class Nvfp4(NamedTuple):
    """An NVFP4 tensor without its global scale, which the caller chose."""

    packed: U8  # [O, P] two E2M1 codes a byte, the low nibble is the even column
    scale: U8  # [O, B] E4M3 codes
    error: ErrorSums


class Mxfp8(NamedTuple):
    """An MXFP8 tensor."""

    codes: U8  # [O, K] E4M3 codes
    scale: U8  # [O, G] E8M0 exponents
    error: ErrorSums


class Backend(Protocol):
    """One way to compute the operations; all backends return the same bits.

    Arrays are C-contiguous, aligned and checked by `mmq.kernels.ops`. Where values are F32 | U16,
    U16 is BF16 bits. The third item of a quantize result holds per row (signal, noise, max_error):
    F64 [O, 3], or [0, 3] where no errors were asked for.
    """

    def mxfp8_amax(self, codes_OK: U8, scale_OG: U8) -> np.float32: ...

    def quantize_nvfp4_from_mxfp8(
        self, codes_OK: U8, scale_OG: U8, s2: np.float32, choice: ScaleChoice = MAX_SCALES
    ) -> tuple[U8, U8, F64]: ...

    def quantize_nvfp4_from_f32(
        self, values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice = MAX_SCALES
    ) -> tuple[U8, U8, F64]: ...

    def quantize_mxfp8_from_f32(self, values_OK: F32 | U16) -> tuple[U8, U8, F64]: ...

    def dequantize_mxfp8_bf16(self, codes_OK: U8, scale_OG: U8) -> U16: ...

    def dequantize_mxfp8_f32(self, codes_OK: U8, scale_OG: U8) -> F32: ...

    def dequantize_nvfp4_bf16(self, packed_OP: U8, scale_OB: U8, s2: np.float32) -> U16: ...

    def dequantize_nvfp4_f32(self, packed_OP: U8, scale_OB: U8, s2: np.float32) -> F32: ...
