"""Lesson 6's layer in one Triton kernel: two products of one tile of x, and their epilogue."""
import torch
import triton
import triton.language as tl

from tuning import config, tuned


@tuned([
    config(4, 3, BM=128, BH=64, BK=64),
    config(4, 2, BM=64, BH=64, BK=128),
    config(8, 2, BM=128, BH=64, BK=128),
    config(8, 3, BM=128, BH=128, BK=64),
    config(8, 4, BM=128, BH=128, BK=64),
    config(8, 3, BM=256, BH=64, BK=64),
], key=["M", "K", "H"])
@triton.jit
def gating_kernel(x, W1, b1, W2, b2, out, M, K, H, BM: tl.constexpr, BH: tl.constexpr,
                  BK: tl.constexpr, GROUP: tl.constexpr):
    # GROUP tiles of rows, then the next columns: neighbours find x and the weights in the L2 cache.
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(H, BH)
    in_group = tl.program_id(0) % (GROUP * column_tiles)
    first = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    rows_of_group = tl.minimum(row_tiles - first, GROUP)
    m = (first + in_group % rows_of_group) * BM + tl.arange(0, BM)
    h = in_group // rows_of_group * BH + tl.arange(0, BH)
    k = tl.arange(0, BK)
    x_at = x + m[:, None].to(tl.int64) * K + k[None, :]
    W_at = k[:, None] * H + h[None, :]
    gate = tl.zeros((BM, BH), dtype=tl.float32)
    value = tl.zeros((BM, BH), dtype=tl.float32)
    for start in range(0, K, BK):
        x_tile = tl.load(x_at + start, mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)
        inside = (k[:, None] < K - start) & (h[None, :] < H)
        W1_tile = tl.load(W1 + W_at + start * H, mask=inside, other=0.0)
        W2_tile = tl.load(W2 + W_at + start * H, mask=inside, other=0.0)
        gate = tl.dot(x_tile, W1_tile, gate)
        value = tl.dot(x_tile, W2_tile, value)
    gate += tl.load(b1 + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    value += tl.load(b2 + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    result = (value / (1 + tl.exp(-gate))).to(out.dtype.element_ty)
    out_at = out + m[:, None].to(tl.int64) * H + h[None, :]
    tl.store(out_at, result, mask=(m[:, None] < M) & (h[None, :] < H))


def gating(x, W1, b1, W2, b2):
    (M, K), H = x.shape, W1.shape[1]
    out = torch.empty((M, H), device=x.device, dtype=x.dtype)

    def grid(sizes):
        return (triton.cdiv(M, sizes["BM"]) * triton.cdiv(H, sizes["BH"]),)

    gating_kernel[grid](x, W1, b1, W2, b2, out, M, K, H, GROUP=8)
    return (out,)
