"""The operators of libfused_kernels.so in Python. The C header operators/include/fused_kernels.h says what each
function computes; docs/library.md has an example.

Without PyTorch this package has the C library as ctypes sees it: load(), library(), and a struct for each of the
header's. `python3 -m fused_kernels` tests the library on this machine.

With PyTorch, 2.6 or newer, it has functions of tensors: product(), gating(), attention(), diffusion(), softmax(),
cross_entropy(), gradient_features(), clifford(), clifford_connected(), clifford_layer() and geometric_product(); and
the gradients of all but the last as functions of their own, such as gating_backward(). Each docstring says the formula,
the shapes and the types. fused_kernels.nn and fused_kernels.geometric_nn, which are imported by themselves, have
networks and layers, and fused_kernels.geometric more of geometric algebra. For all functions:

- Tensors are on one CUDA device. The work is put on PyTorch's current stream of that device, and the function
  returns at once. The results and the workspace are new tensors of PyTorch's caching allocator.
- No operand is copied or converted, but by torch.autocast, in product(), gating() and attention(). In all else it
  changes nothing: inside it, too, operands have to have the types that the docstring names. Where a layout is not one
  that the library reads, the function refuses it. Each tensor starts at a multiple of 16 bytes, as all do but some
  views.
- What the library refuses is a ValueError, or a RuntimeError where the cause is the GPU or CUDA. Its message is the
  library's sentence, fk_last_error().
- torch.compile sees the operators torch.ops.fused_kernels.*; no graph break is needed. A call can be captured in a
  CUDA graph; the first call of an operator on a device, which loads its code, should come before the capture.
- Each dimension has at least 1 element. Numbers and flags, such as `scale` or `normed`, are Python's. The value of a
  tensor with one element is read at each call, which waits for the GPU.
- There is no forward-mode derivative: a tensor that has a tangent (torch.autograd.forward_ad, torch.func.jvp) is
  refused with a RuntimeError.
- The library is the one that library() returns.
"""

import functools

from ._header import *
from ._library import (FUNCTIONS, LEAST_CAPABILITY, gpu, is_for_cpu, is_usable, library, library_path, load, tuning)
from ._table import TRIPLES
from ._torch import calls, torch
from .geometric import geometric_product


def product(a, b, math="fp32", bias=None):
    """a b + bias, the product of two matrices, or of a batch of them. Shapes: a (rows, depth), b (depth, cols), bias
    (cols) or None; the result is (rows, cols) and contiguous. With more dimensions, or fewer, it is as torch.matmul has
    it: those before the last two are a batch, and are broadcast; a vector is one row of a, or one column of b. Type:
    torch.float16, torch.bfloat16 or torch.float32 for all; added up in fp32. In the 16-bit types a b may be rounded
    before the bias is added.

    math: how fp32 is multiplied, whatever torch.backends.cuda.matmul.allow_tf32 says. "fp32": on the CUDA cores.
    "tf32": on tensor cores, with each element of a and b rounded to 11 bits instead of 24. "tf32x3": on tensor cores,
    with each element as the sum of two such numbers, in three products; an infinity in a row of a makes that row of
    the result NaN. An element of the result then differs from the exact one by at most depth * 2^-24, 2^-10 + depth *
    2^-25, or 2^-18 + depth * 2^-29 times the sum of the absolute values of its products. The 16-bit types take "fp32"
    alone.

    Layout: elements of a row are neighbours or, as in w.t(), those of a column: nothing has to be copied for that. Rows
    (or columns) may be further apart than they are long, a multiple of 16 bytes; with torch.float32 and math="fp32" the
    library copies them then. Matrices of a batch may lie anywhere that is a multiple of 16 bytes apart; where more
    dimensions are one batch, PyTorch copies what it cannot view as that.

    torch.autocast: operands become of its type, as those of PyTorch's product do, but torch.float64 stays. With another
    `math` than "fp32" they all stay as they are.

    Gradients: d_a = d b^T, d_b = a^T d and the sum of the rows of d, by product_backward(), multiplied as `math` says;
    those that are needed. An incoming gradient that is not contiguous is copied. With create_graph=True they are two
    calls of this function, and have gradients themselves.

    Raises a ValueError for shapes, types, layouts or a `math` that are not these, and a RuntimeError for a GPU below
    compute capability 8.0 (torch.float32 with math="fp32": for none). Source: operators/product; lessons 2 and 3
    explain it."""
    if a.dim() != 2 or b.dim() != 2:
        return _product_of_any_shape(a, b, math, bias)
    if bias is None:
        return calls["product"](a, b, math)
    return calls["product_bias"](a, b, bias, math)


