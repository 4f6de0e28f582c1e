"""The operators of libfused_kernels.so in Python. The C header operators/include/fused_kernels.h says what each
function computes; docs/library.md has an example.

Without PyTorch this package has the C library as ctypes sees it: load(), library(), and a struct for each of the
header's. `python3 -m fused_kernels` tests the library on this machine.

With PyTorch, 2.6 or newer, it has functions of tensors: product(), gating(), attention(), diffusion(), softmax(),
cross_entropy(), gradient_features(), clifford(), clifford_connected() and geometric_product(); and the gradients of
all but the first and the last as functions of their own, such as gating_backward(). Each docstring says the formula,
the shapes and the types. For all of them:

- Tensors are on one CUDA device. The work is put on PyTorch's current stream of that device, and the function
  returns at once. The results and the workspace are new tensors of PyTorch's caching allocator.
- No operand is copied or converted. torch.autocast changes nothing: inside it, too, operands have to have the types
  that the docstring names. Where a layout is not one that the library reads, the function refuses it. Each tensor
  starts at a multiple of 16 bytes, as all do but some views.
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

import contextlib
import ctypes
import functools
import operator
import os
import pathlib
import threading

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise

    class _NoTorch:
        def __getattr__(self, name):
            raise ImportError("the functions of tensors need PyTorch, which is not installed")

        def __bool__(self):
            return False

    torch = _NoTorch()

# ---- The C library -----------------------------------------------------------------------------------------------

FK_VERSION = 1
LEAST_CAPABILITY = 7.5  # of a GPU that the library can be built for
(FK_OK, FK_BAD_ARGUMENT, FK_BAD_SHAPE, FK_BAD_ALIGNMENT, FK_OVERLAP, FK_BAD_WORKSPACE, FK_BAD_DEVICE,
 FK_CUDA_ERROR) = range(8)  # fk_status
FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32, FK_TF32X3 = 1, 2, 3, 4, 5  # fk_type
(FK_PRODUCT_FORWARD, FK_GATING_FORWARD, FK_GATING_BACKWARD, FK_ATTENTION_FORWARD, FK_ATTENTION_LOG_SUMS,
 FK_DIFFUSION_FORWARD, FK_DIFFUSION_BACKWARD, FK_SOFTMAX_FORWARD, FK_SOFTMAX_BACKWARD, FK_GRADIENTS_FORWARD,
 FK_GRADIENTS_BACKWARD, FK_CLIFFORD_FORWARD, FK_CLIFFORD_BACKWARD, FK_CLIFFORD_CONNECTED_FORWARD,
 FK_CLIFFORD_CONNECTED_BACKWARD, FK_CROSS_ENTROPY_FORWARD, FK_CROSS_ENTROPY_BACKWARD,
 FK_ATTENTION_BACKWARD) = range(1, 19)  # fk_function

_INT, _INT64, _SIZE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


def _struct(name, *fields):
    """A struct of the header: (C type, the names of fields of this type) for each of `fields`."""
    return type(name, (ctypes.Structure,), {
        "_fields_": [(field, kind) for kind, names in fields for field in names.split()]})


fk_strides = _struct("fk_strides", (_INT64, "batch row head"))
fk_product = _struct("fk_product", (_SIZE, "size"), (_INT, "type"),
                     (_INT64, "rows cols depth a_stride b_stride c_stride"))
fk_gating = _struct("fk_gating", (_SIZE, "size"), (_INT, "type"), (_INT64, "rows inputs hidden x_stride out_stride"))
fk_attention = _struct("fk_attention", (_SIZE, "size"), (_INT, "type causal"),
                       (_INT64, "batch queries keys heads kv_heads width"),
                       (fk_strides, "q_strides k_strides v_strides out_strides"), (ctypes.c_float, "scale"))
fk_attention_gradients = _struct(
    "fk_attention_gradients", (_SIZE, "size"), (_INT, "type causal"),
    (_INT64, "batch queries keys heads kv_heads width"),
    (fk_strides, "q_strides k_strides v_strides out_strides d_out_strides d_q_strides d_k_strides d_v_strides"),
    (ctypes.c_float, "scale"))
fk_diffusion = _struct("fk_diffusion", (_SIZE, "size"), (_INT, "type"), (_INT64, "meshes vertices eigen width"))
fk_softmax = _struct("fk_softmax", (_SIZE, "size"), (_INT, "type"), (_INT64, "rows inputs classes"))
fk_gradients = _struct("fk_gradients", (_SIZE, "size"), (_INT, "type"), (_INT64, "vertices eigen width"))
fk_clifford = _struct("fk_clifford", (_SIZE, "size"), (_INT, "type p q r normed"), (_INT64, "batch features"),
                      (_INT, "gate unweighted weight_type"))
STRUCTS = {each.__name__: each for each in
           (fk_strides, fk_product, fk_gating, fk_attention, fk_attention_gradients, fk_diffusion, fk_softmax,
            fk_gradients, fk_clifford)}


def _forward(operands):
    """The arguments of a function that computes: description, operands, workspace, its bytes, stream."""
    return [_POINTER] * (1 + operands) + [_POINTER, _SIZE, _POINTER]


_WORKSPACE = [_POINTER, _POINTER]  # description, bytes
FUNCTIONS = {  # name -> (type of the result, types of the arguments)
    "fk_version": (_INT, []),
    "fk_last_error": (ctypes.c_char_p, []),
    "fk_last_way": (ctypes.c_char_p, []),
    "fk_tune": (_INT, [_INT]),
    "fk_product_workspace": (_INT, _WORKSPACE),
    "fk_product_forward": (_INT, _forward(3)),
    "fk_gating_workspace": (_INT, _WORKSPACE),
    "fk_gating_forward": (_INT, _forward(6)),
    "fk_attention_workspace": (_INT, _WORKSPACE),
    "fk_attention_forward": (_INT, _forward(5)),
    "fk_attention_backward_workspace": (_INT, _WORKSPACE),
    "fk_attention_backward": (_INT, _forward(9)),
    "fk_diffusion_workspace": (_INT, _WORKSPACE),
    "fk_diffusion_forward": (_INT, _forward(7)),
    "fk_diffusion_backward_workspace": (_INT, _WORKSPACE),
    "fk_diffusion_backward": (_INT, _forward(9)),
    "fk_softmax_workspace": (_INT, _WORKSPACE),
    "fk_softmax_forward": (_INT, _forward(3)),
    "fk_gradients_workspace": (_INT, _WORKSPACE),
    "fk_gradients_forward": (_INT, _forward(6)),
    "fk_gradients_backward_workspace": (_INT, _WORKSPACE),
    "fk_gradients_backward": (_INT, _forward(9)),
    "fk_clifford_workspace": (_INT, _WORKSPACE),
    "fk_clifford_forward": (_INT, _forward(4)),
    "fk_clifford_backward_workspace": (_INT, _WORKSPACE),
    "fk_clifford_backward": (_INT, _forward(7)),
    "fk_clifford_connected_workspace": (_INT, _WORKSPACE),
    "fk_clifford_connected_forward": (_INT, _forward(4)),
    "fk_clifford_connected_backward_workspace": (_INT, _WORKSPACE),
    "fk_clifford_connected_backward": (_INT, _forward(7)),
    "fk_gating_backward_workspace": (_INT, _WORKSPACE),
    "fk_gating_backward": (_INT, _forward(11)),
    "fk_softmax_backward_workspace": (_INT, _WORKSPACE),
    "fk_softmax_backward": (_INT, _forward(6)),
    "fk_cross_entropy_workspace": (_INT, _WORKSPACE),
    "fk_cross_entropy_forward": (_INT, _forward(6)),
    "fk_cross_entropy_backward_workspace": (_INT, _WORKSPACE),
    "fk_cross_entropy_backward": (_INT, _forward(8)),
    "fk_plan_create": (_INT, [_INT, _POINTER, _INT, _POINTER, _POINTER]),
    "fk_plan_workspace": (_INT, _WORKSPACE),
    "fk_plan_way": (ctypes.c_char_p, [_POINTER]),
    "fk_plan_run": (_INT, [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE]),
    "fk_plan_tune": (_INT, [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE]),
    "fk_plan_destroy": (None, [_POINTER]),
}


def load(path):
    """The library at this path, as a ctypes.CDLL that knows the types of FUNCTIONS. Raises a RuntimeError if it is not
    of this file's version, and an OSError if it cannot be loaded."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        if not hasattr(loaded, name):
            raise RuntimeError(f"{path} has no function {name}; build it again: scons library")
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if loaded.fk_version() != FK_VERSION:
        raise RuntimeError(f"{path} has version {loaded.fk_version()}; this file is for version {FK_VERSION}")
    return loaded


