"""The package operators/python/fused_kernels declares what the header declares, is installed by pip, and tests itself.
(operators/tests/gpu has the functions of tensors.)"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import re
import shutil
import sys
import types

import pytest

from conftest import NO_GPU, ROOT, execute
from test_library import BINDING, HEADER, LIBRARY, fused_kernels, library

binding, geometric, OPERATORS = fused_kernels._torch, fused_kernels.geometric, fused_kernels._table.OPERATORS
TEXT = re.sub(r"/\*.*?\*/|^#.*?$", "", (HEADER / "fused_kernels.h").read_text(), flags=re.DOTALL | re.MULTILINE)
TYPES = {"size_t": ctypes.c_size_t, "int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float,
         "const char*": ctypes.c_char_p, "void": None, **fused_kernels.STRUCTS}
PRINTS_THE_ERROR_OF = """
import fused_kernels
try:
    fused_kernels.{}
except (ImportError, RuntimeError) as error:
    print(error)
"""


def structs():
    """Of each struct of the header its fields: (name, type)."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", TEXT, re.DOTALL):
        found[name] = [(field.strip(), TYPES[kind]) for kind, names in re.findall(r"(\w+) ([^;]+);", body)
                       for field in names.split(",")]
    return found


def of_argument(words):
    return ctypes.c_void_p if "*" in words else TYPES[words.rsplit(" ", 1)[0]]


def functions_of_header():
    found = {}
    for result, name, words in re.findall(r"FK_API (.*?)\b(fk_\w+)\((.*?)\);", TEXT, re.DOTALL):
        arguments = [] if words == "void" else [of_argument(" ".join(each.split())) for each in words.split(",")]
        found[name] = TYPES[result.strip()], arguments
    return found


def test_structs():
    assert {name: each._fields_ for name, each in fused_kernels.STRUCTS.items()} == structs()


def test_functions():
    assert fused_kernels.FUNCTIONS == functions_of_header()


def test_constants():
    constants = {name: int(value) for name, value in re.findall(r"\b(FK_\w+) = (\d+)", TEXT)}
    constants["FK_VERSION"] = int(re.search(r"#define FK_VERSION (\d+)", (HEADER / "fused_kernels.h").read_text())[1])
    assert len(constants) == 60
    assert {name: value for name, value in vars(fused_kernels).items() if name.startswith("FK_")} == constants


def test_sizes_and_offsets(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    lines, expected = [], []
    for name, struct in fused_kernels.STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(struct, field).offset)
    source = tmp_path / "sizes.c"
    source.write_text('#include <stdio.h>\n#include "fused_kernels.h"\n'
                      f"int main(void) {{ {' '.join(lines)} return 0; }}\n")
    built = execute(["gcc", f"-I{HEADER}", source, "-o", tmp_path / "sizes"])
    assert built.rc == 0, built.stderr
    assert list(map(int, execute([tmp_path / "sizes"]).stdout.split())) == expected


