"""The rows of the table as functions of PyTorch's tensors: plans, which later calls find; the operators
torch.ops.fused_kernels.*, with their layouts for tracing, their gradients and what torch.autocast does; and `calls`,
what the package's functions call.

An operator of torch.library costs several microseconds for each call, as long as the smallest kernels take. So it is
called only where somebody looks at operators: torch.compile, torch.export, a TorchDispatchMode, torch.func, a subclass
of Tensor. All else calls the library directly, through an autograd.Function if a gradient is wanted."""

import ctypes
import itertools
import linecache
import operator
import threading

from ._library import error_of, is_for_cpu, library, library_path, query_of
from ._table import OPERATORS, PYTHON

OLDEST = "2.6"


class _NoTorch:
    def __init__(self, why):
        self._why = why

    def __getattr__(self, name):
        raise ImportError(f"the functions of tensors need PyTorch{self._why}")

    def __bool__(self):
        return False


try:
    import torch
    if not hasattr(torch.library, "register_autograd"):
        torch = _NoTorch(f" {OLDEST} or newer; this is {torch.__version__}")
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = _NoTorch(", which is not installed")

if torch:
    # Of what is not public in PyTorch this is all. Each is looked at in every call.
    _forward_ad = torch.autograd.forward_ad  # _current_level says whether there can be tangents; nothing public does
    _dispatch_modes = torch._C._len_torch_dispatch_stack  # there is no public way to ask
    _are_transforms_active = torch._C._are_functorch_transforms_active  # nor here
    # Where PyTorch no longer has one of these, the public function does: it takes some tenths of a microsecond longer,
    # or a whole one for the stream and for each result. What compiled programs call allocates results; it takes tuples.
    _current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    _current_stream = getattr(torch._C, "_cuda_getCurrentRawStream",
                              lambda device: torch.cuda.current_stream(device).cuda_stream)
    _empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda",
                     lambda *layout: torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="cuda"))
    _is_capturing = torch.cuda.is_current_stream_capturing
    _PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


# ---- Plans: what all calls with operands of the same shapes, strides and types have in common ----------------------

_MOST_PLANS = 4096
_plans = {}


class _Plan:
    """A description that the library has accepted, its workspace, and the results' layouts. No call changes it, so
    several threads may use it."""

    __slots__ = ("function", "description", "at", "bytes", "workspace", "device", "outputs")

    def __init__(self, name, description, outputs):
        """name: of the function. outputs: (shape, strides, dtype) of each result, or None. Asks the library, on the
        current device, how much workspace there has to be; it refuses here what no GPU, or not this one, can
        compute."""
        if is_for_cpu(library()):
            raise RuntimeError(f"{library_path()} is the CPU's library, and tensors are on a GPU: install or build the "
                               "package where nvcc is, with arch=all or this GPU's")
        description.size = ctypes.sizeof(description)
        needed = ctypes.c_size_t()
        if code := getattr(library(), query_of(name))(ctypes.byref(description), ctypes.byref(needed)):
            raise error_of(code)
        self.function, self.outputs = getattr(library(), name), outputs
        self.description, self.at = description, ctypes.addressof(description)
        self.bytes, self.workspace = needed.value, (needed.value,)
        self.device = _current_device()


def _make_plan(row, tensors, numbers):
    operands, numbers = dict(zip(row.operands, tensors)), dict(zip(row.numbers, numbers))
    sizes, fields = row.check(operands, numbers)
    outputs = {}
    for name, layout in _results(row, operands, numbers, sizes).items():
        if layout and name in row.like:
            strides = _empty_as(row, operands[row.like[name]], device="meta").stride()
        elif layout:
            strides = itertools.accumulate(layout[0][:0:-1], operator.mul, initial=1)
            strides = tuple(strides)[::-1] if layout[0] else ()
        outputs[name] = layout and (layout[0], tuple(strides), layout[1])
    layouts = {name: (tuple(each.shape), each.stride()) for name, each in operands.items() if each is not None}
    description = row.describe(fields, layouts | {name: each[:2] for name, each in outputs.items() if each})
    return _Plan(row.function, description, tuple(outputs.values()))