@functools.cache
def gpu():
    """(the driver's library, the first GPU's name, its compute capability), such as (CDLL, "NVIDIA A100", 8.0); None if
    there is no driver or no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name, digits = _INT(), ctypes.create_string_buffer(256), [_INT(), _INT()]
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    failed = driver.cuDeviceGetName(name, len(name), 0)
    for number, attribute in zip(digits, (75, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and MINOR
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    return None if failed else (driver, name.value.decode(), digits[0].value + digits[1].value / 10)


def is_usable(found):
    """Whether what gpu() returns is a GPU that the library is for."""
    return found is not None and found[2] >= LEAST_CAPABILITY


def library_path():
    """Where the library is: what the environment variable FUSED_KERNELS_LIBRARY names; or else, of the libraries in
    this package or in build/ of this repository, the GPU's if there is a usable GPU, and else the CPU's. Raises a
    RuntimeError if there is none."""
    if named := os.environ.get("FUSED_KERNELS_LIBRARY"):
        found = [pathlib.Path(named)]
    else:
        here = pathlib.Path(__file__).resolve().parent
        folder = here if (here / "cpu").is_dir() else here.parents[2] / "build"
        found = [folder / kind / "libfused_kernels.so" for kind in ("cuda", "cpu")[not is_usable(gpu()):]]
    for path in found:
        if path.exists():
            return path
    raise RuntimeError(f"there is no {found[0]}; build it with `scons library`, or let the environment variable "
                       "FUSED_KERNELS_LIBRARY name the library")


@functools.cache
def library():
    """The library at library_path(), loaded once. Raises what library_path() and load() raise."""
    return load(library_path())


def is_for_cpu(loaded):
    """Whether a library is the CPU's: it brings CUDA's functions for memory."""
    return hasattr(loaded, "cudaMalloc")


@contextlib.contextmanager
def tuning():
    """`with tuning(): ...` calls the functions of tensors as usual, but the first call for operands of some shapes,
    strides and types tries the ways to compute it, and waits for them. Later calls for the same on this device, in
    this block and after it, use the one that was the fastest. That holds for all threads, so also for gradients,
    which PyTorch computes in another one. While a CUDA graph is captured nothing is tried."""
    library().fk_tune(1)
    try:
        yield
    finally:
        library().fk_tune(0)


def _error(code):
    """The exception for a call of this thread that returned this code."""
    refused = code in (FK_BAD_ARGUMENT, FK_BAD_SHAPE, FK_BAD_ALIGNMENT, FK_OVERLAP)
    return (ValueError if refused else RuntimeError)(library().fk_last_error().decode())


# ---- Plans: what all calls with operands of the same shapes, strides and types have in common ----------------------

_MOST_PLANS = 4096
_plans = {}


class _Plan:
    """A description that the library has accepted, its workspace, and the results' layouts. No call changes it, so
    several threads may use it."""

    __slots__ = ("function", "description", "at", "bytes", "workspace", "device", "outputs")

    def __init__(self, name, description, outputs):
        """name: of the function. outputs: (shape, strides, dtype) of each result. Asks the library, on the current
        device, how much workspace there has to be; it refuses here what no GPU, or not this one, can compute."""
        if is_for_cpu(library()):
            raise RuntimeError(f"{library_path()} is the CPU's library, and tensors are on a GPU: install or build the "
                               "package where nvcc is, with arch=all or this GPU's")
        description.size = ctypes.sizeof(description)
        needed = ctypes.c_size_t()
        query = getattr(library(), name.removesuffix("_forward") + "_workspace")
        if code := query(ctypes.byref(description), ctypes.byref(needed)):
            raise _error(code)
        self.function, self.outputs = getattr(library(), name), outputs
        self.description, self.at = description, ctypes.addressof(description)
        self.bytes, self.workspace = needed.value, (needed.value,)
        self.device = _current_device()


def _remember(key, plan):
    if len(_plans) >= _MOST_PLANS:  # sizes that are others in each call
        _plans.clear()
    _plans[key] = plan
    return plan


_KEPT_BYTES, _MOST_KEPT = 1 << 16, 64


class _Kept(threading.local):
    """Of each thread a small workspace for each stream that it calls in: (tensor, address) by (device, stream). To
    allocate one costs a microsecond. Calls of one thread in one stream do not run at the same time, but those of two
    threads might take turns within a call. Inside an operator of torch.library none is used: a compiled program may
    have a pool of memory of its own."""

    def __init__(self):
        self.workspaces, self.usable = {}, True


_kept = _Kept()


def _launch(plan, *addresses):
    """Calls the plan's function on the current stream."""
    stream = _current_stream(plan.device)
    if not plan.bytes:
        workspace, at = None, None
    elif plan.bytes <= _KEPT_BYTES and _kept.usable and not _is_capturing():  # a graph runs in whichever stream
        workspace, at = _kept.workspaces.get((plan.device, stream)) or _keep_workspace(plan.device, stream)
    else:
        workspace = _empty(plan.workspace, (1,), torch.uint8)
        at = workspace.data_ptr()
    code = plan.function(plan.at, *addresses, at, plan.bytes, stream)
    if code:
        raise _error(code)


def _keep_workspace(device, stream):
    workspace = _empty((_KEPT_BYTES,), (1,), torch.uint8)
    if len(_kept.workspaces) >= _MOST_KEPT:
        _kept.workspaces.clear()  # PyTorch gives the memory to later work of the same stream alone
    _kept.workspaces[device, stream] = workspace, workspace.data_ptr()
    return _kept.workspaces[device, stream]


def _on_device_of(name, tensor, function, *arguments):
    """Calls the function while the tensor's device is the current one."""
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}; it has to be on a CUDA device")
    with torch.cuda.device(tensor.device):
        return function(*arguments)


def _check(condition, sentence):
    if not condition:
        raise ValueError(sentence)


def _check_operand(name, tensor, shape, dtype):
    _check(tuple(tensor.shape) == shape, f"{name} has the shape {tuple(tensor.shape)}; it has to be {shape}")
    _check(tensor.dtype == dtype, f"{name} is {tensor.dtype}; it has to be {dtype}")


def _check_dense(name, tensor, shape, dtype):
    _check_operand(name, tensor, shape, dtype)
    _check(tensor.is_contiguous(), f"{name} has the strides {tensor.stride()}, but it has to be contiguous; call "
                                   ".contiguous() if a copy is acceptable")


def _check_dimensions(name, tensor, count):
    _check(tensor.dim() == count, f"{name} has the shape {tuple(tensor.shape)}; it has to have {count} dimensions")


def _type_of(name, tensor, **types):
    """The fk_type of a tensor. types: fk_type by the names that the operator takes, such as float16=FK_FLOAT16."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    _check(dtype in types, f"{name} is torch.{dtype}; it has to be torch.{' or torch.'.join(types)}")
    return types[dtype]


def _row_stride(name, matrix):
    """How far rows are apart, in elements; 0 for a single row."""
    (rows, cols), (by_row, by_col) = matrix.shape, matrix.stride()
    _check((cols <= 1 or by_col == 1) and (rows <= 1 or by_row > 0),
           f"{name} has the strides {matrix.stride()}, but elements of a row have to be neighbours and rows have to "
           "have memory of their own; call .contiguous() if a copy is acceptable")
    return by_row if rows > 1 else 0


def _head_strides(name, tensor):
    """The fk_strides of a tensor (batch, rows, heads, width)."""
    sizes, strides = tensor.shape, tensor.stride()
    _check((sizes[3] <= 1 or strides[3] == 1) and all(by > 0 for size, by in zip(sizes[:3], strides) if size > 1),
           f"{name} has the strides {tuple(strides)}, but elements of the last dimension have to be neighbours and no "
           "dimension may be expanded; call .contiguous() if a copy is acceptable")
    return fk_strides(*strides[:3])


def _dense(dtype, *shape):
    """(shape, strides, dtype) of a contiguous result."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return shape, tuple(strides), dtype