class Cell:
    """What a tensor with one element is to Python: another value may be written to it, and as a key it is itself."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)

    def __bool__(self):
        return bool(self.value)

    def __index__(self):
        return int(self.value)


class Operand:
    """Of a tensor what a plan is found by."""
    shape, dtype = (8, 2, 4), "float32"

    def get_device(self):
        return 0

    def stride(self):
        return (8, 4, 1)

    def is_contiguous(self):
        return True

    def data_ptr(self):
        return 0


@pytest.fixture
def planned(monkeypatch):
    """What the functions of tensors plan, each time that they do: the arguments that are no tensors."""
    found = []

    def plan(row, tensors, numbers):
        found.append(numbers)
        return types.SimpleNamespace(outputs=((),) * len(row.results))

    monkeypatch.setattr(binding, "_make_plan", plan)
    monkeypatch.setattr(binding, "_plans", {})
    monkeypatch.setattr(binding, "_current_device", lambda: 0, raising=False)
    monkeypatch.setattr(binding, "_empty", lambda *layout: Operand(), raising=False)
    monkeypatch.setattr(binding, "_launch", lambda *arguments: None)
    return found


def run_of(row):
    return binding._functions_of(row)[1]


def test_numbers_are_no_keys_by_identity(planned):
    """Of a number that is an object the value counts, in each call."""
    q, causal, scale = Operand(), Cell(0), Cell(0.25)
    for causal.value, scale.value in ((0, 0.25), (0, 0.5), (1, 0.5), (0, 0.25)):
        run_of(OPERATORS["attention"])(q, q, q, causal, scale, Cell(0))
        run_of(OPERATORS["attention_backward"])(*[q] * 6, causal, scale, Cell(0))
    assert planned == [(*pair, False) for pair in ((False, 0.25), (False, 0.5), (True, 0.5)) for _ in range(2)]
    assert {type(each) for each in sum(planned, ())} == {bool, float}


def test_in_order_is_another_plan(planned):
    for deterministic in (False, True, 1, 0):
        run_of(OPERATORS["attention_backward"])(*[Operand()] * 6, False, 0.25, deterministic)
    assert planned == [(False, 0.25, False), (False, 0.25, True)]


@pytest.mark.parametrize("name, operands", [("clifford", 3), ("clifford_backward", 4), ("clifford_connected", 3),
                                            ("clifford_connected_backward", 4), ("clifford_connected_kept", 3),
                                            ("clifford_connected_kept_backward", 6), ("clifford_layer", 4),
                                            ("clifford_layer_backward", 6)])
def test_numbers_of_a_product_of_multivectors_are_no_keys_by_identity(planned, name, operands):
    normed, p = Cell(1), Cell(3)
    for normed.value, p.value in ((1, 3), (0, 3), (0, 2), (1, 3)):
        run_of(OPERATORS[name])(*[Operand()] * operands, [p, 0, 0], normed)
    assert planned == [((3, 0, 0), True), ((3, 0, 0), False), ((2, 0, 0), False)]


def test_rows_have_the_names_of_the_header():
    """Operands and results, in the order of the C function; and the rows of gradients fit those of forward."""
    for row in OPERATORS.values():
        (words,) = re.findall(rf"\b{row.function}\((.*?)\);", TEXT, re.DOTALL)
        names = [each.split()[-1].lstrip("*") for each in words.split(",")]
        assert names[1:] == [*row.operands, *row.results, "workspace", "workspace_bytes", "stream"], row.name
        assert set(row.order) == set(row.operands) and set(row.returned) == set(row.results)
        assert words.split()[1].rstrip("*") == row.struct.__name__
        assert set(row.strides.values()) <= {field for field, _ in row.struct._fields_}
        if isinstance(row.backward, str):
            own = OPERATORS[row.backward]
            incoming = [each for each in own.operands if each.removeprefix("d_") in row.results and each[:2] == "d_"]
            assert incoming and list(own.operands[:len(incoming)]) == incoming
            assert {each.removeprefix("d_") for each in own.results if each not in own.numbers} <= set(row.operands)
            # The others PyTorch says: what is deterministic, and which gradients are needed.
            assert set(own.numbers) - {"deterministic", *own.results} <= set(row.numbers)


class Symbol:
    """What a size is while PyTorch traces a program for any sizes: to look at it would fix it."""
    __hash__ = object.__hash__

    def looked_at(self, *other):
        raise AssertionError("a size is looked at")

    __bool__ = __int__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = looked_at


@pytest.mark.parametrize("name", OPERATORS)
def test_layouts_of_results_look_at_no_size(name):
    """Nor compare they two: sizes that have to be equal may be two symbols."""
    row = OPERATORS[name]
    operands = {each: types.SimpleNamespace(shape=[Symbol() for _ in row.shape_of(each)], dtype="float32")
                for each in row.operands}
    numbers = {each: default for each, (_, default) in row.numbers.items()}
    known = row.known(row.given(**numbers)) if row.given else {}  # such as the number of grades
    sizes = known | row.sizes(operands)
    for each in row.results:
        found = row.sizes_of(each, sizes)
        assert len(found) == len(row.shape_of(each))
        assert {type(size) for size in found} == ({Symbol, int} if "grades" in row.shape_of(each)
                                                  and "grades" not in row.sizes(operands) else {Symbol})


def test_a_row_with_operands_that_may_be_none(planned, monkeypatch):
    """They are NULL for the library, other plans are found for them, and they have no gradients."""
    forward, row = OPERATORS["gating"], OPERATORS["gating_backward"]
    assert forward.schema == ("(Tensor x, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, str gate='sigmoid', "
                              "str math='fp32') -> Tensor")
    launched, x = [], Operand()
    monkeypatch.setattr(binding, "_launch", lambda plan, *addresses: launched.append(addresses))
    for b1, b2 in ((x, x), (None, x), (x, None), (None, None)) * 2:
        run_of(forward)(x, x, x, b1, b2, "sigmoid", "fp32")
        assert launched[-1] == (0, 0, 0, *(None if each is None else 0 for each in (b1, b2)), 0)
        present = [row.is_written(each, {"b1": b1, "b2": b2, "x": x, "w1": x, "w2": x}, {}) for each in row.results]
        assert present == [True, True, True, b1 is not None, b2 is not None]
    assert len(planned) == 4
    matrix, weights, bias = (Dense(*shape) for shape in ((3, 8), (8, 16), (16,)))
    numbers = dict(gate="silu", math="fp32")
    sizes, fields = forward.check(dict(x=matrix, w1=weights, w2=weights, b1=None, b2=bias), numbers)
    description = forward.describe(fields, {"x": ((3, 8), (8, 1))})
    assert [getattr(description, each) for each in ("type", "rows", "inputs", "hidden", "x_stride", "gate")] == [
        fused_kernels.FK_FLOAT16, 3, 8, 16, 8, fused_kernels.FK_GATE_SILU]


class Dense:
    dtype = "torch.float16"

    def __init__(self, *shape):
        self.shape = shape

    def is_contiguous(self):
        return True

    def stride(self):
        return 8, 1


def typed(dtype, *shape):
    tensor = Dense(*shape)
    tensor.dtype = f"torch.{dtype}"
    return tensor


@pytest.mark.parametrize("sizes, strides, expected", [
    ((3, 5), (5, 1), (False, 5, 0)), ((3, 5), (8, 1), (False, 8, 0)), ((3, 5), (1, 3), (True, 3, 0)),
    ((3, 5), (1, 8), (True, 8, 0)), ((1, 5), (99, 1), (False, 0, 0)), ((1, 5), (99, 8), (True, 8, 0)),
    ((5, 1), (8, 99), (False, 8, 0)), ((5, 1), (1, 99), (False, 1, 0)), ((1, 1), (7, 9), (False, 0, 0)),
    ((2, 3, 5), (15, 5, 1), (False, 5, 15)), ((2, 3, 5), (0, 1, 3), (True, 3, 0)),
    ((1, 3, 5), (99, 5, 1), (False, 5, 0)),
])
def test_where_a_matrix_lies(sizes, strides, expected):
    assert fused_kernels._table.lie("a", sizes, strides) == expected


@pytest.mark.parametrize("strides", [(10, 2), (0, 1), (1, 0), (5, 5)])
def test_a_matrix_that_is_neither_in_rows_nor_in_columns(strides):
    with pytest.raises(ValueError, match="elements of a row or of a column have to be neighbours"):
        fused_kernels._table.lie("a", (3, 5), strides)


def test_a_product_is_described_as_its_operands_lie():
    row = OPERATORS["product_backward"]
    a, b, d_c = (typed("float32", *shape) for shape in ((2, 3, 5), (2, 5, 4), (2, 3, 4)))
    _, fields = row.check(dict(d_c=d_c, a=a, b=b), dict(math="tf32", d_a=True, d_b=True, d_bias=False))
    found = row.describe(fields, {"a": ((2, 3, 5), (0, 1, 3)), "b": ((2, 5, 4), (40, 8, 1))})
    assert {name: getattr(found, name) for name, _ in found._fields_[1:]} == dict(
        type=fused_kernels.FK_TF32, rows=3, cols=4, depth=5, a_stride=3, b_stride=8, c_stride=0, transpose_a=1,
        transpose_b=0, batch=2, a_batch_stride=0, b_batch_stride=40, c_batch_stride=12)


class Turned(Dense):
    def is_contiguous(self):
        return False

    def stride(self):
        return 1, 9


@pytest.mark.parametrize("name, operands, words", [
    ("product", dict(a=Dense(2, 8, 8), b=Dense(8, 8)), r"b has the shape \(8, 8\); it has to have 3 dimensions"),
    ("product", dict(a=Dense(8), b=Dense(8, 8)), r"a has the shape \(8,\); it has to have 2 or 3 dimensions"),
    ("product_bias", dict(a=Dense(3, 8), b=Dense(8, 8), bias=Dense(3)),
     r"bias has the shape \(3,\); it has to be \(8,\)"),
    ("product", dict(a=Dense(8, 8), b=Dense(9, 8)), r"b has the shape \(9, 8\); it has to be \(8, 8\)"),
    ("gating", dict(x=Dense(3, 8), w1=Turned(8, 4), w2=Dense(8, 4), b1=Dense(4), b2=Dense(4)),
     r"w1 has the strides \(1, 9\), but it has to be contiguous; call .contiguous\(\) if a copy is acceptable"),
    ("softmax", dict(x=typed("float64", 3, 8), w=Dense(8, 4)),
     "x is torch.float64; it has to be torch.float16 or torch.bfloat16 or torch.float32"),
    ("softmax", dict(x=Dense(3, 8), w=typed("float32", 8, 4)), "w is torch.float32; it has to be torch.float16"),
    ("cross_entropy", dict(x=Dense(3, 8), w=Dense(8, 4), labels=typed("int16", 3)),
     "labels is torch.int16; it has to be torch.int64 or torch.int32"),
    ("cross_entropy_backward", dict(d_losses=Dense(3), x=Dense(3, 8), w=Dense(8, 4), labels=typed("int32", 3),
                                    logits=typed("float32", 3, 4), log_sums=typed("float32", 3)),
     "d_losses is torch.float16; it has to be torch.float32"),
    ("clifford", dict(x=Dense(4, 2, 4), y=Dense(4, 2, 4), w=Dense(4, 20)), "x is torch.float16"),
    ("diffusion", dict(x=Dense(8), basis=Dense(8, 8), mass=Dense(8), evalues=Dense(8), times=Dense(8)),
     r"x has the shape \(8,\); it has to have 2 or 3 dimensions"),
    ("diffusion", dict(x=Dense(9, 8), basis=Dense(1, 9, 8), mass=Dense(9), evalues=Dense(8), times=Dense(8)),
     r"basis has the shape \(1, 9, 8\); it has to have 2 dimensions"),
    ("diffusion_ragged", dict(x=Dense(9, 8), basis=Dense(9, 8), mass=Dense(9), evalues=Dense(2, 8), times=Dense(8),
                              offsets=typed("int32", 4)),
     "offsets has 4 elements; of 2 meshes it has to have one more"),
    ("diffusion_ragged", dict(x=Dense(9, 8), basis=Dense(9, 8), mass=Dense(9), evalues=Dense(2, 8), times=Dense(8),
                              offsets=typed("int64", 3)), "offsets is torch.int64; it has to be torch.int32"),
    ("gradient_features_ragged", dict(x=Dense(2, 8, 8), gr=Dense(9, 8), gi=Dense(8, 8), lr=Dense(8, 8), li=Dense(8, 8),
                                      offsets=typed("int32", 3)),
     r"gi has the shape \(8, 8\); it has to be \(9, 8\)"),
    # Numbers that are 0 in a description are others that it leaves out: of these the library would say less.
    ("product", dict(a=Dense(0, 8, 8), b=Dense(0, 8, 8)),
     r"a has the shape \(0, 8, 8\); each dimension has to have at least 1 element"),
    ("gradient_features", dict(x=Dense(0, 8, 8), gr=Dense(0, 9, 8), gi=Dense(0, 9, 8), lr=Dense(8, 8), li=Dense(8, 8)),
     r"x has the shape \(0, 8, 8\); each dimension"),
    ("gating_two", dict(x=Dense(3, 8), y=Dense(3, 0), w1=Dense(8, 4), w2=Dense(0, 4), b1=None, b2=None),
     r"y has the shape \(3, 0\); each dimension"),
])
def test_operands_that_do_not_fit(name, operands, words):
    row = OPERATORS[name]
    with pytest.raises(ValueError, match=words):
        row.check(operands, {each: default for each, (_, default) in row.numbers.items()})


@pytest.mark.parametrize("math", ["fp32", "tf32", "tf32x3"])
def test_types_and_meshes_of_a_diffusion_and_of_features(math):
    """meshes are a dimension more, or, where they differ in their sizes, those of evalues or of the spectrum."""
    single = functools.partial(typed, "float32")
    wanted = {"fp32": fused_kernels.FK_FLOAT32, "tf32": fused_kernels.FK_TF32, "tf32x3": fused_kernels.FK_TF32X3}[math]

    def described(name, *operands):
        row = OPERATORS[name]
        of = row.describe(row.check(dict(zip(row.operands, operands)), dict(math=math))[1], {})
        return of.type, of.meshes, of.vertices, of.eigen, of.width

    assert described("diffusion", single(9, 8), single(9, 5), single(9), single(5), single(8)) == (wanted, 1, 9, 5, 8)
    assert described("diffusion", single(3, 9, 8), single(3, 9, 5), single(3, 9), single(3, 5), single(8)) == (
        wanted, 3, 9, 5, 8)
    assert described("diffusion_ragged", single(9, 8), single(9, 5), single(9), single(2, 5), single(8),
                     typed("int32", 3)) == (wanted, 2, 9, 5, 8)
    weights = single(8, 8), single(8, 8)
    assert described("gradient_features", single(5, 8), single(9, 5), single(9, 5), *weights) == (wanted, 1, 9, 5, 8)
    assert described("gradient_features", single(3, 5, 8), single(3, 9, 5), single(3, 9, 5), *weights) == (
        wanted, 3, 9, 5, 8)
    assert described("gradient_features_ragged", single(2, 5, 8), single(9, 5), single(9, 5), *weights,
                     typed("int32", 3)) == (wanted, 2, 9, 5, 8)


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_backward"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("labels", ["int64", "int32"])
def test_types_of_a_cross_entropy(name, dtype, labels):
    """Losses, logits and log_sums are fp32 beside operands of any type."""
    row, single = OPERATORS[name], functools.partial(typed, "float32")
    operands = dict(d_losses=single(3), x=typed(dtype, 3, 8), w=typed(dtype, 8, 4), labels=typed(labels, 3),
                    logits=single(3, 4), log_sums=single(3))
    _, fields = row.check({each: operands[each] for each in row.operands}, {})
    description = row.describe(fields, {})
    assert (description.type, description.label_type) == (
        getattr(fused_kernels, f"FK_{dtype.upper()}"), getattr(fused_kernels, f"FK_LABEL_{labels.upper()}"))
    assert [row.dtypes.get(each) for each in row.results if not each.startswith("d_")] == ["float32"] * (
        3 if name == "cross_entropy" else 0)


def test_a_gated_layer_is_planned_for_its_gate_its_math_and_its_biases(planned):
    """Once for each. What is NULL in C is None."""
    x = Operand()
    wanted = [("silu", "fp32", x), ("silu", "tf32", x), ("gelu", "tf32", x), ("gelu", "tf32", None)]
    for gate, math, bias in wanted * 2:
        run_of(OPERATORS["gating"])(x, x, x, bias, x, gate, math)
        run_of(OPERATORS["gating_backward"])(x, x, x, x, x, bias, gate, math)
    assert planned == [(gate, math) for gate, math, _ in wanted for _ in range(2)]


@pytest.mark.parametrize("numbers, words", [
    (dict(gate="swish", math="fp32"), "gate is 'swish'; it has to be 'sigmoid' or 'silu' or 'gelu' or"),
    (dict(gate="relu", math="tf32"), "math is 'tf32', but x is torch.float16; it has to be torch.float32"),
])
def test_a_gate_and_a_math_that_there_are_not(numbers, words):
    operands = dict(x=Dense(3, 8), w1=Dense(8, 4), w2=Dense(8, 4), b1=None, b2=None)
    with pytest.raises(ValueError, match=words):
        OPERATORS["gating"].check(operands, numbers)


def test_every_entry_point_is_called_with_shapes_in_turn():
    sys.path[:0] = [str(ROOT / "operators" / "tests" / folder) for folder in ("layouts", "gating")]
    modules = [*(f"test_library{of}" for of in ("", "_softmax", "_gradients", "_meshes", "_clifford")), "test_layouts",
               "test_two_inputs"]
    names = {f"fk_{kind.NAME}" for module in modules for kind, _ in importlib.import_module(module).IN_TURN}
    computing = {name.removesuffix("_forward") for name in fused_kernels.FUNCTIONS
                 if name.endswith(("_forward", "_backward"))}
    assert names == computing


def test_the_library_is_loaded(library):
    assert library.fk_version() == fused_kernels.FK_VERSION


def test_what_is_missing_is_said(tmp_path):
    program = PRINTS_THE_ERROR_OF.format("library()")
    path = tmp_path / "none.so"
    result = execute([sys.executable, "-c", program],
                     env={"FUSED_KERNELS_LIBRARY": str(path), "PYTHONPATH": str(BINDING)})
    assert result.rc == 0, result.stderr
    assert result.stdout.startswith(f"there is no {path}; build it with `scons library`")


@pytest.mark.parametrize("source, words", [
    ("raise ModuleNotFoundError('No module named torch', name='torch')", "need PyTorch, which is not installed"),
    ("__version__, library = '2.0', None", "need PyTorch 2.6 or newer; this is 2.0"),
])
def test_without_pytorch_its_functions_say_so(tmp_path, source, words):
    (tmp_path / "torch.py").write_text(f"{source}\n")
    program = PRINTS_THE_ERROR_OF.format("softmax(1, 2)")
    for each in (program, program.replace("softmax", "product"),
                 program.replace("softmax(1, 2)", "nn").replace("try:", "try:\n    import fused_kernels.nn")):
        result = execute([sys.executable, "-c", each], env={"PYTHONPATH": f"{tmp_path}:{BINDING}"})
        assert result.rc == 0, result.stderr
        assert words in result.stdout


def test_what_is_kept_of_an_inference_is_for_training_too(monkeypatch):
    """What PyTorch makes in torch.inference_mode() cannot be saved for gradients."""
    modes = [True]

    @contextlib.contextmanager
    def inference_mode(mode):
        modes.append(mode)
        yield
        modes.pop()

    monkeypatch.setattr(geometric, "torch", types.SimpleNamespace(
        inference_mode=inference_mode, tensor=lambda values, **of: (values, modes[-1])))
    geometric._kept.cache_clear()
    assert geometric._kept((1.0, -1.0), "float32", "cuda") == ((1.0, -1.0), False)
    geometric._kept.cache_clear()


# ---- Installed, and testing itself --------------------------------------------------------------------------------

NO_OTHER = {**NO_GPU, "FUSED_KERNELS_LIBRARY": "", "FUSED_KERNELS_CAPABILITY": "", "PYTHONPATH": ""}
# Of two functions one does nothing, and the other confuses its operands.
FAULTS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int fk_softmax_forward() { return 0; }
int fk_clifford_forward(void* of, void* x, void* y, void* w, void* out, void* workspace, size_t bytes, void* stream) {
  int (*right)(void*, void*, void*, void*, void*, void*, size_t, void*) = dlsym(RTLD_NEXT, "fk_clifford_forward");
  return right(of, y, x, w, out, workspace, bytes, stream);
}
"""


