"""Kernels from a layer's input to its attention heads: QKV GEMM, per-head norm, RoPE, KV write.

Reference: `mmq.kernels.reference.qkv_rope`, operation by operation from the row on.

    row = bf16(Σ x · Wᵀ) [q | k | v | index_q | index_k]   →   n = x · (1/√(Σx²/D + ε)) · (1 + w)
    →   (n_i cos − n_j sin, n_j cos + n_i sin), j = i + R/2   →   q, index_q; K, V, index_k in pages

Four numbers of a head, x = [3, 4, 0, 0] with w = 0, ε = 0, R = 2: n = [1.2, 1.6, 0, 0], at position
1 [−0.698, 1.874, 0, 0].

A program takes one head of T tokens; M3 has 77 heads a token. A reduction's order is the
compiler's to choose, so Σx² is written out: neighbours are added, then neighbouring sums. Divisions
and the root are IEEE's, cos and sin come from tables: from the row on, the bits are specified. The
GEMM sums in the order of the target's tensor cores, tile by tile, in both kernels that have it.

Dimensions: T tokens of a program, D head dimension (of index heads too), R elements that turn,
M hidden, K columns of a tile, Z columns of the row, H query heads, G KV heads (= index heads).
"""

import triton
import triton.language as tl

from .kv_cache import encode_e4m3, store_rows
from .tiles import load_tile, mxfp8_tile


@triton.jit
def _decoded_tile(elements, exponents, row_R, inside_R, m, M, K: tl.constexpr):
    """BF16 [R, K] of a BF16 matrix, or of an MXFP8 one."""
    if elements.dtype.element_ty == tl.uint8:
        tile_RK = mxfp8_tile(elements, exponents, row_R, inside_R, m, M, K)
    else:
        tile_RK = load_tile(elements, row_R, inside_R, m, M, K)
    return tile_RK