# ---- How a function of tensors is called --------------------------------------------------------------------------
#
# An operator of torch.library costs several microseconds for each call, as long as the smallest kernels take. So it
# is called only where somebody looks at operators: torch.compile, torch.export, a TorchDispatchMode, torch.func, a
# subclass of Tensor. All else calls the library directly, through an autograd.Function if a gradient is wanted.


def _is_traced(*tensors):
    if torch.compiler.is_compiling():
        return True
    if _forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return True
    return _dispatch_modes() > 0 or _are_transforms_active()


def _refuse_tangents(tensors):
    """The library would compute the result without its tangent, and nobody would hear of it."""
    if any(_forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise RuntimeError("the library has no forward-mode derivatives; take gradients by backward(), or call it on "
                           "tensors without a tangent")


# What is no tensor is part of a plan's key. So it is converted first: a tensor as a key would be compared by identity,
# and its first value would be used for ever.


def _signature_of(numbers):
    return tuple(map(operator.index, numbers))


_MATH = {"fp32": FK_FLOAT32, "tf32": FK_TF32, "tf32x3": FK_TF32X3}  # of operands in fp32


def product(a, b, math="fp32"):
    """a b, the product of two matrices. Shapes: a (rows, depth), b (depth, cols); the result is (rows, cols) and
    contiguous. Type: torch.float16, torch.bfloat16 or torch.float32 for all three; added up in fp32.

    math: how fp32 is multiplied, whatever torch.backends.cuda.matmul.allow_tf32 says. "fp32": on the CUDA cores.
    "tf32": on tensor cores, with each element of a and b rounded to 11 bits instead of 24. "tf32x3": on tensor cores,
    with each element as the sum of two such numbers, in three products; an infinity in a row of a makes that row of
    the result NaN. An element of the result then differs from the exact one by at most depth * 2^-24, 2^-10 + depth *
    2^-25, or 2^-18 + depth * 2^-29 times the sum of the absolute values of its products. The 16-bit types take "fp32"
    alone.

    Layout: elements of a row are neighbours. Rows may be further apart than they are long, a multiple of 16 bytes; but
    with torch.float32 and math="fp32" they are dense. A transposed matrix is refused.

    Gradients: d_a = d b^T and d_b = a^T d, by PyTorch's own product, since the library reads no transposed matrices.
    How that multiplies fp32 is PyTorch's setting, not `math`.

    Raises a ValueError for shapes, types, layouts or a `math` that are not these, and a RuntimeError for a GPU below
    compute capability 8.0 (torch.float32 with math="fp32": for none). Source: operators/product; lessons 2 and 3
    explain it."""
    if _is_traced(a, b):
        return torch.ops.fused_kernels.product(a, b, math)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _functions["product"].apply(a, b, math)
    return _product(a, b, math)


def _product(a, b, math="fp32"):
    device = a.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("a", a, _product, a, b, math)
    key = "product", device, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, math
    plan = _plans.get(key) or _remember(key, _plan_product(a, b, math))
    c = _empty(*plan.outputs)
    _launch(plan, a.data_ptr(), b.data_ptr(), c.data_ptr())
    return c


def _plan_product(a, b, math):
    _check_dimensions("a", a, 2)
    _check_dimensions("b", b, 2)
    kind = _type_of("a", a, float16=FK_FLOAT16, bfloat16=FK_BFLOAT16, float32=FK_FLOAT32)
    (rows, depth), cols = a.shape, b.shape[1]
    _check_operand("b", b, (depth, cols), a.dtype)
    _check(math in _MATH, f"math is {math!r}; it has to be {' or '.join(map(repr, _MATH))}")
    _check(math == "fp32" or kind == FK_FLOAT32, f"math is {math!r}, but a is {a.dtype}; it has to be torch.float32")
    kind = _MATH[math] if kind == FK_FLOAT32 else kind
    description = fk_product(0, kind, rows, cols, depth, _row_stride("a", a), _row_stride("b", b), 0)
    return _Plan("fk_product_forward", description, _dense(a.dtype, rows, cols))


def _product_fake(a, b, math="fp32"):
    return a.new_empty((a.shape[0], b.shape[1]))


def _product_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _product_backward(ctx, d):
    a, b = ctx.saved_tensors
    return (d @ b.t() if ctx.needs_input_grad[0] else None, a.t() @ d if ctx.needs_input_grad[1] else None, None)


def gating(x, w1, w2, b1, b2):
    """sigmoid(x w1 + b1) * (x w2 + b2), the gated layer. Shapes: x (rows, inputs), w1 and w2 (inputs, hidden), b1 and
    b2 (hidden); the result is (rows, hidden) and contiguous. Type: torch.float16 for all; added up in fp32.

    Layout: rows of x may be further apart than they are long, a multiple of 16 bytes; weights and biases are
    contiguous. (The weight of a torch.nn.Linear is (hidden, inputs): keep w.t().contiguous().)

    Gradients: of all five, by gating_backward(), always all together; an incoming gradient that is not contiguous is
    copied. There are no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0. Source: operators/gating; lessons 5 and 6 explain it."""
    if _is_traced(x, w1, w2, b1, b2):
        return torch.ops.fused_kernels.gating(x, w1, w2, b1, b2)
    if torch.is_grad_enabled() and (x.requires_grad or w1.requires_grad or w2.requires_grad or b1.requires_grad
                                    or b2.requires_grad):
        return _functions["gating"].apply(x, w1, w2, b1, b2)
    return _gating(x, w1, w2, b1, b2)


def _gating(x, w1, w2, b1, b2):
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _gating, x, w1, w2, b1, b2)
    key = ("gating", device, x.shape, x.stride(), x.dtype, w1.shape, w1.is_contiguous(), w1.dtype, w2.shape,
           w2.is_contiguous(), w2.dtype, b1.shape, b1.is_contiguous(), b1.dtype, b2.shape, b2.is_contiguous(), b2.dtype)
    plan = _plans.get(key) or _remember(key, _plan_gating(x, w1, w2, b1, b2))
    out = _empty(*plan.outputs)
    _launch(plan, x.data_ptr(), w1.data_ptr(), w2.data_ptr(), b1.data_ptr(), b2.data_ptr(), out.data_ptr())
    return out


def _describe_gating(x, w1, w2, b1, b2):
    """The fk_gating of operands that fit; the result is dense."""
    _check_dimensions("x", x, 2)
    _check_dimensions("w1", w1, 2)
    kind = _type_of("x", x, float16=FK_FLOAT16)
    (rows, inputs), hidden = x.shape, w1.shape[1]
    for name, weights in (("w1", w1), ("w2", w2)):
        _check_dense(name, weights, (inputs, hidden), x.dtype)
    for name, bias in (("b1", b1), ("b2", b2)):
        _check_dense(name, bias, (hidden,), x.dtype)
    return fk_gating(0, kind, rows, inputs, hidden, _row_stride("x", x), 0)


def _plan_gating(x, w1, w2, b1, b2):
    description = _describe_gating(x, w1, w2, b1, b2)
    return _Plan("fk_gating_forward", description, _dense(x.dtype, x.shape[0], w1.shape[1]))


def _gating_fake(x, w1, w2, b1, b2):
    return x.new_empty((x.shape[0], w1.shape[1]))


def _gating_backward_of(ctx, d_out):
    return gating_backward(d_out.contiguous(), *ctx.saved_tensors)


def gating_backward(d_out, x, w1, w2, b1, b2):
    """(d_x, d_w1, d_w2, d_b1, d_b2), the gradients of gating(). With s = x w1 + b1, v = x w2 + b2, d_s = d_out * v *
    sigmoid(s) * (1 - sigmoid(s)) and d_v = d_out * sigmoid(s): d_x = d_s w1^T + d_v w2^T, d_w1 = x^T d_s, d_w2 = x^T
    d_v, and d_b1 and d_b2 are the sums of the rows of d_s and d_v. Shapes: d_out that of the result, each gradient that
    of what it is the gradient of. x w1, x w2, d_s and d_v are rounded to fp16 in between. Layout: rows of d_out may be
    apart, as those of x; gradients are contiguous. Type and errors: as gating(). Gradients: none. Source:
    operators/gating."""
    operands = d_out, x, w1, w2, b1, b2
    if _is_traced(*operands):
        return torch.ops.fused_kernels.gating_backward(*operands)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise RuntimeError(_NO_BACKWARD["gating_backward"])
    return _gating_backward(*operands)


