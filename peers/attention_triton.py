"""Attention in Triton: a program a tile of query rows, which goes over the keys with a running
maximum and sum. Query heads that share K and V lie in one tile."""
import functools

import torch
import triton
import triton.language as tl

from tuning import config, tuned

LOG2_E = 1.4426950408889634


@triton.jit
def over_keys(acc, largest, total, q, K, V, row_stride, first, end, seen, T, scale,
              D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """The keys [first, end), of which row r sees those below seen[r]. `scale` has log2(e) in it."""
    d = tl.arange(0, D)
    for start in range(first, end, BN):
        t = start + tl.arange(0, BN)
        if MASKED:
            k = tl.load(K + t[None, :] * row_stride + d[:, None], mask=t[None, :] < T, other=0.0)
        else:
            k = tl.load(K + t[None, :] * row_stride + d[:, None])
        products = tl.dot(q, k)
        if MASKED:
            products = tl.where(t[None, :] < seen[:, None], products, float("-inf"))
        grown = tl.maximum(largest, tl.max(products, axis=1) * scale)
        if MASKED:  # a row that has seen no key yet
            shift = tl.where(grown == float("-inf"), 0.0, grown)
        else:
            shift = grown
        p = tl.exp2(products * scale - shift[:, None])
        correction = tl.exp2(largest - shift)
        total = total * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        if MASKED:
            v = tl.load(V + t[:, None] * row_stride + d[None, :], mask=t[:, None] < T, other=0.0)
        else:
            v = tl.load(V + t[:, None] * row_stride + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc)
        largest = grown
    return acc, largest, total


@triton.jit
def attention_kernel(Q, K, V, out, S, T, KV_HEADS, scale, GROUP: tl.constexpr, D: tl.constexpr,
                     CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    # The last tiles of a causal head take longest: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    s = row // GROUP
    d = tl.arange(0, D)
    at = (batch * S + s[:, None]) * (KV_HEADS * GROUP * D) + \
        (head * GROUP + row % GROUP)[:, None] * D + d[None, :]
    q = tl.load(Q + at, mask=s[:, None] < S, other=0.0)
    if CAUSAL:
        seen = tl.minimum(s + 1 + T - S, T)
        # What the first row sees, all do; behind what the last one sees is nothing.
        by_all = tl.maximum(tl.minimum(tile * BM // GROUP + 1 + T - S, T), 0)
        end = tl.maximum(tl.minimum((tile * BM + BM - 1) // GROUP + 1 + T - S, T), 0)
    else:
        seen = tl.full((BM,), T, dtype=tl.int32)
        by_all = T
        end = T
    whole = by_all // BN * BN
    row_stride = KV_HEADS * D
    K += batch * T * row_stride + head * D
    V += batch * T * row_stride + head * D
    acc = tl.zeros((BM, D), dtype=tl.float32)
    largest = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc, largest, total = over_keys(acc, largest, total, q, K, V, row_stride, 0, whole, seen, T,
                                    scale, D, BN, False)
    acc, largest, total = over_keys(acc, largest, total, q, K, V, row_stride, whole, end, seen, T,
                                    scale, D, BN, True)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=s[:, None] < S)


@functools.lru_cache(maxsize=None)
def tuned_kernel(width, few_rows):
    """The kernel for heads of this width: what waits on the chip has to fit."""
    if few_rows:
        configs = [config(4, stages, BM=16, BN=BN) for stages in (2, 3, 4)
                   for BN in ((32, 64) if width > 128 else (64, 128))]
    elif width <= 64:
        configs = [config(warps, stages, BM=BM, BN=BN) for stages in (2, 3, 4)
                   for warps, BM in ((4, 64), (4, 128), (8, 128)) for BN in (64, 128)]
    elif width <= 128:
        configs = [config(warps, stages, BM=128, BN=BN) for stages in (2, 3)
                   for warps in (4, 8) for BN in (64, 128)]
    else:
        configs = [config(8, 2, BM=128, BN=64), config(8, 2, BM=128, BN=32),
                   config(8, 3, BM=128, BN=32), config(4, 2, BM=64, BN=64),
                   config(4, 2, BM=64, BN=32)]
    return tuned(configs, key=["S", "T", "D", "CAUSAL", "GROUP"])(attention_kernel)


def attention(Q, K, V, causal):
    """Q (batch, S, heads, d), K and V (batch, T, kv_heads, d), dense."""
    (batch, S, heads, d), (T, kv_heads) = Q.shape, K.shape[1:3]
    out = torch.empty_like(Q)
    group = heads // kv_heads
    rows = S * group

    def grid(sizes):
        return (triton.cdiv(rows, sizes["BM"]), kv_heads, batch)

    tuned_kernel(d, rows <= 16)[grid](Q, K, V, out, S, T, kv_heads, LOG2_E / d**0.5, GROUP=group,
                                      D=d, CAUSAL=causal and S > 1)
    return (out,)