@triton.jit
def _project_tile(
    x, x_exponents, w, w_exponents, token_T, inside_T, first, M,
    D: tl.constexpr, K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BF16 [T, D]: columns `first` to `first` + D − 1 of the row, summed in F32 over tiles of K."""
    column_D = first + tl.arange(0, D)
    inside_D = column_D >= 0
    acc_TD = tl.zeros((token_T.shape[0], D), tl.float32)
    for m in range(0, M, K):
        if NATIVE:
            x_TK = load_tile(x, token_T, inside_T, m, M, K).to(tl.float8e4nv, bitcast=True)
            x_TG = load_tile(x_exponents, token_T, inside_T, m // 32, M // 32, K // 32)
            w_DK = load_tile(w, column_D, inside_D, m, M, K).to(tl.float8e4nv, bitcast=True)
            w_DG = load_tile(w_exponents, column_D, inside_D, m // 32, M // 32, K // 32)
            acc_TD = tl.dot_scaled(x_TK, x_TG, "e4m3", tl.trans(w_DK), w_DG, "e4m3", acc_TD)
        else:
            x_TK = _decoded_tile(x, x_exponents, token_T, inside_T, m, M, K)
            w_DK = _decoded_tile(w, w_exponents, column_D, inside_D, m, M, K)
            acc_TD = tl.dot(x_TK, tl.trans(w_DK), acc_TD)
    return acc_TD.to(tl.bfloat16)


@triton.constexpr_function
def _levels(count):
    return count.bit_length() - 1


@triton.jit
def _tree_sum(x_TD):
    """Σ over D, a power of two: neighbours first, then neighbouring sums; F32 [T]."""
    T: tl.constexpr = x_TD.shape[0]
    D: tl.constexpr = x_TD.shape[1]
    for level in tl.static_range(_levels(D)):
        even, odd = tl.split(x_TD.reshape(T, D >> (level + 1), 2))
        x_TD = even + odd
    return x_TD.reshape(T)


@triton.jit
def _norm(x_TD, weight, eps, GEMMA: tl.constexpr):
    """RMS norm of each row, times 1 + weight, or weight."""
    T: tl.constexpr = x_TD.shape[0]
    D: tl.constexpr = x_TD.shape[1]
    mean_T = _tree_sum(x_TD * x_TD) * (1.0 / D)  # a power of two: no rounding
    one_T = tl.full((T,), 1.0, tl.float32)
    inverse_T = tl.div_rn(one_T, tl.sqrt_rn(mean_T + eps))
    scale_D = tl.load(weight + tl.arange(0, D)).to(tl.float32)
    if GEMMA:
        scale_D = 1.0 + scale_D
    return x_TD * inverse_T[:, None] * scale_D[None, :]


@triton.jit
def _turn(n_TD, cos, sin, token_T, inside_T, R: tl.constexpr):
    """RoPE of the pairs (i, i + R/2) of the first R elements, by rows `token_T` of the tables."""
    T: tl.constexpr = n_TD.shape[0]
    D: tl.constexpr = n_TD.shape[1]
    d = tl.arange(0, D)
    first_D, turning_D = d < R // 2, d < R
    other_D = tl.where(first_D, d + R // 2, tl.where(turning_D, d - R // 2, d))
    other_TD = tl.gather(n_TD, tl.broadcast_to(other_D[None, :], (T, D)), 1)
    at_TD = token_T.to(tl.int64)[:, None] * (R // 2) + (d % (R // 2))[None, :]
    inside_TD = inside_T[:, None] & turning_D[None, :]
    cos_TD = tl.load(cos + at_TD, mask=inside_TD, other=1.0)
    sin_TD = tl.load(sin + at_TD, mask=inside_TD, other=0.0)
    here_TD, there_TD = n_TD * cos_TD, other_TD * sin_TD
    turned_TD = tl.where(first_D[None, :], here_TD - there_TD, here_TD + there_TD)
    return tl.where(turning_D[None, :], turned_TD, n_TD)


@triton.jit
def _store_queries(pointer, x_TD, token_T, inside_T, head, heads):
    """Rows of one head of [tokens, heads, D]: F32, BF16, or E4M3 codes (U8) without scale."""
    D: tl.constexpr = x_TD.shape[1]
    at_T = (token_T.to(tl.int64) * heads + head) * D
    at_TD = at_T[:, None] + tl.arange(0, D)[None, :]
    if pointer.dtype.element_ty == tl.uint8:
        x_TD = encode_e4m3(x_TD)
    else:
        x_TD = x_TD.to(pointer.dtype.element_ty)
    tl.store(pointer + at_TD, x_TD, mask=inside_T[:, None])


@triton.jit
def _finish_head(
    x_TD, head, token_T, inside_T, weights_5D, cos, sin, eps, slots, q, k, v, index_q, index_k,
    k_scale, v_scale, index_scale,
    H: tl.constexpr, G: tl.constexpr, INDEX: tl.constexpr, R: tl.constexpr, GEMMA: tl.constexpr,
    B: tl.constexpr, FORMAT: tl.constexpr, V_QUADS: tl.constexpr, INDEX_FORMAT: tl.constexpr,
):  # fmt: skip
    """Norm, turn and store one head of the row, F32 [T, D].

    Args:
        head: of all heads of the row; which part it belongs to follows.
        INDEX: query heads of the indexer, or 0.
        weights_5D: norm weights of q, k, v (not read), index_q, index_k.
        k, v, index_k: pages; F32 [tokens, heads, D] if FORMAT is "none". In pages k is v.
    """
    D: tl.constexpr = x_TD.shape[1]
    part = (head >= H).to(tl.int32) + (head >= H + G) + (head >= H + 2 * G)
    part += head >= H + 2 * G + INDEX
    if part != 2:
        x_TD = _turn(_norm(x_TD, weights_5D + part * D, eps, GEMMA), cos, sin, token_T, inside_T, R)
    slot_T = token_T.to(tl.int64)
    if FORMAT != "none":
        slot_T = tl.load(slots + token_T, mask=inside_T, other=-1)
    if part == 0:
        _store_queries(q, x_TD, token_T, inside_T, head, H)
    elif part == 1:
        if FORMAT == "none":
            _store_queries(k, x_TD, token_T, inside_T, head - H, G)
        else:
            store_rows(k, x_TD, slot_T, head - H, k_scale, FORMAT, G, B, 2, False, False)
    elif part == 2:
        if FORMAT == "none":
            _store_queries(v, x_TD, token_T, inside_T, head - H - G, G)
        else:
            store_rows(v, x_TD, slot_T, head - H - G, v_scale, FORMAT, G, B, 2, True, V_QUADS)
    elif part == 3:
        _store_queries(index_q, x_TD, token_T, inside_T, head - H - 2 * G, INDEX)
    else:
        if FORMAT == "none":
            _store_queries(index_k, x_TD, token_T, inside_T, 0, 1)
        else:
            store_rows(index_k, x_TD, slot_T, 0, index_scale, INDEX_FORMAT, 1, B, 1, False, False)


@triton.jit
def _tokens(count, T: tl.constexpr):
    """This program's tokens, and which of them there are."""
    token_T = tl.program_id(0) * T + tl.arange(0, T)
    return token_T, token_T < count


@triton.jit
def project_rows_kernel(
    x, x_exponents, w, w_exponents, row, tokens, M, Z,
    T: tl.constexpr, D: tl.constexpr, K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """row BF16 [tokens, Z] from x [tokens, M] and W [Z, M], each BF16, or E4M3 with exponents."""
    token_T, inside_T = _tokens(tokens, T)
    first = tl.program_id(1) * D
    row_TD = _project_tile(
        x, x_exponents, w, w_exponents, token_T, inside_T, first, M, D, K, NATIVE
    )
    at_TD = token_T.to(tl.int64)[:, None] * Z + (first + tl.arange(0, D))[None, :]
    tl.store(row + at_TD, row_TD, mask=inside_T[:, None])


@triton.jit
def insert_heads_kernel(
    row, weights_5D, cos, sin, slots, q, k, v, index_q, index_k,
    eps, k_scale, v_scale, index_scale, tokens, Z,
    T: tl.constexpr, D: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, INDEX: tl.constexpr, R: tl.constexpr, GEMMA: tl.constexpr,
    B: tl.constexpr, FORMAT: tl.constexpr, V_QUADS: tl.constexpr, INDEX_FORMAT: tl.constexpr,
):  # fmt: skip
    """Heads of row BF16 or F32 [tokens, Z]."""
    eps, k_scale = tl.full((), eps, tl.float32), tl.full((), k_scale, tl.float32)
    v_scale, index_scale = tl.full((), v_scale, tl.float32), tl.full((), index_scale, tl.float32)
    token_T, inside_T = _tokens(tokens, T)
    head = tl.program_id(1)
    x_TD = load_tile(row, token_T, inside_T, head * D, Z, D).to(tl.float32)
    _finish_head(
        x_TD, head, token_T, inside_T, weights_5D, cos, sin, eps, slots, q, k, v, index_q, index_k,
        k_scale, v_scale, index_scale,
        H, G, INDEX, R, GEMMA, B, FORMAT, V_QUADS, INDEX_FORMAT,
    )  # fmt: skip


@triton.jit
def project_and_insert_kernel(
    x, x_exponents, w, w_exponents,
    weights_5D, cos, sin, slots, q, k, v, index_q, index_k,
    eps, k_scale, v_scale, index_scale, tokens, M,
    T: tl.constexpr, D: tl.constexpr, K: tl.constexpr, NATIVE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, INDEX: tl.constexpr, R: tl.constexpr, GEMMA: tl.constexpr,
    B: tl.constexpr, FORMAT: tl.constexpr, V_QUADS: tl.constexpr, INDEX_FORMAT: tl.constexpr,
):  # fmt: skip
    """Both at once: the row's tile goes from the sum to the page in registers."""
    eps, k_scale = tl.full((), eps, tl.float32), tl.full((), k_scale, tl.float32)
    v_scale, index_scale = tl.full((), v_scale, tl.float32), tl.full((), index_scale, tl.float32)
    token_T, inside_T = _tokens(tokens, T)
    head = tl.program_id(1)
    x_TD = _project_tile(
        x, x_exponents, w, w_exponents, token_T, inside_T, head * D, M, D, K, NATIVE
    ).to(tl.float32)
    _finish_head(
        x_TD, head, token_T, inside_T, weights_5D, cos, sin, eps, slots, q, k, v, index_q, index_k,
        k_scale, v_scale, index_scale,
        H, G, INDEX, R, GEMMA, B, FORMAT, V_QUADS, INDEX_FORMAT,
    )  # fmt: skip