def _gating_backward(d_out, x, w1, w2, b1, b2):
    operands = d_out, x, w1, w2, b1, b2
    device = d_out.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_out", d_out, _gating_backward, *operands)
    key = ("gating_backward", device, *[(each.shape, each.stride(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_gating_backward(*operands))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_gating_backward(d_out, x, w1, w2, b1, b2):
    description = _describe_gating(x, w1, w2, b1, b2)
    _check_operand("d_out", d_out, (x.shape[0], w1.shape[1]), x.dtype)
    description.out_stride = _row_stride("d_out", d_out)
    return _Plan("fk_gating_backward", description,
                 tuple(_dense(x.dtype, *each.shape) for each in (x, w1, w2, b1, b2)))


def _gating_backward_fake(d_out, x, w1, w2, b1, b2):
    return tuple(each.new_empty(each.shape) for each in (x, w1, w2, b1, b2))


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

    Gradients: of q, k and v, by attention_backward(), always all three, where width is a multiple of 8, at most 128,
    and strides are multiples of 8. What is not so is refused in the backward pass. log_sums have no gradient. An
    incoming gradient that does not lie as the result does is copied, if it is not contiguous. There are no second
    derivatives.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0 (fp16: 7.5). Source: operators/attention; the bonus lesson on attention explains it."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if _is_traced(q, k, v):
        out, sums = torch.ops.fused_kernels.attention(q, k, v, causal, scale, log_sums or wanted)
    elif wanted:
        out, sums = _functions["attention"].apply(q, k, v, bool(causal), None if scale is None else float(scale), True)
    else:
        out, sums = _attention(q, k, v, causal, scale, log_sums)
    return (out, sums) if log_sums else out


def _attention(q, k, v, causal, scale, log_sums):
    causal, scale = bool(causal), None if scale is None else float(scale)
    device = q.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("q", q, _attention, q, k, v, causal, scale, log_sums)
    key = ("attention", device, q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(),
           v.dtype, causal, scale)
    plan = _plans.get(key) or _remember(key, _plan_attention(q, k, v, causal, scale))
    layout, layout_of_sums = plan.outputs
    out = _empty(*layout)
    sums = _empty(*layout_of_sums) if log_sums else None
    _launch(plan, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), sums.data_ptr() if log_sums else None)
    return out, sums


def _plan_attention(q, k, v, causal, scale):
    _check_dimensions("q", q, 4)
    _check_dimensions("k", k, 4)
    kind = _type_of("q", q, float16=FK_FLOAT16, bfloat16=FK_BFLOAT16)
    (batch, queries, heads, width), (_, keys, kv_heads, _) = q.shape, k.shape
    for name, tensor in (("k", k), ("v", v)):
        _check_operand(name, tensor, (batch, keys, kv_heads, width), q.dtype)
    out = torch.empty_like(q, device="meta")
    description = fk_attention(0, kind, causal, batch, queries, keys, heads, kv_heads, width,
                               _head_strides("q", q), _head_strides("k", k), _head_strides("v", v),
                               fk_strides(*out.stride()[:3]), max(width, 1)**-0.5 if scale is None else scale)
    layout = tuple(out.shape), tuple(out.stride()), q.dtype
    return _Plan("fk_attention_forward", description, (layout, _dense(torch.float32, batch, heads, queries)))


def _attention_operator(q, k, v, causal=False, scale=None, log_sums=False):
    """As an operator, whose results are tensors, always: without log_sums an empty one."""
    out, sums = _attention(q, k, v, causal, scale, log_sums)
    return out, q.new_empty((0,), dtype=torch.float32) if sums is None else sums


def _attention_fake(q, k, v, causal=False, scale=None, log_sums=False):
    sums = (q.shape[0], q.shape[2], q.shape[1]) if log_sums else (0,)
    return torch.empty_like(q), q.new_empty(sums, dtype=torch.float32)


def _attention_save(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale, ctx.has_sums = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _attention_backward_of(ctx, d_out, d_log_sums):
    if d_out is None:
        return (None,) * 6
    q, k, v, out, log_sums = ctx.saved_tensors
    if not ctx.has_sums:  # the operator was called by name, without them
        with torch.no_grad():
            _, log_sums = attention(q, k, v, ctx.causal, ctx.scale, log_sums=True)
    d_out = d_out if d_out.stride() == out.stride() else d_out.contiguous()
    return *attention_backward(d_out, q, k, v, out, log_sums, ctx.causal, ctx.scale), None, None, None


def attention_backward(d_out, q, k, v, out, log_sums, causal=False, scale=None):
    """(d_q, d_k, d_v), the gradients of attention(), which has returned out and log_sums. For each head, with P =
    exp(scale q k^T - log_sums), 0 where `causal` hides a key, D = the sum of d_out * out over each row, and dS = P *
    (d_out v^T - D): d_q = scale dS k, d_k = scale dS^T q and d_v = P^T d_out, where d_k and d_v are added up over the
    heads of q that share one of k and v. d_q is added up in an order that is another one in each call. Shapes: d_out
    that of out, each gradient that of what it is the gradient of, and its order of dimensions in memory. P and dS are
    rounded to the type in between. width is a multiple of 8, at most 128. Layout: as attention(), with strides that
    are multiples of 8; log_sums are contiguous. Type: as attention(). Errors: as attention(), but of fp16, too, a
    RuntimeError for a GPU below compute capability 8.0. Gradients: none. Source: operators/attention; the bonus lesson
    on the gradients of attention explains it."""
    operands = d_out, q, k, v, out, log_sums
    if _is_traced(*operands):
        return torch.ops.fused_kernels.attention_backward(*operands, causal, scale)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise RuntimeError(_NO_BACKWARD["attention_backward"])
    return _attention_backward(*operands, causal, scale)


def _attention_backward(d_out, q, k, v, out, log_sums, causal=False, scale=None):
    causal, scale = bool(causal), None if scale is None else float(scale)
    operands = d_out, q, k, v, out, log_sums
    device = d_out.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_out", d_out, _attention_backward, *operands, causal, scale)
    key = ("attention_backward", device, *[(each.shape, each.stride(), each.dtype) for each in operands], causal, scale)
    plan = _plans.get(key) or _remember(key, _plan_attention_backward(*operands, causal, scale))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_attention_backward(d_out, q, k, v, out, log_sums, causal, scale):
    _check_dimensions("q", q, 4)
    _check_dimensions("k", k, 4)
    kind = _type_of("q", q, float16=FK_FLOAT16, bfloat16=FK_BFLOAT16)
    (batch, queries, heads, width), (_, keys, kv_heads, _) = q.shape, k.shape
    for name, tensor in (("k", k), ("v", v)):
        _check_operand(name, tensor, (batch, keys, kv_heads, width), q.dtype)
    for name, tensor in (("d_out", d_out), ("out", out)):
        _check_operand(name, tensor, tuple(q.shape), q.dtype)
    _check_dense("log_sums", log_sums, (batch, heads, queries), torch.float32)
    results = [torch.empty_like(each, device="meta") for each in (q, k, v)]
    strides = [_head_strides(name, each) for name, each in (("q", q), ("k", k), ("v", v), ("out", out),
                                                            ("d_out", d_out))]
    description = fk_attention_gradients(
        0, kind, causal, batch, queries, keys, heads, kv_heads, width, *strides,
        *(fk_strides(*each.stride()[:3]) for each in results), max(width, 1)**-0.5 if scale is None else scale)
    return _Plan("fk_attention_backward", description,
                 tuple((tuple(each.shape), tuple(each.stride()), each.dtype) for each in results))


def _attention_backward_fake(d_out, q, k, v, out, log_sums, causal=False, scale=None):
    return tuple(torch.empty_like(each) for each in (q, k, v))


def diffusion(x, basis, mass, evalues, times):
    """(out, spectral) of the spatial diffusion on a mesh: spectral = exp(-evalues times) * (basis^T (mass x)) and
    out = basis spectral. Shapes: x and out (vertices, width), basis (vertices, eigen), mass (vertices), evalues
    (eigen), times (width), spectral (eigen, width); or all but times have one dimension more, before these, for
    several meshes of one shape. eigen and width are multiples of 8, at most 256 and 512. Type: torch.bfloat16 for
    all; added up in fp32, on compute capability 9.0 in an order that is another one in each call. Layout: all are
    contiguous.

    Gradients: of x and times, by diffusion_backward(); incoming gradients that are not contiguous are copied. basis,
    mass and evalues are the mesh's own: if one of them requires a gradient, a RuntimeError says that there is none.
    There are no second derivatives.

    On compute capability 9.0 the blocks of the kernel start together, so a call waits until its stream finds room for
    all of them.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0. Source: operators/diffusion; lesson 7 explains it."""
    if _is_traced(x, basis, mass, evalues, times):
        return torch.ops.fused_kernels.diffusion(x, basis, mass, evalues, times)
    if torch.is_grad_enabled() and (x.requires_grad or times.requires_grad or basis.requires_grad
                                    or mass.requires_grad or evalues.requires_grad):
        return _functions["diffusion"].apply(x, basis, mass, evalues, times)
    return _diffusion(x, basis, mass, evalues, times)


def _diffusion(x, basis, mass, evalues, times):
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _diffusion, x, basis, mass, evalues, times)
    key = ("diffusion", device, x.shape, x.is_contiguous(), x.dtype, basis.shape, basis.is_contiguous(), basis.dtype,
           mass.shape, mass.is_contiguous(), mass.dtype, evalues.shape, evalues.is_contiguous(), evalues.dtype,
           times.shape, times.is_contiguous(), times.dtype)
    plan = _plans.get(key) or _remember(key, _plan_diffusion(x, basis, mass, evalues, times))
    layout, layout_of_spectral = plan.outputs
    out, spectral = _empty(*layout), _empty(*layout_of_spectral)
    _launch(plan, x.data_ptr(), basis.data_ptr(), mass.data_ptr(), evalues.data_ptr(), times.data_ptr(),
            spectral.data_ptr(), out.data_ptr())
    return out, spectral


def _check_mesh(name, x, basis, mass, evalues, times):
    """(description, meshes) of operands that fit. meshes: the first dimension of x, if it has three, as a tuple."""
    _check(x.dim() in (2, 3), f"{name} has the shape {tuple(x.shape)}; it has to have 2 or 3 dimensions")
    kind = _type_of(name, x, bfloat16=FK_BFLOAT16)
    _check_dimensions("basis", basis, x.dim())
    *meshes, vertices, width = x.shape
    meshes, eigen = tuple(meshes), basis.shape[-1]
    _check_dense(name, x, (*meshes, vertices, width), x.dtype)
    _check_dense("basis", basis, (*meshes, vertices, eigen), x.dtype)
    _check_dense("mass", mass, (*meshes, vertices), x.dtype)
    _check_dense("evalues", evalues, (*meshes, eigen), x.dtype)
    _check_dense("times", times, (width,), x.dtype)
    return fk_diffusion(0, kind, *(meshes or (1,)), vertices, eigen, width), meshes


def _plan_diffusion(x, basis, mass, evalues, times):
    description, meshes = _check_mesh("x", x, basis, mass, evalues, times)
    return _Plan("fk_diffusion_forward", description,
                 (_dense(x.dtype, *x.shape), _dense(x.dtype, *meshes, basis.shape[-1], x.shape[-1])))


def _diffusion_fake(x, basis, mass, evalues, times):
    return x.new_empty(x.shape), x.new_empty((*basis.shape[:-2], basis.shape[-1], x.shape[-1]))


def _diffusion_save(ctx, inputs, output):
    if any(each.requires_grad for each in inputs[1:4]):
        raise RuntimeError("the diffusion has no gradient of basis, mass or evalues; call detach() on them")
    ctx.save_for_backward(*inputs[1:], output[1])


def _diffusion_backward_of(ctx, d_out, d_spectral):
    d_x, d_times = diffusion_backward(d_out.contiguous(), d_spectral.contiguous(), *ctx.saved_tensors)
    return d_x, None, None, None, d_times


def diffusion_backward(d_out, d_spectral, basis, mass, evalues, times, spectral):
    """(d_x, d_times), the gradients of diffusion(). With s = d_spectral + basis^T d_out: d_times = -(evalues s
    spectral), added up over eigen and meshes, and d_x = mass * (basis (exp(-evalues times) * s)). Shapes: d_out and
    d_x those of x, d_spectral that of spectral, which diffusion() has returned, d_times that of times. Type, layout
    and errors: as diffusion(). Gradients: none. Source: operators/diffusion; lesson 7 explains it."""
    operands = d_out, d_spectral, basis, mass, evalues, times, spectral
    if _is_traced(*operands):
        return torch.ops.fused_kernels.diffusion_backward(*operands)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise RuntimeError(_NO_BACKWARD["diffusion_backward"])
    return _diffusion_backward(*operands)


def _diffusion_backward(d_out, d_spectral, basis, mass, evalues, times, spectral):
    operands = d_out, d_spectral, basis, mass, evalues, times, spectral
    device = d_out.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_out", d_out, _diffusion_backward, *operands)
    key = ("diffusion_backward", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_diffusion_backward(*operands))
    layout, layout_of_times = plan.outputs
    d_x, d_times = _empty(*layout), _empty(*layout_of_times)
    _launch(plan, *[each.data_ptr() for each in operands], d_x.data_ptr(), d_times.data_ptr())
    return d_x, d_times


def _plan_diffusion_backward(d_out, d_spectral, basis, mass, evalues, times, spectral):
    description, meshes = _check_mesh("d_out", d_out, basis, mass, evalues, times)
    for name, each in (("d_spectral", d_spectral), ("spectral", spectral)):
        _check_dense(name, each, (*meshes, basis.shape[-1], d_out.shape[-1]), d_out.dtype)
    return _Plan("fk_diffusion_backward", description,
                 (_dense(d_out.dtype, *d_out.shape), _dense(d_out.dtype, *times.shape)))


def _diffusion_backward_fake(d_out, d_spectral, basis, mass, evalues, times, spectral):
    return d_out.new_empty(d_out.shape), times.new_empty(times.shape)


def softmax(x, w):
    """softmax(x w), row by row. Shapes: x (rows, inputs), w (inputs, classes); the result is (rows, classes) and
    contiguous. Type: torch.float32, multiplied in fp32, or as accurately by three products in TF32. Layout: both are
    contiguous. A logit of -inf has the probability 0; a row of only -inf becomes NaN.

    Gradients: of x and w, by softmax_backward(), always both; an incoming gradient that is not contiguous is copied.
    There are no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these. Source: operators/softmax; lesson 9 explains
    it."""
    if _is_traced(x, w):
        return torch.ops.fused_kernels.softmax(x, w)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _functions["softmax"].apply(x, w)
    return _softmax(x, w)


def _softmax(x, w):
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _softmax, x, w)
    key = "softmax", device, x.shape, x.is_contiguous(), x.dtype, w.shape, w.is_contiguous(), w.dtype
    plan = _plans.get(key) or _remember(key, _plan_softmax(x, w))
    probs = _empty(*plan.outputs)
    _launch(plan, x.data_ptr(), w.data_ptr(), probs.data_ptr())
    return probs


def _describe_softmax(x, w):
    """The fk_softmax of operands that fit."""
    _check_dimensions("x", x, 2)
    _check_dimensions("w", w, 2)
    kind = _type_of("x", x, float32=FK_FLOAT32)
    (rows, inputs), classes = x.shape, w.shape[1]
    _check_dense("x", x, (rows, inputs), x.dtype)
    _check_dense("w", w, (inputs, classes), x.dtype)
    return fk_softmax(0, kind, rows, inputs, classes)


def _plan_softmax(x, w):
    return _Plan("fk_softmax_forward", _describe_softmax(x, w), _dense(x.dtype, x.shape[0], w.shape[1]))


def _softmax_fake(x, w):
    return x.new_empty((x.shape[0], w.shape[1]))


def _softmax_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def _softmax_backward_of(ctx, d_probs):
    return softmax_backward(d_probs.contiguous(), *ctx.saved_tensors)


def softmax_backward(d_probs, x, w, probs):
    """(d_x, d_w), the gradients of softmax(), which has returned probs. With g = probs * (d_probs - the sum of d_probs
    * probs over each row): d_x = g w^T and d_w = x^T g. Shapes: d_probs that of probs, d_x and d_w those of x and w.
    There are at most 2^24 rows and classes, and 2^26 inputs. Type, layout and errors: as softmax(). Gradients: none.
    Source: operators/softmax."""
    operands = d_probs, x, w, probs
    if _is_traced(*operands):
        return torch.ops.fused_kernels.softmax_backward(*operands)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise RuntimeError(_NO_BACKWARD["softmax_backward"])
    return _softmax_backward(*operands)


def _softmax_backward(d_probs, x, w, probs):
    operands = d_probs, x, w, probs
    device = d_probs.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_probs", d_probs, _softmax_backward, *operands)
    key = ("softmax_backward", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_softmax_backward(*operands))
    layout, layout_of_w = plan.outputs
    d_x, d_w = _empty(*layout), _empty(*layout_of_w)
    _launch(plan, *[each.data_ptr() for each in operands], d_x.data_ptr(), d_w.data_ptr())
    return d_x, d_w


def _plan_softmax_backward(d_probs, x, w, probs):
    description = _describe_softmax(x, w)
    for name, each in (("d_probs", d_probs), ("probs", probs)):
        _check_dense(name, each, (x.shape[0], w.shape[1]), x.dtype)
    return _Plan("fk_softmax_backward", description, (_dense(x.dtype, *x.shape), _dense(x.dtype, *w.shape)))


def _softmax_backward_fake(d_probs, x, w, probs):
    return x.new_empty(x.shape), w.new_empty(w.shape)


def cross_entropy(x, w, labels):
    """The losses of labels under softmax(x w), row by row: the logarithm of the sum of the row's exp(logits), less the
    logit of the row's label, where logits = x w. A label is a class, from 0 on; where it is none, such as -100, the
    row's loss is 0, and so are its gradients. Such rows count in losses.mean(). PyTorch's cross_entropy() divides by
    the number of the other rows: losses.sum() / (labels >= 0).sum(), where no label is too large. Shapes: x (rows,
    inputs), w (inputs, classes), labels (rows); the result is (rows). There are at most 2^24 rows and classes, and
    2^26 inputs. Type: torch.float32, multiplied in fp32, or as accurately by three products in TF32; labels are
    torch.int64. Layout: all are contiguous.

    Gradients: of x and w, by cross_entropy_backward(), always both; the logits, (rows, classes), are kept for it. An
    incoming gradient that is not contiguous is copied. There are no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these. Source: operators/softmax; an exercise of
    lesson 9 explains it."""
    if _is_traced(x, w, labels):
        return torch.ops.fused_kernels.cross_entropy(x, w, labels)[0]
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _functions["cross_entropy"].apply(x, w, labels)[0]
    return _cross_entropy(x, w, labels)[0]


def _cross_entropy(x, w, labels):
    """(losses, logits, log_sums) of fk_cross_entropy_forward()."""
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _cross_entropy, x, w, labels)
    operands = x, w, labels
    key = ("cross_entropy", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_cross_entropy(*operands))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_cross_entropy(x, w, labels):
    description = _describe_softmax(x, w)
    rows, classes = x.shape[0], w.shape[1]
    _check_dense("labels", labels, (rows,), torch.int64)
    return _Plan("fk_cross_entropy_forward", description,
                 (_dense(x.dtype, rows), _dense(x.dtype, rows, classes), _dense(x.dtype, rows)))