if not torch:
    @functools.wraps(product)
    def product(a, b, math="fp32", bias=None):
        return calls["product"](a, b, math)  # says that PyTorch is missing before it looks at them


def _product_of_any_shape(a, b, math, bias):
    """Of torch.matmul's shapes by one call: of two matrices, or of two batches of as many."""
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"a has {a.dim()} dimensions and b {b.dim()}; both have to have at least 1")
    if b.dim() == 1:
        return product(a, b.unsqueeze(1), math, bias).squeeze(-1)
    if a.dim() == 1:
        return product(a.unsqueeze(0), b, math, bias).squeeze(-2)
    if a.dim() == 2 or b.dim() == 2 and a.stride(-1) != 1 or b.dim() > 2:
        try:
            shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            raise ValueError(f"b has a batch of {tuple(b.shape[:-2])}, a one of {tuple(a.shape[:-2])}: they cannot be "
                             "broadcast") from None
        a, b = (each.expand(*shape, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (a, b))
    else:  # one right factor: left ones below each other are one
        shape, a = a.shape[:-1], a.reshape(-1, a.shape[-1])
    found = calls["product"](a, b, math) if bias is None else calls["product_bias"](a, b, bias, math)
    return found.reshape(*shape, *found.shape[1:])


def product_backward(d_c, a, b, math="fp32", d_a=True, d_b=True, d_bias=True):
    """(d_a, d_b, d_bias), the gradients of product(): d_c b^T, a^T d_c, and the sum of all rows of d_c. Each is None if
    its flag is False. Shapes: a and b are two matrices, or two batches of as many, d_c that of the result, d_a and d_b
    those of a and b, and transposed in memory where these are; d_bias (cols). Type, math, layout and errors: as
    product(); d_c is contiguous. Gradients: none. Source: operators/product."""
    return calls["product_backward"](d_c, a, b, math, d_a, d_b, d_bias)


def gating(x, w1, w2, b1=None, b2=None, gate="sigmoid", math="fp32", y=None, gated_values=False):
    """gate(x w1 + b1) * (x w2 + b2), the gated layer. Shapes: x (rows, inputs), w1 and w2 (inputs, hidden), b1 and b2
    (hidden), each of which may be None, for zeros; the result is (rows, hidden) and contiguous. Type: torch.float16,
    torch.bfloat16 or torch.float32 for all; added up in fp32.

    gate: "sigmoid" (GLU), "silu" (SwiGLU), "gelu" (GEGLU, by erf), "gelu_tanh" (the same, by tanh), "relu" (ReGLU) or
    "none", x w1 + b1 itself. math: how fp32 is multiplied, as product() has it; the 16-bit types take "fp32" alone. In
    fp32 the layer is two products and a kernel after them: it is not fused.

    y: an input of the values' own, (rows, value_inputs): the layer is gate(x w1 + b1) * (y w2 + b2) then, with w2
    (value_inputs, hidden). With gated_values, which needs y, it is gate(x w1 + b1) * gate(y w2 + b2). Rows of y may be
    apart as those of x.

    Layout: rows of x may be further apart than they are long, a multiple of 16 bytes; with torch.float32 and
    math="fp32" the library copies them then. Weights and biases are contiguous. (The weight of a torch.nn.Linear is
    (hidden, inputs): keep w.t().contiguous().)

    torch.autocast: operands become of its type, if that is one of the above, but torch.float64 stays; with another
    `math` than "fp32" they all stay as they are.

    Gradients: of all operands, by gating_backward(), always all together; an incoming gradient that is not contiguous
    is copied. There are no second derivatives. With y, two tensors as large as the result are kept for them.

    Raises a ValueError for shapes, types, layouts, a `gate` or a `math` that are not these, and a RuntimeError for a
    GPU below compute capability 8.0 (torch.float32 with math="fp32": for none). Source: operators/gating; lessons 5
    and 6 explain it."""
    if y is not None:
        wanted = torch.is_grad_enabled() and any(each is not None and each.requires_grad
                                                 for each in (x, y, w1, w2, b1, b2))
        if wanted:
            return calls["gating_two_kept"](x, y, w1, w2, b1, b2, gate, math, gated_values)[0]
        return calls["gating_two"](x, y, w1, w2, b1, b2, gate, math, gated_values)
    _refuse_gated_values(gated_values)
    return calls["gating"](x, w1, w2, b1, b2, gate, math)


def _refuse_gated_values(gated_values):
    if gated_values:
        raise ValueError("gated_values is true, but there is no y; give x again as y")


def gating_backward(d_out, x, w1, w2, b1=None, b2=None, gate="sigmoid", math="fp32", y=None, gated_values=False):
    """(d_x, d_w1, d_w2, d_b1, d_b2), the gradients of gating(). With s = x w1 + b1, v = x w2 + b2, d_s = d_out * v *
    the slope of the gate at s, and d_v = d_out * gate(s): d_x = d_s w1^T + d_v w2^T, d_w1 = x^T d_s, d_w2 = x^T d_v,
    and d_b1 and d_b2 are the sums of the rows of d_s and d_v, or None where the bias is None. Shapes: d_out that of the
    result, each gradient that of what it is the gradient of. In the 16-bit types x w1, x w2, d_s and d_v are rounded to
    the type in between. Layout: rows of d_out may be apart, a multiple of 16 bytes; else as gating(), and gradients are
    contiguous. Type, gate, math and errors: as gating(). Gradients: none. Source: operators/gating.

    With y they are (d_x, d_y, d_w1, d_w2, d_b1, d_b2): with v = y w2 + b2, d_x = d_s w1^T, d_y = d_v w2^T and d_w2 =
    y^T d_v. With gated_values d_s = d_out * gate(v) * the slope at s, and d_v = d_out * gate(s) * the slope at v."""
    if y is not None:
        *results, d_b1, d_b2 = calls["gating_two_backward"](d_out, x, y, w1, w2, b1, b2, gate, math, gated_values)
    else:
        _refuse_gated_values(gated_values)
        *results, d_b1, d_b2 = calls["gating_backward"](d_out, x, w1, w2, b1, b2, gate, math)
    return *results, None if b1 is None else d_b1, None if b2 is None else d_b2  # an operator of PyTorch has no None


def attention(q, k, v, causal=False, scale=None, log_sums=False):
    """softmax(scale q k^T) v for each head. Shapes: q (batch, queries, heads, width), k and v (batch, keys, kv_heads,
    width), of which head h of q reads head h // (heads // kv_heads). The result has the shape of q, and its order of
    dimensions in memory. Type: torch.float16 or torch.bfloat16 for all; added up in fp32. scale: positive and finite;
    1 / sqrt(width) if None. With `causal`, query s sees the keys t <= s + keys - queries, and one that sees none gets
    zeros. A key that `causal` hides has the weight 0. But its row of v is multiplied by that 0: a NaN or an infinity
    there may make other queries' results NaN.

    With `log_sums`, returns (the result, log_sums (batch, heads, queries) in torch.float32): the logarithm of each
    query's sum of exp(scale q k), -inf without a key.

    Layout: elements of the last dimension are neighbours; the other dimensions may lie in any order and have gaps. So
    for tensors (batch, heads, queries, width), as PyTorch's scaled_dot_product_attention takes them, call
    attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2): nothing is copied. Where
    width and all strides are multiples of 8 it is faster.

    torch.autocast: q, k and v become of its type, as those of PyTorch's attention do, but torch.float64 stays.

    Gradients: of q, k and v, by attention_backward(), always all three, where width is a multiple of 8, at most 256,
    and strides are multiples of 8. What is not so is refused in the backward pass. log_sums have no gradient. An
    incoming gradient that does not lie as the result does is copied, if it is not contiguous. That of q has the same
    bits in each call only after torch.use_deterministic_algorithms(True). There are no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0 (fp16: 7.5). Source: operators/attention; the bonus lesson on attention explains it."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, sums = calls["attention"](q, k, v, causal, scale, log_sums or wanted)
    return (out, sums) if log_sums else out


def attention_backward(d_out, q, k, v, out, log_sums, causal=False, scale=None, deterministic=False):
    """(d_q, d_k, d_v), the gradients of attention(), which has returned out and log_sums. For each head, with P =
    exp(scale q k^T - log_sums), 0 where `causal` hides a key, D = the sum of d_out * out over each row, and dS = P *
    (d_out v^T - D): d_q = scale dS k, d_k = scale dS^T q and d_v = P^T d_out, where d_k and d_v are added up over the
    heads of q that share one of k and v. With `deterministic` d_q has the same bits in each call, which takes longer
    where there are few queries and many keys; else its parts are added up in whatever order they come. Shapes: d_out
    that of out, each gradient that of what it is the gradient of, and its order of dimensions in memory. P and dS are
    rounded to the type in between. width is a multiple of 8, at most 256. Layout: as attention(), with strides that
    are multiples of 8; log_sums are contiguous. Type: as attention(). Errors: as attention(), but of fp16, too, a
    RuntimeError for a GPU below compute capability 8.0. Gradients: none. Source: operators/attention; the bonus lesson
    on the gradients of attention explains it."""
    return calls["attention_backward"](d_out, q, k, v, out, log_sums, causal, scale, deterministic)


def diffusion(x, basis, mass, evalues, times, offsets=None, math="fp32"):
    """(out, spectral) of the spatial diffusion on a mesh: spectral = exp(-evalues times) * (basis^T (mass x)) and
    out = basis spectral. Shapes: x and out (vertices, width), basis (vertices, eigen), mass (vertices), evalues
    (eigen), times (width), spectral (eigen, width); or all but times have one dimension more, before these, for
    several meshes of one shape. Type: torch.float16, torch.bfloat16 or torch.float32 for all; added up in fp32. In the
    16-bit types mass * basis or mass * x is rounded before it is multiplied, and so is spectral. torch.bfloat16 where
    eigen and width are multiples of 8, at most 256 and 512, has kernels of its own, which on compute capability 9.0
    add up in an order that is another one in each call; all other results are the same in each. Layout: all are
    contiguous.

    offsets: (meshes + 1) in torch.int32, for meshes that differ in their sizes: mesh m has the vertices from
    offsets[m] to offsets[m + 1] - 1. Then x and out are (vertices, width), basis (vertices, eigen) and mass
    (vertices), with the vertices of all meshes, and evalues (meshes, eigen) and spectral (meshes, eigen, width). They
    begin with 0, do not decrease, and end with the number of vertices; that is not looked at, and with others the
    results are undefined. math: how fp32 is multiplied, as product() has it; the 16-bit types take "fp32" alone.

    Gradients: of x and times, by diffusion_backward(); incoming gradients that are not contiguous are copied. basis,
    mass and evalues are the mesh's own: if one of them requires a gradient, a RuntimeError says that there is none.
    There are no second derivatives.

    On compute capability 9.0 the blocks of the kernel of its own start together, so a call waits until its stream
    finds room for all of them.

    Raises a ValueError for shapes, types, layouts or a `math` that are not these, and a RuntimeError for a GPU below
    compute capability 8.0 (torch.float32 with math="fp32": for none). Source: operators/diffusion and
    operators/meshes; lesson 7 explains it."""
    if offsets is not None:
        return calls["diffusion_ragged"](x, basis, mass, evalues, times, offsets, math)
    return calls["diffusion"](x, basis, mass, evalues, times, math)


def diffusion_backward(d_out, d_spectral, basis, mass, evalues, times, spectral, offsets=None, math="fp32"):
    """(d_x, d_times), the gradients of diffusion(). With s = d_spectral + basis^T d_out: d_times = -(evalues s
    spectral), added up over eigen and meshes, and d_x = mass * (basis (exp(-evalues times) * s)). Shapes: d_out and
    d_x those of x, d_spectral that of spectral, which diffusion() has returned, d_times that of times. Type, layout,
    offsets, math and errors: as diffusion(). Gradients: none. Source: operators/diffusion and operators/meshes; lesson
    7 explains it."""
    if offsets is not None:
        return calls["diffusion_ragged_backward"](d_out, d_spectral, basis, mass, evalues, times, spectral, offsets,
                                                  math)
    return calls["diffusion_backward"](d_out, d_spectral, basis, mass, evalues, times, spectral, math)


def softmax(x, w):
    """softmax(x w), row by row. Shapes: x (rows, inputs), w (inputs, classes); the result is (rows, classes) and
    contiguous. Type: torch.float16, torch.bfloat16 or torch.float32 for all. torch.float32 is multiplied in fp32, or as
    accurately by three products in TF32; the others are added up in fp32, and only the result is rounded. Layout: both
    are contiguous. A logit of -inf has the probability 0; a row of only -inf becomes NaN.

    Gradients: of x and w, by softmax_backward(), always both; an incoming gradient that is not contiguous is copied.
    There are no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0 (torch.float32: for none). Source: operators/softmax; lesson 9 explains it."""
    return calls["softmax"](x, w)


def softmax_backward(d_probs, x, w, probs):
    """(d_x, d_w), the gradients of softmax(), which has returned probs. With g = probs * (d_probs - the sum of d_probs
    * probs over each row): d_x = g w^T and d_w = x^T g. Shapes: d_probs that of probs, d_x and d_w those of x and w.
    There are at most 2^24 rows and classes, and 2^26 inputs. g is computed in fp32, and rounded to the type before the
    products. Type, layout and errors: as softmax(). Gradients: none. Source: operators/softmax."""
    return calls["softmax_backward"](d_probs, x, w, probs)


def cross_entropy(x, w, labels):
    """The losses of labels under softmax(x w), row by row: the logarithm of the sum of the row's exp(logits), less the
    logit of the row's label, where logits = x w. A label is a class, from 0 on; where it is none, such as -100, the
    row's loss is 0, and so are its gradients. Such rows count in losses.mean(). PyTorch's cross_entropy() divides by
    the number of the other rows: losses.sum() / (labels >= 0).sum(), where no label is too large. Shapes: x (rows,
    inputs), w (inputs, classes), labels (rows); the result is (rows). There are at most 2^24 rows and classes, and
    2^26 inputs. Type: that of x and w as for softmax(); labels are torch.int64 or torch.int32. The losses are
    torch.float32, whatever x and w are, and so are the logits: nothing rounds them. Layout: all are contiguous.

    Gradients: of x and w, by cross_entropy_backward(), always both; the logits, (rows, classes), are kept for it. An
    incoming gradient that is not contiguous is copied. There are no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError as softmax() does. Source:
    operators/cross_entropy; an exercise of lesson 9 explains it."""
    return calls["cross_entropy"](x, w, labels)[0]


def cross_entropy_backward(d_losses, x, w, labels, logits, log_sums):
    """(d_x, d_w), the gradients of cross_entropy(): logits are x w, (rows, classes), and log_sums (rows) the logarithms
    of the sums of each row's exp(logits). With g = d_losses * (exp(logits - log_sums) - (1 at the label)) row by row,
    and 0 in a row whose label is no class: d_x = g w^T and d_w = x^T g. g is computed in fp32, and rounded to the type
    of x before the products. Shapes: d_losses (rows), d_x and d_w those of x and w. Type: d_losses, logits and log_sums
    are torch.float32. Other types, layout and errors: as cross_entropy(). Gradients: none. Source:
    operators/cross_entropy."""
    return calls["cross_entropy_backward"](d_losses, x, w, labels, logits, log_sums)


def gradient_features(x, gr, gi, lr, li, offsets=None, math="fp32"):
    """tanh(xr ar + xi ai), element by element, the gradient features on a mesh: xr = gr x, xi = gi x, ar = xr lr^T -
    xi li^T and ai = xi lr^T + xr li^T. Shapes: x (eigen, width), gr and gi (vertices, eigen), lr and li (width,
    width); the result is (vertices, width); or all but lr and li have one dimension more, before these, for several
    meshes of one shape. Type: torch.float16, torch.bfloat16 or torch.float32 for all; added up in fp32; in the 16-bit
    types x lr^T and x li^T are rounded. Layout: all are contiguous.

    offsets: for meshes that differ in their sizes, as diffusion() has them: then x is (meshes, eigen, width), and gr,
    gi (vertices, eigen) and the result (vertices, width) have the vertices of all meshes. math: how fp32 is
    multiplied, as product() has it; the 16-bit types take "fp32" alone.

    Gradients: of x, lr and li, by gradient_features_backward(); an incoming gradient that is not contiguous is copied.
    gr and gi are the mesh's own: if one of them requires a gradient, a RuntimeError says that there is none. There are
    no second derivatives.

    Raises a ValueError for shapes, types, layouts or a `math` that are not these, and a RuntimeError for a GPU below
    compute capability 8.0 (torch.float32 with math="fp32": for none). Source: operators/gradients and
    operators/meshes; lesson 8 explains it."""
    if offsets is not None:
        return calls["gradient_features_ragged"](x, gr, gi, lr, li, offsets, math)
    return calls["gradient_features"](x, gr, gi, lr, li, math)


def gradient_features_backward(d_out, x, gr, gi, lr, li, offsets=None, math="fp32"):
    """(d_x, d_lr, d_li), the gradients of gradient_features(). With g = d_out * (1 - out^2), P = g * xr, Q = g * xi, R
    = g * ar and S = g * ai: d_lr = P^T xr + Q^T xi, d_li = Q^T xr - P^T xi and d_x = gr^T (R + P lr + Q li) + gi^T (S
    - P li + Q lr). Shapes: d_out that of the features, each result that of what it is the gradient of. Type, layout,
    offsets, math and errors: as gradient_features(). Gradients: none. Source: operators/gradients and
    operators/meshes; lesson 8 explains it."""
    if offsets is not None:
        return calls["gradient_features_ragged_backward"](d_out, x, gr, gi, lr, li, offsets, math)
    return calls["gradient_features_backward"](d_out, x, gr, gi, lr, li, math)


def clifford(x, y, w, signature=(3, 0, 0), normed=True):
    """The gated, weighted product z of multivectors, each grade of it divided by its root mean square. The gated inputs
    are x' = x gate(x_1) and y' = y gate(y_1), with the scalar x_1 of x and gate(s) = (1 + erf(s / sqrt 2)) / 2. With
    <u>_c for the part of u that has grade c: z = sum over grades a, b, c of w[a,c,b] <<x'>_a <y'>_b>_c. For each grade
    c the result is z_c / sqrt(m_c + 1e-6), where m_c is the mean over features of the sum of the squares of z_c's
    coefficients; it is z if not `normed`.

    signature: (p, q, r), one of TRIPLES, how many basis vectors square to 1, to -1 and to 0. Shapes: x, y and the
    result (blades, batch, features), w (features, triples). Blades are ordered by grade, those of a grade by their
    basis vectors as bits of a number, e1 the lowest; triples by a, then c, then b, those without a product left out.
    Of 4 or 8 blades there are at most 8192 features, of 16 4096, of 32 2048. Type: torch.float32 for all. Layout: all
    are contiguous.

    Gradients: of x, y and w, by clifford_backward(); an incoming gradient that is not contiguous is copied. There are
    no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these. Source: operators/clifford; lesson 10 explains it."""
    return calls["clifford"](x, y, w, signature, normed)


def clifford_backward(d_out, x, y, w, signature=(3, 0, 0), normed=True):
    """(d_x, d_y, d_w), the gradients of clifford(): of the sum of d_out times its result. Shapes: d_out that of the
    result, each gradient that of what it is the gradient of. Type, layout and errors: as clifford(). Gradients: none.
    Source: operators/clifford; lesson 10 explains it."""
    return calls["clifford_backward"](d_out, x, y, w, signature, normed)


def clifford_connected(x, y, w, signature=(3, 0, 0), normed=True, inverse_norms=False):
    """The product of clifford() with matrices of weights, which mix the features: w (triples, features, features),
    whose rows are features of the product and whose columns are those of the result. signature: (2, 0, 0) or (3, 0,
    0). There are at most 8192 features. Type: torch.float32 for all; products and weights are rounded to TF32, and
    added up in fp32. Other shapes, layout and errors: as clifford().

    With `inverse_norms`, returns (the result, inverse_norms (grades, batch) in torch.float32): of each grade c and row
    1 / sqrt(m_c + 1e-6), which clifford_connected_backward() can use; not written if not `normed`.

    Gradients: of x, y and w, by clifford_connected_backward(), which is given the result and the inverse norms; an
    incoming gradient that is not contiguous is copied. There are no second derivatives.

    On compute capability 9.0 the blocks of a kernel start together, so a call waits until its stream finds room for all
    of them.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0. Source: operators/clifford_connected; the bonus lesson on multivectors, mixed explains it."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or w.requires_grad)
    if not (inverse_norms or wanted):
        return calls["clifford_connected"](x, y, w, signature, normed)
    out, norms = calls["clifford_connected_kept"](x, y, w, signature, normed)
    return (out, norms) if inverse_norms else out


def clifford_connected_backward(d_out, x, y, w, signature=(3, 0, 0), normed=True, out=None, inverse_norms=None):
    """(d_x, d_y, d_w), the gradients of clifford_connected(): of the sum of d_out times its result. It has returned
    `out` and inverse_norms; without them they are computed again, a third of all multiplications. Shapes: d_out that
    of the result, each gradient that of what it is the gradient of. Type, layout and errors: as clifford_connected().
    Gradients: none. Source: operators/clifford_connected."""
    if out is None or inverse_norms is None:
        return calls["clifford_connected_backward"](d_out, x, y, w, signature, normed)
    return calls["clifford_connected_kept_backward"](d_out, x, y, w, out, inverse_norms, signature, normed)


def clifford_layer(x, mix, bias, w, signature=(3, 0, 0), normed=True):
    """clifford(x, y, w), where y is the linear layer of grades of x: for each blade k of grade c y_k = x_k mix[c]^T,
    and to that of the scalar `bias` is added. It is one call, and so are its gradients. Shapes: mix (grades, features,
    features), whose rows are features of y, bias (features) or None; all else as clifford(). x and mix are rounded to
    TF32, and added up in fp32. Features that are no multiple of 4 are copied. Type, signature, layout and errors: as
    clifford(), and a RuntimeError for a GPU below compute capability 8.0.

    Gradients: of x, mix, bias and w, by clifford_layer_backward(); an incoming gradient that is not contiguous is
    copied. There are no second derivatives. geometric_nn.CliffordLayer is it as a module. Source:
    operators/clifford_connected/linear.cuh and operators/clifford."""
    return calls["clifford_layer"](x, mix, bias, w, signature, normed)[0]


def clifford_layer_backward(d_out, x, y, mix, bias, w, signature=(3, 0, 0), normed=True):
    """(d_x, d_mix, d_bias, d_w), the gradients of clifford_layer(): of the sum of d_out times its result. y is what the
    linear layer has made of x; torch.ops.fused_kernels.clifford_layer returns it after the result. d_bias is None if
    bias is. Shapes: d_out that of the result, each gradient that of what it is the gradient of. Where they are
    multiplied, gradients of y are rounded to TF32. Type, layout and errors: as clifford_layer(). Gradients: none.
    Source: operators/clifford_connected/linear.cuh and operators/clifford."""
    return calls["clifford_layer_backward"](d_out, x, y, mix, bias, w, signature, normed)