def _empty_as(row, operand, **options):
    """An empty tensor that lies as a result that is like an operand."""
    transposed = row.is_transposed(operand)
    if transposed is None:
        return torch.empty_like(operand, **options)
    operand = operand.mT if transposed else operand
    empty = operand.new_empty(operand.shape, **options)
    return empty.mT if transposed else empty


def _results(row, operands, numbers, sizes):
    """(shape, dtype) of each result by its name; None for those that there are not. Sizes may be symbols."""
    found, first = {}, operands[row.order[0]]
    for name in row.results:
        of = operands.get(name.removeprefix("d_"))
        if not row.is_written(name, operands, numbers):
            found[name] = None
        elif name.startswith("d_") and of is not None:
            found[name] = tuple(of.shape), of.dtype
        else:
            dtype = getattr(torch, row.dtypes[name]) if name in row.dtypes else first.dtype
            found[name] = row.sizes_of(name, sizes), dtype
    return found


def _remember(key, plan):
    if len(_plans) >= _MOST_PLANS:  # sizes that are others in each call
        _plans.clear()
    _plans[key] = plan
    return plan


_KEPT_BYTES, _MOST_KEPT = 1 << 16, 64


class _Workspaces(threading.local):
    """Of each thread a small workspace for each stream that it calls in: (tensor, address) by (device, stream). To
    allocate one costs a microsecond. Calls of one thread in one stream do not run at the same time, but those of two
    threads might take turns within a call. Inside an operator of torch.library none is used: a compiled program may
    have a pool of memory of its own."""

    def __init__(self):
        self.workspaces, self.usable = {}, True


_own = _Workspaces()


def _launch(plan, *addresses):
    """Calls the plan's function on the current stream."""
    stream = _current_stream(plan.device)
    if not plan.bytes:
        workspace, at = None, None
    elif plan.bytes <= _KEPT_BYTES and _own.usable and not _is_capturing():  # a graph runs in whichever stream
        workspace, at = _own.workspaces.get((plan.device, stream)) or _keep_workspace(plan.device, stream)
    else:
        workspace = _empty(plan.workspace, (1,), torch.uint8)
        at = workspace.data_ptr()
    code = plan.function(plan.at, *addresses, at, plan.bytes, stream)
    if code:
        raise error_of(code)


def _keep_workspace(device, stream):
    workspace = _empty((_KEPT_BYTES,), (1,), torch.uint8)
    if len(_own.workspaces) >= _MOST_KEPT:
        _own.workspaces.clear()  # PyTorch gives the memory to later work of the same stream alone
    _own.workspaces[device, stream] = workspace, workspace.data_ptr()
    return _own.workspaces[device, stream]


def _on_device_of(name, tensor, function, *arguments):
    """Calls the function while the tensor's device is the current one."""
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}; it has to be on a CUDA device")
    with torch.cuda.device(tensor.device):
        return function(*arguments)


def _as_autocast(row, tensors, numbers):
    """The operands in the type of torch.autocast, if the function has that type."""
    dtype = torch.get_autocast_dtype("cuda")
    if str(dtype).removeprefix("torch.") not in row.types or not row.autocast(*numbers):
        return tensors
    return [each if each is None or not each.is_floating_point() or each.dtype == torch.float64 else each.to(dtype)
            for each in tensors]