def _cross_entropy_fake(x, w, labels):
    rows, classes = x.shape[0], w.shape[1]
    return x.new_empty((rows,)), x.new_empty((rows, classes)), x.new_empty((rows,))


def _cross_entropy_save(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros of the size of the logits
    ctx.save_for_backward(*inputs, *output[1:])


def _cross_entropy_backward_of(ctx, d_losses, d_logits, d_log_sums):
    if d_losses is None:
        return None, None, None
    d_x, d_w = cross_entropy_backward(d_losses.contiguous(), *ctx.saved_tensors)
    return d_x, d_w, None


def cross_entropy_backward(d_losses, x, w, labels, logits, log_sums):
    """(d_x, d_w), the gradients of cross_entropy(): logits are x w, (rows, classes), and log_sums (rows) the logarithms
    of the sums of each row's exp(logits). With g = d_losses * (exp(logits - log_sums) - (1 at the label)) row by row,
    and 0 in a row whose label is no class: d_x = g w^T and d_w = x^T g. Shapes: d_losses (rows), d_x and d_w those of x
    and w. Type, layout and errors: as cross_entropy(). Gradients: none. Source: operators/softmax."""
    operands = d_losses, x, w, labels, logits, log_sums
    if _is_traced(*operands):
        return torch.ops.fused_kernels.cross_entropy_backward(*operands)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise RuntimeError(_NO_BACKWARD["cross_entropy_backward"])
    return _cross_entropy_backward(*operands)


def _cross_entropy_backward(d_losses, x, w, labels, logits, log_sums):
    operands = d_losses, x, w, labels, logits, log_sums
    device = d_losses.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_losses", d_losses, _cross_entropy_backward, *operands)
    key = ("cross_entropy_backward", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_cross_entropy_backward(*operands))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_cross_entropy_backward(d_losses, x, w, labels, logits, log_sums):
    description = _describe_softmax(x, w)
    rows, classes = x.shape[0], w.shape[1]
    _check_dense("labels", labels, (rows,), torch.int64)
    for name, each, shape in (("d_losses", d_losses, (rows,)), ("logits", logits, (rows, classes)),
                              ("log_sums", log_sums, (rows,))):
        _check_dense(name, each, shape, x.dtype)
    return _Plan("fk_cross_entropy_backward", description, (_dense(x.dtype, *x.shape), _dense(x.dtype, *w.shape)))


def _cross_entropy_backward_fake(d_losses, x, w, labels, logits, log_sums):
    return x.new_empty(x.shape), w.new_empty(w.shape)


def gradient_features(x, gr, gi, lr, li):
    """tanh(xr ar + xi ai), element by element, the gradient features on a mesh: xr = gr x, xi = gi x, ar = xr lr^T -
    xi li^T and ai = xi lr^T + xr li^T. Shapes: x (eigen, width), gr and gi (vertices, eigen), lr and li (width,
    width); the result is (vertices, width). eigen and width are multiples of 8, eigen is at most 256. Type:
    torch.bfloat16 for all; added up in fp32; x lr^T and x li^T are rounded to bf16. Layout: all are contiguous.

    Gradients: of x, lr and li, by gradient_features_backward(); an incoming gradient that is not contiguous is copied.
    gr and gi are the mesh's own: if one of them requires a gradient, a RuntimeError says that there is none. There are
    no second derivatives.

    Raises a ValueError for shapes, types or layouts that are not these, and a RuntimeError for a GPU below compute
    capability 8.0. Source: operators/gradients; lesson 8 explains it."""
    if _is_traced(x, gr, gi, lr, li):
        return torch.ops.fused_kernels.gradient_features(x, gr, gi, lr, li)
    if torch.is_grad_enabled() and (x.requires_grad or lr.requires_grad or li.requires_grad or gr.requires_grad
                                    or gi.requires_grad):
        return _functions["gradient_features"].apply(x, gr, gi, lr, li)
    return _gradient_features(x, gr, gi, lr, li)


def _gradient_features(x, gr, gi, lr, li):
    operands = x, gr, gi, lr, li
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _gradient_features, *operands)
    key = ("gradient_features", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_gradient_features(*operands))
    out = _empty(*plan.outputs)
    _launch(plan, *[each.data_ptr() for each in operands], out.data_ptr())
    return out