def self_test(python, folder, **environment):
    return execute([python, "-m", "fused_kernels"], cwd=folder, env={**NO_OTHER, **environment})


def verdicts(output):
    """{"fk_gating_forward": {"ok"}, ...}"""
    found = {}
    for name, step, verdict in re.findall(r"^(\w+) +(forward|backward) +\w+ +(\S+)", output, re.MULTILINE):
        found.setdefault(f"fk_{name}_{step}", set()).add(verdict)
    return found


def test_wheel_is_installed_and_tests_itself(library, tmp_path):
    """In a new environment, outside of the repository, and without a compiler: by nothing but the wheel."""
    if not importlib.util.find_spec("pip"):
        pytest.skip("there is no pip")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    built = execute([*pip, "wheel", ROOT, "--no-index", "--wheel-dir", tmp_path, "--config-settings", "cuda=no",
                     "--config-settings", "scons=no"])
    assert built.rc == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("fused_kernels-*.whl")
    python = tmp_path / "environment" / "bin" / "python"
    assert execute([sys.executable, "-m", "venv", "--without-pip", python.parents[1]]).rc == 0
    installed = execute([*pip, "--python", python, "install", "--no-index", wheel])
    assert installed.rc == 0, installed.stdout + installed.stderr
    result = self_test(python, tmp_path, PATH="")
    assert result.rc == 0, result.stdout + result.stderr
    version, path = re.match(r"fused_kernels (\d+), (.*)", result.stdout).groups()
    assert int(version) == fused_kernels.FK_VERSION and path.startswith(f"{python.parents[1]}/")
    page = (ROOT / "docs/library.md").read_text()
    (transcript,) = re.findall(r"<!-- transcript -->\n```\n\$ .*?\n(.*?)```", page, re.DOTALL)
    assert re.fullmatch(re.escape(transcript).replace(r"\.\.\.", ".*"), result.stdout, re.DOTALL)
    assert verdicts(result.stdout) == {name: {"ok"} for name in fused_kernels.FUNCTIONS
                                       if name.endswith(("_forward", "_backward"))}
    assert not re.search(r"NEEDED +lib(stdc\+\+|gcc)", execute(["objdump", "-p", path]).stdout)