def _refuse_tangents(*tensors):
    """The library would compute the result without its tangent, and nobody would hear of it."""
    if any(each is not None and _forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise RuntimeError("the library has no forward-mode derivatives; take gradients by backward(), or call it on "
                           "tensors without a tangent")


# ---- A row's functions ---------------------------------------------------------------------------------------------
#
# Half of a call's time would go into loops over operands. So what each call runs is written out for its row, as the
# standard library writes the methods of a dataclass. For softmax(x, w) this is, without what all rows have alike:
#
#     def call(x, w): ...
#         if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
#             return function.apply(x, w)
#         return run(x, w)
#
#     def run(x, w): ...
#         key = ("softmax", device, x.shape, x.is_contiguous(), x.dtype, w.shape, w.is_contiguous(), w.dtype)
#         plan = _plans.get(key) or _remember(key, _make_plan(row, (x, w), ()))
#         (new_probs,) = plan.outputs
#         new_probs = _empty(*new_probs)
#         _launch(plan, x.data_ptr(), w.data_ptr(), new_probs.data_ptr())
#         return new_probs
#
#     def save(ctx, inputs, output): ...
#         ctx.save_for_backward(x, w, probs)
#
# print(_source_of(OPERATORS["softmax"])) shows all of it.

_SOURCE = """
def functions_of(row, function_of):
    def call({inputs}):
        if torch.compiler.is_compiling():
            return torch.ops.fused_kernels.{name}({inputs})
        if _forward_ad._current_level >= 0:
            _refuse_tangents({tensors})
        if {subclass} or _dispatch_modes() > 0 or _are_transforms_active():
            return torch.ops.fused_kernels.{name}({inputs}){cast}
        if torch.is_grad_enabled() and ({requires_grad}):
            if function is None:
                raise RuntimeError(row.refusal)
            return function.apply({tensors}{converted})
        return run({inputs})

    def run({inputs}):
        device = {first}.get_device()
        if device < 0 or device != _current_device():
            return _on_device_of("{first}", {first}, run, {inputs}){convert}
        key = ({key})
        plan = _plans.get(key) or _remember(key, _make_plan(row, ({tensors},), ({numbers})))
        ({new},) = plan.outputs{allocate}
        _launch(plan, {addresses})
        return {returned}

    def save(ctx, inputs, output):
        {inputs}, = inputs{refuse}{keep_numbers}
        {results} = output{hide}
        ctx.save_for_backward({kept})

    function = function_of(row, run, save)
    return call, run, save
"""


def _gradients_row(row):
    return OPERATORS.get(row.backward) if isinstance(row.backward, str) else None


def _kept(row):
    """What is kept for the gradients: what their row reads but the incoming gradients, which come first."""
    own = _gradients_row(row)
    return [each for each in own.operands if each in row.operands + row.results] if own else row.operands


def _source_of(row):
    own, numbers, line = _gradients_row(row), [*row.numbers], "\n        "
    may_be_none = {each for each, is_so in zip(row.operands, row.optional) if is_so}
    new = {each: f"new_{each}" for each in row.results}
    may_be_new = {new[each] for each in row.results
                  if each in row.numbers or each.removeprefix("d_") in may_be_none}
    converted = [PYTHON[row.numbers[each][0]].format(each) for each in numbers]
    given = "".join(f"{each}, " for each in numbers)

    def unless_none(name, expression):
        return f"None if {name} is None else {expression}" if name in may_be_none | may_be_new else expression

    def layout(name):
        found = f"{name}.shape, {name}.{'stride' if name in row.strides else 'is_contiguous'}(), {name}.dtype"
        return unless_none(name, f"({found})") if name in may_be_none else found

    def one_requires_grad(names):
        return " or ".join(f"{each} is not None and {each}.requires_grad" if each in may_be_none
                           else f"{each}.requires_grad" for each in names)

    no_gradient = [each for each in row.operands if own and f"d_{each}" not in own.results and each not in row.dtypes]
    hidden = [each for each in row.returned if own and f"d_{each}" not in own.operands]
    return _SOURCE.format(
        name=row.name, first=row.operands[0], inputs=", ".join([*row.operands, *numbers]),
        tensors=", ".join(row.operands), numbers=given,
        subclass=" or ".join(f"type({each}) not in _PLAIN" for each in row.operands),
        cast=f"{line}if torch.is_autocast_enabled('cuda'):{line}    "
             f"{', '.join(row.operands)}, = _as_autocast(row, ({', '.join(row.operands)},), ({given}))"
             if row.autocast else "",
        requires_grad=one_requires_grad(row.operands),
        converted="".join(f", {each}" for each in converted),
        convert=f"{line}{', '.join(numbers)}, = {', '.join(converted)}," if numbers else "",
        key=", ".join([repr(row.name), "device", *map(layout, row.operands), *numbers]),
        new=", ".join(new.values()),
        allocate="".join(f"{line}{each} = {unless_none(each, f'_empty(*{each})')}" for each in new.values()),
        addresses=", ".join(unless_none(each, f"{each}.data_ptr()") for each in [*row.operands, *new.values()]),
        returned=", ".join(new[each] for each in row.returned), results=", ".join(row.returned),
        refuse=f"{line}if {one_requires_grad(no_gradient)}:{line}    raise RuntimeError(row.refusal)"
               if no_gradient else "",
        keep_numbers=f"{line}ctx.numbers = {', '.join(numbers)}," if own and numbers else "",
        # Without the second, zeros would be made that nobody reads, as large as what is hidden.
        hide=f"{line}ctx.mark_non_differentiable({', '.join(hidden)}){line}ctx.set_materialize_grads(False)"
             if hidden else "",
        kept=", ".join(_kept(row)))


def _functions_of(row):
    """(call, run, save) of a row."""
    source, path, found = _source_of(row), f"{__file__}:{row.name}", {}
    linecache.cache[path] = len(source), None, source.splitlines(True), path  # for tracebacks
    exec(compile(source, path, "exec"), globals(), found)
    return found["functions_of"](row, _function_of)


def aligned(tensor):
    """The tensor, or its copy if its memory does not begin at a multiple of 16 bytes, as that of a part of another tensor
    may: such gradients come out of a torch.cat(). What PyTorch traces has no memory yet."""
    if tensor is None or torch.compiler.is_compiling() or type(tensor) not in _PLAIN:
        return tensor
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _backward_of(row):
    """backward(ctx, *gradients) as autograd.Function has it, where the gradients are a row of their own."""
    own, kept = _gradients_row(row), _kept(row)

    def backward(ctx, *gradients):
        numbers = dict(zip(row.numbers, ctx.numbers)) if row.numbers else {}
        incoming = {each: aligned(d) for each, d in zip(row.returned, gradients) if f"d_{each}" in own.operands}
        if all(d is None for d in incoming.values()):
            return (None,) * len(row.operands + (*numbers,))
        saved = dict(zip(kept, ctx.saved_tensors))
        if not all(numbers.get(each, True) for each in kept):  # the operator was called by name, without all results
            numbers |= {each: True for each in kept if each in numbers}
            with torch.no_grad():
                again = calls[row.name](*[saved[each] for each in row.operands], *numbers.values())
            saved |= {each: result for each, result in zip(row.returned, again) if each in kept}
        if row.twice and torch.is_grad_enabled():
            needed = [each for each, is_needed in zip(row.operands, ctx.needs_input_grad) if is_needed]
            found = row.twice(calls, saved, numbers, *incoming.values(), needed)
            return *[found.get(f"d_{each}") for each in row.operands], *[None] * len(row.numbers)
        arrived = [d if each in row.like and d.stride() == saved[each].stride() else d.contiguous()
                   for each, d in incoming.items()]
        if "deterministic" in own.numbers:
            numbers["deterministic"] = torch.are_deterministic_algorithms_enabled()
        needed = dict(zip(row.operands, ctx.needs_input_grad))
        numbers |= {each: needed.get(each.removeprefix("d_"), False) for each in own.results if each in own.numbers}
        found = calls[own.name](*arrived, *saved.values(), *[numbers[each] for each in own.numbers])
        found = dict(zip(own.results, found))
        return (*[found.get(f"d_{each}") if is_needed else None
                  for each, is_needed in zip(row.operands, ctx.needs_input_grad)], *[None] * len(row.numbers))

    return backward


def _function_of(row, run, save):
    """The autograd.Function of calls that nobody looks at; None if there are no gradients."""
    if not torch or not row.backward:
        return None

    def forward(ctx, *inputs):
        output = run(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(_backwards[row.name])}
    return type(f"fused_kernels_{row.name}", (torch.autograd.Function,), methods)


# ---- A row's functions: what torch.library is told -----------------------------------------------------------------


def _register(library_of_operators, row, run, save, backward):
    """Defines torch.ops.fused_kernels.NAME."""
    name, full, count = row.name, f"fused_kernels::{row.name}", len(row.operands)

    def with_defaults(numbers):
        """The dispatcher leaves out what are defaults at the end."""
        return *numbers, *[default for _, default in row.numbers.values()][len(numbers):]

    def none_as_empty(tensors, results):
        """The results of an operator are tensors, always."""
        empty = [tensors[0].new_empty((0,), dtype=getattr(torch, row.dtypes[each]) if each in row.dtypes else None)
                 if result is None else result for each, result in zip(row.returned, results)]
        return tuple(empty) if len(empty) > 1 else empty[0]

    def run_as_operator(*inputs):
        # In a compiled program a gradient, too, may be a part of another tensor.
        tensors = [aligned(each) if operand.startswith("d_") else each for operand, each in zip(row.operands, inputs)]
        numbers = with_defaults(inputs[count:])
        usable, _own.usable = _own.usable, False
        try:
            results = run(*tensors, *numbers)
        finally:
            _own.usable = usable
        return none_as_empty(tensors, results if isinstance(results, tuple) else (results,))

    def fake(*inputs):
        """Results without their numbers. Sizes may be symbols, which are not compared: the call does that."""
        operands = dict(zip(row.operands, inputs))
        numbers = dict(zip(row.numbers, with_defaults(inputs[count:])))
        sizes = row.sizes(operands)
        if any(each not in sizes for name in row.results for each in row.shape_of(name)):  # such as that of grades
            plain = {each: tuple(map(operator.index, value)) if isinstance(value, (list, tuple)) else value
                     for each, value in numbers.items()}
            sizes = row.known(row.given(**plain)) | sizes
        layouts = _results(row, operands, numbers, sizes)
        results = {each: None if not layout else _empty_as(row, operands[row.like[each]]) if each in row.like
                   else inputs[0].new_empty(layout[0], dtype=layout[1]) for each, layout in layouts.items()}
        return none_as_empty(inputs, [results[each] for each in row.returned])

    def with_autocast(*inputs):
        """torch.library.register_autocast() knows one type, and torch.autocast has the one that it is given."""
        tensors = _as_autocast(row, inputs[:count], with_defaults(inputs[count:]))
        with torch.autocast("cuda", enabled=False):
            return getattr(torch.ops.fused_kernels, name)(*tensors, *inputs[count:])

    def refuse(ctx, *gradients):
        raise RuntimeError(row.refusal)

    # Inductor shall not change the layout of what it hands over. (The second tag is of PyTorch before 2.7.)
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    library_of_operators.define(name + row.schema, tags=(torch.Tag.pt2_compliant_tag, strides))
    library_of_operators.impl(name, run_as_operator, "CUDA")
    torch.library.register_fake(full, fake, lib=library_of_operators)
    torch.library.register_autograd(full, backward or refuse, setup_context=save, lib=library_of_operators)
    if row.autocast:
        library_of_operators.impl(name, with_autocast, "AutocastCUDA")


calls = {}  # name -> what the function of the package calls, with all its arguments
_backwards = {each.name: _backward_of(each) if isinstance(each.backward, str) else each.backward
              for each in OPERATORS.values() if each.backward}
_operators = torch.library.Library("fused_kernels", "DEF") if torch else None
for _row in OPERATORS.values():
    calls[_row.name], _run, _save = _functions_of(_row)
    if torch:
        _register(_operators, _row, _run, _save if _row.backward else None, _backwards.get(_row.name))