def _check_tangents(x, gr, gi, lr, li):
    """The description of operands that fit."""
    _check_dimensions("x", x, 2)
    _check_dimensions("gr", gr, 2)
    kind = _type_of("x", x, bfloat16=FK_BFLOAT16)
    (eigen, width), vertices = x.shape, gr.shape[0]
    _check_dense("x", x, (eigen, width), x.dtype)
    for name, each in (("gr", gr), ("gi", gi)):
        _check_dense(name, each, (vertices, eigen), x.dtype)
    for name, each in (("lr", lr), ("li", li)):
        _check_dense(name, each, (width, width), x.dtype)
    return fk_gradients(0, kind, vertices, eigen, width)


def _plan_gradient_features(x, gr, gi, lr, li):
    description = _check_tangents(x, gr, gi, lr, li)
    return _Plan("fk_gradients_forward", description, _dense(x.dtype, gr.shape[0], x.shape[1]))


def _gradient_features_fake(x, gr, gi, lr, li):
    return x.new_empty((gr.shape[0], x.shape[1]))


def _gradient_features_save(ctx, inputs, output):
    if any(each.requires_grad for each in inputs[1:3]):
        raise RuntimeError("the gradient features have no gradient of gr or gi; call detach() on them")
    ctx.save_for_backward(*inputs)


