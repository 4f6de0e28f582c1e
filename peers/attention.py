"""Attention: out = softmax(Q K^T / sqrt(d)) V of every head, causal or not; forward."""
import functools
import math

import torch
import torch.nn.functional as F

from operators import Case, by_mode, compiled

ROWS_AT_ONCE = 4096  # of the reference's logits


def by_heads(*tensors):
    """(batch, S, heads, d), as projections leave it, to PyTorch's (batch, heads, S, d)."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def as_it_lay(attended):
    """Back again. PyTorch's kernels leave their results so that nothing has to move."""
    return (attended.transpose(1, 2).contiguous(),)


def sdpa(causal, backend=None):
    """scaled_dot_product_attention, by one of its kernels or by its own choice."""

    def attention(Q, K, V):
        S, T = Q.shape[1], K.shape[1]
        mask = {}
        if causal and S == T:
            mask = {"is_causal": True}
        elif causal and S > 1:  # a single query sees all keys
            from torch.nn.attention.bias import causal_lower_right

            mask = {"attn_mask": causal_lower_right(S, T)}
        if Q.shape[2] != K.shape[2]:
            mask["enable_gqa"] = True
        q, k, v = by_heads(Q, K, V)
        if backend is None:
            return as_it_lay(F.scaled_dot_product_attention(q, k, v, **mask))
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return as_it_lay(F.scaled_dot_product_attention(q, k, v, **mask))

    return attention


def flex(causal, S, T, mode):
    """torch.compile's own kernel for attention, whose mask is a function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if causal and S > 1:
        blocks = create_block_mask(lambda b, h, s, t: s + T - S >= t, None, None, S, T)
    attend = compiled(flex_attention, mode)

    def attention(Q, K, V):
        shares = Q.shape[2] != K.shape[2]
        return as_it_lay(attend(*by_heads(Q, K, V), block_mask=blocks, enable_gqa=shares))

    return attention


def triton(causal):
    from attention_triton import attention

    return functools.partial(attention, causal=causal)


def reference(Q, K, V, causal):
    """In fp64, some rows of one head at a time: the logits of all would not fit in memory."""
    (batch, S, heads, d), (T, kv_heads) = Q.shape, K.shape[1:3]
    out = torch.zeros_like(Q)
    keys = torch.arange(T, device=Q.device)
    for b in range(batch):
        for h in range(heads):
            k, v = (tensor[b, :, h * kv_heads // heads] for tensor in (K, V))
            for first in range(0, S, ROWS_AT_ONCE):
                rows = slice(first, min(S, first + ROWS_AT_ONCE))
                logits = Q[b, rows, h] @ k.T / math.sqrt(d)
                if causal:
                    last = torch.arange(rows.start, rows.stop, device=Q.device)[:, None] + T - S
                    logits.masked_fill_(keys > last, -math.inf)
                largest = logits.max(dim=-1, keepdim=True).values
                weights = torch.exp(logits - largest.clamp(min=-1e300))
                # Where no key is seen, 0.
                sums = weights.sum(dim=-1, keepdim=True).clamp(min=1e-300)
                out[b, rows, h] = weights @ v / sums
    return [out]


def case(problem, draw):
    dims = problem["dims"]
    batch, heads, kv_heads, S, T, d = (dims[name] for name in
                                       ("batch", "heads", "kv_heads", "S", "T", "d"))
    causal = "causal" in problem["name"]
    unit_variance = math.sqrt(3)
    Q = draw(batch, S, heads, d, scale=unit_variance)
    K = draw(batch, T, kv_heads, d, scale=unit_variance)
    V = draw(batch, T, kv_heads, d)
    loads = {
        "PyTorch": lambda: sdpa(causal),
        "PyTorch, FlashAttention-2": lambda: sdpa(causal, "FLASH_ATTENTION"),
        **by_mode(lambda mode: flex(causal, S, T, mode)),
    }
    # PyTorch has cuDNN's causal mask for squares alone.
    if not causal or S in (1, T):
        loads["PyTorch, cuDNN"] = lambda: sdpa(causal, "CUDNN_ATTENTION")
    if d & (d - 1) == 0:  # Triton's tiles
        loads["Triton"] = lambda: triton(causal)

    def peer(load):
        def prepare():
            function = load()
            return lambda: function(Q, K, V)

        return prepare

    expected = reference(Q.double(), K.double(), V.double(), causal)
    return Case(expected, {name: peer(load) for name, load in loads.items()})