@pytest.mark.parametrize("needed, newest, tag", [
    (["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"], ["2.2.5", "2.9", "2.28"], "manylinux_2_28"),
    (["libc.so.6"], ["2.2.5", "2.14"], "manylinux_2_17"),  # older than any of that name
    (["libc.so.6", "libstdc++.so.6"], ["2.28"], "linux"),
    ([], [], "linux"),  # where there is no objdump
])
def test_wheel_says_what_it_needs(monkeypatch, needed, newest, tag):
    make_wheel = importlib.import_module("make_wheel")
    said = [f"  NEEDED               {each}" for each in needed] + [f"    0x0 0x00 05 GLIBC_{each}" for each in newest]
    monkeypatch.setattr(make_wheel, "output_of", lambda *command: "\n".join(said))
    assert re.fullmatch(rf"{tag}_[^\d]\w+", make_wheel.platform_of(["library"]))


def test_faults_are_found(library, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    source, faulty = tmp_path / "faults.c", tmp_path / "faults.so"
    source.write_text(FAULTS)
    built = execute(["gcc", "-shared", "-fPIC", source, "-o", faulty, "-Wl,--no-as-needed", LIBRARY,
                     f"-Wl,-rpath,{LIBRARY.parent}", "-ldl"])
    assert built.rc == 0, built.stderr
    result = self_test(sys.executable, BINDING, FUSED_KERNELS_LIBRARY=str(faulty))
    assert result.rc == 1, result.stderr
    wrong = {name for name, verdict in verdicts(result.stdout).items() if verdict != {"ok"}}
    # The gradients of softmax are computed from its result.
    assert wrong == {"fk_softmax_forward", "fk_softmax_backward", "fk_clifford_forward"}
    assert re.search(r"^softmax +forward +fp32 +WRONG +nan ", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("is_there", [False, True])
def test_no_library_is_one_sentence(tmp_path, is_there):
    """Nor is a file that is none."""
    path = tmp_path / "none.so"
    if is_there:
        path.write_text("no library\n")
    result = self_test(sys.executable, BINDING, FUSED_KERNELS_LIBRARY=str(path))
    assert result.rc == 1 and result.stdout == ""
    assert re.fullmatch(rf"error: [^\n]*{re.escape(str(path))}[^\n]*\n", result.stderr)


def test_cpu_library_has_no_functions_of_tensors(library, monkeypatch):
    monkeypatch.setattr(binding, "library", lambda: library)
    monkeypatch.setenv("FUSED_KERNELS_LIBRARY", str(LIBRARY))
    with pytest.raises(RuntimeError, match="is the CPU's library, and tensors are on a GPU"):
        binding._Plan("fk_gating_forward", fused_kernels.fk_gating(), ())