def _gradient_features_backward_of(ctx, d_out):
    d_x, d_lr, d_li = gradient_features_backward(d_out.contiguous(), *ctx.saved_tensors)
    return d_x, None, None, d_lr, d_li


def gradient_features_backward(d_out, x, gr, gi, lr, li):
    """(d_x, d_lr, d_li), the gradients of gradient_features(). With g = d_out * (1 - out^2), P = g * xr, Q = g * xi, R
    = g * ar and S = g * ai: d_lr = P^T xr + Q^T xi, d_li = Q^T xr - P^T xi and d_x = gr^T (R + P lr + Q li) + gi^T (S
    - P li + Q lr). Shapes: d_out that of the features, each result that of what it is the gradient of. Type, layout
    and errors: as gradient_features(). Gradients: none. Source: operators/gradients; lesson 8 explains it."""
    operands = d_out, x, gr, gi, lr, li
    if _is_traced(*operands):
        return torch.ops.fused_kernels.gradient_features_backward(*operands)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise RuntimeError(_NO_BACKWARD["gradient_features_backward"])
    return _gradient_features_backward(*operands)


def _gradient_features_backward(d_out, x, gr, gi, lr, li):
    operands = d_out, x, gr, gi, lr, li
    device = d_out.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_out", d_out, _gradient_features_backward, *operands)
    key = ("gradient_features_backward", device,
           *[(each.shape, each.is_contiguous(), each.dtype) for each in operands])
    plan = _plans.get(key) or _remember(key, _plan_gradient_features_backward(*operands))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_gradient_features_backward(d_out, x, gr, gi, lr, li):
    description = _check_tangents(x, gr, gi, lr, li)
    _check_dense("d_out", d_out, (gr.shape[0], x.shape[1]), x.dtype)
    return _Plan("fk_gradients_backward", description, tuple(_dense(x.dtype, *each.shape) for each in (x, lr, li)))


def _gradient_features_backward_fake(d_out, x, gr, gi, lr, li):
    return tuple(each.new_empty(each.shape) for each in (x, lr, li))


# The algebras of the Clifford products: (p, q, r), how many basis vectors square to 1, to -1 and to 0 -> how many
# triples of grades there are.
TRIPLES = {(2, 0, 0): 10, (3, 0, 0): 20, (3, 0, 1): 34, (1, 3, 0): 35, (4, 1, 0): 56}


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
    if _is_traced(x, y, w):
        return torch.ops.fused_kernels.clifford(x, y, w, signature, normed)
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or w.requires_grad):
        return _functions["clifford"].apply(x, y, w, _signature_of(signature), bool(normed))
    return _clifford(x, y, w, signature, normed)


def _clifford(x, y, w, signature=(3, 0, 0), normed=True):
    signature, normed = _signature_of(signature), bool(normed)
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _clifford, x, y, w, signature, normed)
    key = ("clifford", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in (x, y, w)], signature,
           normed)
    plan = _plans.get(key) or _remember(key, _plan_clifford(x, y, w, signature, normed))
    out = _empty(*plan.outputs)
    _launch(plan, x.data_ptr(), y.data_ptr(), w.data_ptr(), out.data_ptr())
    return out


def _describe_clifford(x, y, w, signature, normed, connected=False):
    """The fk_clifford of operands that fit. connected: w is a matrix for each triple."""
    _check(signature in TRIPLES, f"the signature is {signature}; it has to be one of {', '.join(map(str, TRIPLES))}")
    _check_dimensions("x", x, 3)
    kind = _type_of("x", x, float32=FK_FLOAT32)
    _, batch, features = x.shape
    for name, each in (("x", x), ("y", y)):
        _check_dense(name, each, (2**sum(signature), batch, features), x.dtype)
    triples = TRIPLES[signature]
    _check_dense("w", w, (triples, features, features) if connected else (features, triples), x.dtype)
    return fk_clifford(0, kind, *signature, normed, batch, features)


def _plan_clifford(x, y, w, signature, normed):
    return _Plan("fk_clifford_forward", _describe_clifford(x, y, w, signature, normed), _dense(x.dtype, *x.shape))


def _clifford_fake(x, y, w, signature=(3, 0, 0), normed=True):
    return x.new_empty(x.shape)


def _clifford_save(ctx, inputs, output):
    x, y, w, ctx.signature, ctx.normed = inputs
    ctx.save_for_backward(x, y, w)


def _clifford_backward_of(ctx, d_out):
    return *clifford_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.signature, ctx.normed), None, None


def clifford_backward(d_out, x, y, w, signature=(3, 0, 0), normed=True):
    """(d_x, d_y, d_w), the gradients of clifford(): of the sum of d_out times its result. Shapes: d_out that of the
    result, each gradient that of what it is the gradient of. Type, layout and errors: as clifford(). Gradients: none.
    Source: operators/clifford; lesson 10 explains it."""
    if _is_traced(d_out, x, y, w):
        return torch.ops.fused_kernels.clifford_backward(d_out, x, y, w, signature, normed)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (d_out, x, y, w)):
        raise RuntimeError(_NO_BACKWARD["clifford_backward"])
    return _clifford_backward(d_out, x, y, w, signature, normed)


def _clifford_backward(d_out, x, y, w, signature=(3, 0, 0), normed=True):
    signature, normed = _signature_of(signature), bool(normed)
    operands = d_out, x, y, w
    device = d_out.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_out", d_out, _clifford_backward, *operands, signature, normed)
    key = ("clifford_backward", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in operands],
           signature, normed)
    plan = _plans.get(key) or _remember(key, _plan_clifford_backward(*operands, signature, normed))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_clifford_backward(d_out, x, y, w, signature, normed):
    description = _describe_clifford(x, y, w, signature, normed)
    _check_dense("d_out", d_out, tuple(x.shape), x.dtype)
    return _Plan("fk_clifford_backward", description, tuple(_dense(x.dtype, *each.shape) for each in (x, y, w)))


def _clifford_backward_fake(d_out, x, y, w, signature=(3, 0, 0), normed=True):
    return tuple(each.new_empty(each.shape) for each in (x, y, w))


def clifford_connected(x, y, w, signature=(3, 0, 0), normed=True):
    """The product of clifford() with matrices of weights, which mix the features: w (triples, features, features),
    whose rows are features of the product and whose columns are those of the result. signature: (2, 0, 0) or (3, 0,
    0). There are at most 8192 features. Type: torch.float32 for all; products and weights are rounded to TF32, and
    added up in fp32. Other shapes, layout and errors: as clifford().

    Gradients: of x, y and w, by clifford_connected_backward(); an incoming gradient that is not contiguous is copied.
    There are no second derivatives.

    The blocks of a kernel start together, so a call waits until its stream finds room for all of them. Source:
    operators/clifford_connected; the bonus lesson on multivectors, mixed explains it."""
    if _is_traced(x, y, w):
        return torch.ops.fused_kernels.clifford_connected(x, y, w, signature, normed)
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or w.requires_grad):
        return _functions["clifford_connected"].apply(x, y, w, _signature_of(signature), bool(normed))
    return _clifford_connected(x, y, w, signature, normed)


def _clifford_connected(x, y, w, signature=(3, 0, 0), normed=True):
    signature, normed = _signature_of(signature), bool(normed)
    device = x.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("x", x, _clifford_connected, x, y, w, signature, normed)
    key = ("clifford_connected", device, *[(each.shape, each.is_contiguous(), each.dtype) for each in (x, y, w)],
           signature, normed)
    plan = _plans.get(key) or _remember(key, _plan_clifford_connected(x, y, w, signature, normed))
    out = _empty(*plan.outputs)
    _launch(plan, x.data_ptr(), y.data_ptr(), w.data_ptr(), out.data_ptr())
    return out


def _plan_clifford_connected(x, y, w, signature, normed):
    description = _describe_clifford(x, y, w, signature, normed, connected=True)
    return _Plan("fk_clifford_connected_forward", description, _dense(x.dtype, *x.shape))


def _clifford_connected_backward_of(ctx, d_out):
    return (*clifford_connected_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.signature, ctx.normed), None,
            None)


