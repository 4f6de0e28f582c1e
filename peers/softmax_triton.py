"""Lesson 9's softmax(x W) in Triton: one kernel where a program can hold all columns of some rows,
else a product and a softmax."""
import functools

import torch
import triton
import triton.language as tl

from tuning import config, tuned


@triton.jit
def fused_kernel(x, W, probs, B, D, C, BC: tl.constexpr, PRECISION: tl.constexpr,
                 BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    k = tl.arange(0, BK)
    logits = tl.zeros((BM, BC), dtype=tl.float32)
    for start in range(0, D, BK):
        x_tile = tl.load(x + m[:, None] * D + start + k[None, :],
                         mask=(m[:, None] < B) & (k[None, :] < D - start), other=0.0)
        W_tile = tl.load(W + (start + k[:, None]) * C + c[None, :],
                         mask=(k[:, None] < D - start) & (c[None, :] < C), other=0.0)
        logits = tl.dot(x_tile, W_tile, logits, input_precision=PRECISION)
    logits = tl.where(c[None, :] < C, logits, float("-inf"))
    exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = exponentials / tl.sum(exponentials, axis=1)[:, None]
    tl.store(probs + m[:, None] * C + c[None, :], result,
             mask=(m[:, None] < B) & (c[None, :] < C))


@functools.lru_cache(maxsize=None)
def tuned_fused_kernel(columns):
    """The kernel for rows padded to so many columns: a stage of W has to fit on chip."""
    if columns <= 128:
        configs = [config(4, 3, BM=16, BK=64), config(4, 4, BM=16, BK=32),
                   config(4, 2, BM=16, BK=128), config(4, 3, BM=32, BK=64)]
    else:
        configs = [config(8, 2, BM=16, BK=16), config(8, 3, BM=16, BK=16),
                   config(8, 2, BM=32, BK=16), config(8, 3, BM=32, BK=16)]
    return tuned(configs, key=["B", "D", "C", "PRECISION"])(fused_kernel)


@tuned([
    config(4, 3, BM=64, BN=128, BK=32),
    config(8, 3, BM=128, BN=128, BK=32),
    config(8, 4, BM=128, BN=128, BK=32),
    config(8, 3, BM=128, BN=256, BK=32),
], key=["M", "N", "K", "PRECISION"])
@triton.jit
def matmul_kernel(a, b, out, M, N, K, PRECISION: tl.constexpr, GROUP: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(N, BN)
    in_group = tl.program_id(0) % (GROUP * column_tiles)
    first = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    rows_of_group = tl.minimum(row_tiles - first, GROUP)
    m = (first + in_group % rows_of_group) * BM + tl.arange(0, BM)
    n = in_group // rows_of_group * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        a_tile = tl.load(a + m[:, None] * K + start + k[None, :],
                         mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)
        b_tile = tl.load(b + (start + k[:, None]) * N + n[None, :],
                         mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def softmax_kernel(logits, probs, C, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0) * C + c
    row = tl.load(logits + at, mask=c < C, other=float("-inf"))
    exponentials = tl.exp(row - tl.max(row, axis=0))
    tl.store(probs + at, exponentials / tl.sum(exponentials, axis=0), mask=c < C)


def fused(precision):
    def probabilities(x, W):
        (B, D), C = x.shape, W.shape[1]
        probs = x.new_empty((B, C))
        columns = max(16, triton.next_power_of_2(C))

        def grid(sizes):
            return (triton.cdiv(B, sizes["BM"]),)

        tuned_fused_kernel(columns)[grid](x, W, probs, B, D, C, BC=columns, PRECISION=precision)
        return (probs,)

    return probabilities


def unfused(precision):
    def probabilities(x, W):
        (M, K), N = x.shape, W.shape[1]
        logits, probs = x.new_empty((M, N)), x.new_empty((M, N))

        def grid(sizes):
            return (triton.cdiv(M, sizes["BM"]) * triton.cdiv(N, sizes["BN"]),)

        matmul_kernel[grid](x, W, logits, M, N, K, PRECISION=precision, GROUP=8)
        softmax_kernel[(M,)](logits, probs, N, BLOCK=triton.next_power_of_2(N), num_warps=8)
        return (probs,)

    return probabilities