def clifford_connected_backward(d_out, x, y, w, signature=(3, 0, 0), normed=True):
    """(d_x, d_y, d_w), the gradients of clifford_connected(): of the sum of d_out times its result, which is computed
    again. Shapes: d_out that of the result, each gradient that of what it is the gradient of. Type, layout and errors:
    as clifford_connected(). Gradients: none. Source: operators/clifford_connected."""
    if _is_traced(d_out, x, y, w):
        return torch.ops.fused_kernels.clifford_connected_backward(d_out, x, y, w, signature, normed)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (d_out, x, y, w)):
        raise RuntimeError(_NO_BACKWARD["clifford_connected_backward"])
    return _clifford_connected_backward(d_out, x, y, w, signature, normed)


def _clifford_connected_backward(d_out, x, y, w, signature=(3, 0, 0), normed=True):
    signature, normed = _signature_of(signature), bool(normed)
    operands = d_out, x, y, w
    device = d_out.get_device()
    if device < 0 or device != _current_device():
        return _on_device_of("d_out", d_out, _clifford_connected_backward, *operands, signature, normed)
    key = ("clifford_connected_backward", device,
           *[(each.shape, each.is_contiguous(), each.dtype) for each in operands], signature, normed)
    plan = _plans.get(key) or _remember(key, _plan_clifford_connected_backward(*operands, signature, normed))
    results = [_empty(*layout) for layout in plan.outputs]
    _launch(plan, *[each.data_ptr() for each in operands], *[each.data_ptr() for each in results])
    return tuple(results)


def _plan_clifford_connected_backward(d_out, x, y, w, signature, normed):
    description = _describe_clifford(x, y, w, signature, normed, connected=True)
    _check_dense("d_out", d_out, tuple(x.shape), x.dtype)
    return _Plan("fk_clifford_connected_backward", description,
                 tuple(_dense(x.dtype, *each.shape) for each in (x, y, w)))


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


# ---- What PyTorch is told ------------------------------------------------------------------------------------------

_NO_BACKWARD = {
    "attention_backward": "the library has no second derivative of attention",
    "diffusion_backward": "the library has no second derivative of the diffusion",
    "gating_backward": "the library has no second derivative of the gated layer",
    "softmax_backward": "the library has no second derivative of softmax(x w)",
    "cross_entropy_backward": "the library has no second derivative of the cross-entropy of softmax(x w)",
    "gradient_features_backward": "the library has no second derivative of the gradient features",
    "clifford_backward": "the library has no second derivative of the Clifford product",
    "clifford_connected_backward": "the library has no second derivative of the fully connected Clifford product",
}
_functions = {}  # name -> the autograd.Function of an operator that has gradients


def _register(operators, name, schema, run, fake, save=None, backward=None):
    """Defines an operator, torch.ops.fused_kernels.NAME. run: what computes it; fake: what returns results of its
    shapes and strides; save(ctx, inputs, output) and backward(ctx, *gradients) as autograd.Function has them."""
    full = f"fused_kernels::{name}"
    # Inductor shall not change the layout of what it hands over. (The second tag is of PyTorch before 2.7.)
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    operators.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, strides))

    def run_as_operator(*inputs):
        usable, _kept.usable = _kept.usable, False
        try:
            return run(*inputs)
        finally:
            _kept.usable = usable

    operators.impl(name, run_as_operator, "CUDA")
    torch.library.register_fake(full, fake, lib=operators)

    def refuse(ctx, *gradients):
        raise RuntimeError(_NO_BACKWARD[name])

    torch.library.register_autograd(full, backward or refuse, setup_context=save, lib=operators)
    if backward:
        def forward(ctx, *inputs):
            output = run(*inputs)
            save(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        _functions[name] = type(f"fused_kernels_{name}", (torch.autograd.Function,), methods)


if torch:
    _forward_ad = torch.autograd.forward_ad
    _PLAIN = {torch.Tensor, torch.nn.Parameter}
    _current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    _current_stream = getattr(torch._C, "_cuda_getCurrentRawStream",
                              lambda device: torch.cuda.current_stream(device).cuda_stream)
    _is_capturing = torch.cuda.is_current_stream_capturing
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _are_transforms_active = torch._C._are_functorch_transforms_active
    # What compiled programs of torch.compile call: half of torch.empty_strided's microseconds. It takes tuples.
    _empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda",
                     lambda *layout: torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="cuda"))
    _operators = torch.library.Library("fused_kernels", "DEF")
    _register(_operators, "product", "(Tensor a, Tensor b, str math='fp32') -> Tensor", _product, _product_fake,
              _product_save, _product_backward)
    _register(_operators, "gating", "(Tensor x, Tensor w1, Tensor w2, Tensor b1, Tensor b2) -> Tensor", _gating,
              _gating_fake, _save_inputs, _gating_backward_of)
    _register(_operators, "attention", "(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None, "
              "bool log_sums=False) -> (Tensor, Tensor)", _attention_operator, _attention_fake, _attention_save,
              _attention_backward_of)
    _register(_operators, "attention_backward", "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, "
              "Tensor log_sums, bool causal=False, float? scale=None) -> (Tensor, Tensor, Tensor)",
              _attention_backward, _attention_backward_fake)
    _register(_operators, "diffusion", "(Tensor x, Tensor basis, Tensor mass, Tensor evalues, Tensor times) -> "
              "(Tensor, Tensor)", _diffusion, _diffusion_fake, _diffusion_save, _diffusion_backward_of)
    _register(_operators, "diffusion_backward", "(Tensor d_out, Tensor d_spectral, Tensor basis, Tensor mass, "
              "Tensor evalues, Tensor times, Tensor spectral) -> (Tensor, Tensor)", _diffusion_backward,
              _diffusion_backward_fake)
    _register(_operators, "softmax", "(Tensor x, Tensor w) -> Tensor", _softmax, _softmax_fake, _softmax_save,
              _softmax_backward_of)
    _register(_operators, "gradient_features", "(Tensor x, Tensor gr, Tensor gi, Tensor lr, Tensor li) -> Tensor",
              _gradient_features, _gradient_features_fake, _gradient_features_save, _gradient_features_backward_of)
    _register(_operators, "gradient_features_backward", "(Tensor d_out, Tensor x, Tensor gr, Tensor gi, Tensor lr, "
              "Tensor li) -> (Tensor, Tensor, Tensor)", _gradient_features_backward, _gradient_features_backward_fake)
    _register(_operators, "clifford", "(Tensor x, Tensor y, Tensor w, int[] signature=[3, 0, 0], bool normed=True) -> "
              "Tensor", _clifford, _clifford_fake, _clifford_save, _clifford_backward_of)
    _register(_operators, "clifford_backward", "(Tensor d_out, Tensor x, Tensor y, Tensor w, "
              "int[] signature=[3, 0, 0], bool normed=True) -> (Tensor, Tensor, Tensor)", _clifford_backward,
              _clifford_backward_fake)
    _register(_operators, "clifford_connected", "(Tensor x, Tensor y, Tensor w, int[] signature=[3, 0, 0], "
              "bool normed=True) -> Tensor", _clifford_connected, _clifford_fake, _clifford_save,
              _clifford_connected_backward_of)
    _register(_operators, "clifford_connected_backward", "(Tensor d_out, Tensor x, Tensor y, Tensor w, "
              "int[] signature=[3, 0, 0], bool normed=True) -> (Tensor, Tensor, Tensor)", _clifford_connected_backward,
              _clifford_backward_fake)
    _register(_operators, "gating_backward", "(Tensor d_out, Tensor x, Tensor w1, Tensor w2, Tensor b1, Tensor b2) -> "
              "(Tensor, Tensor, Tensor, Tensor, Tensor)", _gating_backward, _gating_backward_fake)
    _register(_operators, "softmax_backward", "(Tensor d_probs, Tensor x, Tensor w, Tensor probs) -> (Tensor, Tensor)",
              _softmax_backward, _softmax_backward_fake)
    _register(_operators, "cross_entropy", "(Tensor x, Tensor w, Tensor labels) -> (Tensor, Tensor, Tensor)",
              _cross_entropy, _cross_entropy_fake, _cross_entropy_save, _cross_entropy_backward_of)
    _register(_operators, "cross_entropy_backward", "(Tensor d_losses, Tensor x, Tensor w, Tensor labels, "
              "Tensor logits, Tensor log_sums) -> (Tensor, Tensor)", _cross_entropy_backward,
              _cross_entropy_backward_fake)


from .geometric import geometric_product  # noqa: E402 (it needs what is above)
