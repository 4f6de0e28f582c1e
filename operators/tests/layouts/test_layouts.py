"""Products of factors that lie transposed, of batches and with a bias, and the gradients of products, called as in
test_library.py."""

import ctypes
import math
import sys

from conftest import ROOT
import pytest

sys.path.insert(0, str(ROOT / "operators" / "tests"))
from test_library import (BAD_ALIGNMENT, BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, BYTES, FLOAT16, FLOAT32, OK, ROUNDING, TF32,
                          TF32X3, Call, call_at_the_same_time, call_in_turn, for_each, fused_kernels, in_turn, library,
                          near, numbers, packed, refuse_a_damaged_workspace, refuse_what_is_damaged, run_as_another_gpu,
                          unpacked)

TYPES = FLOAT16, BFLOAT16, FLOAT32, TF32, TF32X3


def turned(matrix):
    return [list(each) for each in zip(*matrix)]


def multiplied(a, b):
    """Exact in fp64: of small multiples of 1/8."""
    columns = turned(b)
    return [[math.fsum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


class Batch:
    """Matrices in memory: `between` elements from one to the next, and rows of `stride`."""

    def __init__(self, rows, cols, count, stride=0, between=None):
        self.rows, self.cols, self.count, self.stride = rows, cols, count, stride or cols
        self.between = rows * self.stride if between is None else between

    def places(self):
        """Of each element of each matrix, in their order."""
        return [[[m * self.between + row * self.stride + col for col in range(self.cols)] for row in range(self.rows)]
                for m in range(self.count)]

    def size(self):
        return (self.count - 1) * self.between + (self.rows - 1) * self.stride + self.cols

    def fill(self, matrices, kind):
        """The bytes, with NaN in gaps."""
        data = bytearray(b"\xff" * (BYTES[kind] * self.size()))
        for places, matrix in zip(self.places(), matrices):
            for to, row in zip(places, matrix):
                at = to[0] * BYTES[kind]
                data[at:at + self.cols * BYTES[kind]] = packed(row, kind)
        return bytes(data)

    def read(self, data, kind):
        """The matrices; what lies in gaps is NaN still."""
        values, own = unpacked(data, kind), self.places()
        taken = {place for matrix in own for row in matrix for place in row}
        assert all(math.isnan(value) for at, value in enumerate(values) if at not in taken)
        return [[[values[place] for place in row] for row in matrix] for matrix in own]


class Layouts(Call):
    Description = fused_kernels.fk_product

    def __init__(self, library, rows=21, cols=18, depth=13, type=FLOAT16, transposed="", batch=1, shared="",
                 strides=(0, 0, 0), between=(None, None, None), bias=True, without=(), seed=0):
        """transposed, shared: of "ab" those that lie transposed, and those that are one for all. between: how far
        matrices are apart; None: they are dense. without: results that are not wanted."""
        ta, tb = ("a" in transposed, "b" in transposed)
        between = [0 if name in shared else each for name, each in zip("abc", between)]
        self.places = {
            "a": Batch(*((depth, rows) if ta else (rows, depth)), batch, strides[0], between[0]),
            "b": Batch(*((cols, depth) if tb else (depth, cols)), batch, strides[1], between[1]),
            "c": Batch(rows, cols, batch, strides[2], between[2])}
        self.a = [[numbers(depth, seed + i + 5 * m * ("a" not in shared)) for i in range(rows)] for m in range(batch)]
        self.b = [[numbers(cols, seed + 3 * i + m * ("b" not in shared)) for i in range(depth)] for m in range(batch)]
        self.d_c = [[numbers(cols, seed + 2 * i + m) for i in range(rows)] for m in range(batch)]
        self.bias = numbers(cols, seed + 7) if bias else None
        self.lying = {"a": [*map(turned, self.a)] if ta else self.a, "b": [*map(turned, self.b)] if tb else self.b}
        description = self.Description(
            ctypes.sizeof(self.Description), type, rows, cols, depth, *strides, int(ta), int(tb), batch,
            *(0 if batch == 1 else self.places[name].between for name in "abc"))
        super().__init__(library, description, {name: content for name, content in self.operands(type).items()
                                                if name not in without})

    def operands(self, type):
        found = {name: self.places[name].fill(self.lying[name], type) for name in "ab"}
        if "bias" in self.NAMES and self.bias:
            found["bias"] = packed(self.bias, type)
        return found | {"c": b"\xff" * (BYTES[type] * self.places["c"].size())}

    def is_near(self, name, place, expected, far=0.0):
        """expected: matrices. They were exact but for the roundings of the result, `far` relative to its size."""
        kind = self.description.type
        rounding = 1.01 * ROUNDING.get(kind, 0) + far
        found = place.read(self.device[name].content(), kind)
        return all(near(row, wanted, [rounding * abs(each) + (2.0**-25 if kind == FLOAT16 else 0) for each in wanted])
                   for one, other in zip(found, expected) for row, wanted in zip(one, other))

    def result_is_right(self):
        expected = [multiplied(a, b) for a, b in zip(self.a, self.b)]
        kind, place = self.description.type, self.places["c"]
        bias = self.bias if "bias" in self.host else [0.0] * place.cols
        found = place.read(self.device["c"].content(), kind)
        rounding, least = 1.01 * ROUNDING.get(kind, 0), 2.0**-25 if kind == FLOAT16 else 0
        return all(near(row, [p + b for p, b in zip(products, bias)],
                        [rounding * (abs(p + b) + (abs(p) if "bias" in self.host else 0)) + least
                         for p, b in zip(products, bias)])
                   for one, other in zip(found, expected) for row, products in zip(one, other))


class ProductLayouts(Layouts):
    NAME, NAMES, WRITTEN = "product", ("a", "b", "c"), ("c",)


class ProductBias(Layouts):
    NAME, NAMES, WRITTEN, OPTIONAL = "product_bias", ("a", "b", "bias", "c"), ("c",), ("bias",)


class ProductBackward(Layouts):
    NAME, WRITTEN = "product_backward", ("d_a", "d_b", "d_bias")
    NAMES, OPTIONAL = ("d_c", "a", "b", *WRITTEN), WRITTEN

    @classmethod
    def functions(cls, library):
        return library.fk_product_backward_workspace, library.fk_product_backward

    def operands(self, type):
        self.gradients = {name: Batch(place.rows, place.cols, place.count) for name, place in self.places.items()}
        nan = {f"d_{name}": b"\xff" * (BYTES[type] * self.gradients[name].size()) for name in "ab"}
        return {"d_c": self.places["c"].fill(self.d_c, type),
                **{name: self.places[name].fill(self.lying[name], type) for name in "ab"}, **nan,
                "d_bias": b"\xff" * (BYTES[type] * self.places["c"].cols)}

    def result_is_right(self):
        of = self.description
        d_a = [multiplied(d, turned(b)) for d, b in zip(self.d_c, self.b)]
        d_b = [multiplied(turned(a), d) for a, d in zip(self.a, self.d_c)]
        expected = {"d_a": [*map(turned, d_a)] if of.transpose_a else d_a,
                    "d_b": [*map(turned, d_b)] if of.transpose_b else d_b,
                    "d_bias": [[[math.fsum(row[col] for d in self.d_c for row in d) for col in range(of.cols)]]]}
        places = {**{f"d_{name}": self.gradients[name] for name in "ab"}, "d_bias": Batch(1, of.cols, 1)}
        return all(self.is_near(name, places[name], expected[name]) for name in set(self.WRITTEN) & set(self.host))


KINDS = [ProductLayouts, ProductBias, ProductBackward]
LAYOUTS = [
    *(dict(transposed=transposed, type=type) for transposed in ("", "a", "b", "ab") for type in TYPES),
    *(dict(rows=40, cols=24, depth=16, transposed="b", type=type) for type in TYPES),  # whose rows are aligned
    dict(rows=1, cols=1, depth=1, transposed="ab"),
    dict(rows=70, cols=9, depth=65, transposed="a", type=FLOAT32),
    *(dict(transposed=transposed, strides=(24, 40, 32), type=type)
      for transposed in ("", "ab") for type in (FLOAT16, FLOAT32, TF32)),
    *(dict(batch=3, rows=rows, cols=cols, depth=depth, transposed=transposed, type=type)  # whose rows are aligned
      for transposed in ("a", "b", "ab") for type, rows, cols, depth in
      ((FLOAT16, 72, 88, 136), (BFLOAT16, 40, 24, 16))),
    *(dict(batch=3, transposed=transposed, type=type) for transposed, type in zip(("", "a", "b", "ab", ""), TYPES)),
    *(dict(batch=3, shared="b", transposed=transposed, type=type)  # one product, if a lies below itself
      for transposed, type in (("", FLOAT16), ("a", TF32), ("b", BFLOAT16), ("", FLOAT32), ("b", FLOAT32))),
    dict(batch=2, shared="a"), dict(batch=2, shared="ab", type=TF32X3),
    dict(batch=5, rows=1, cols=3, depth=2, type=FLOAT32), dict(batch=4, rows=3, cols=1, depth=1, type=BFLOAT16),
    dict(batch=2, rows=8, cols=16, depth=24, strides=(32, 24, 32), between=(400, 800, 480)),
    dict(batch=2, rows=8, cols=16, depth=24, strides=(48, 0, 32), between=(24, None, 16)),  # side by side
]
CALLS = [(kind, options) for kind in KINDS for options in LAYOUTS] + [
    *((ProductBias, dict(bias=False, type=type)) for type in (FLOAT16, FLOAT32)),
    *((ProductBias, dict(rows=300, cols=cols, depth=3, type=type)) for cols in (40, 41) for type in (BFLOAT16, TF32)),
    *((ProductBias, dict(batch=2, rows=20, cols=24, depth=4100, type=type)) for type in (FLOAT16, TF32)),  # in turn
    *((ProductBackward, dict(without=without)) for without in (("d_a",), ("d_b", "d_bias"), ("d_a", "d_b", "d_bias"))),
    (ProductBackward, dict(rows=700, cols=9, depth=3)),
]
IN_TURN = [(kind, [dict(rows=30, transposed="a", type=type), dict(rows=3, cols=8, depth=8, type=type),
                   dict(batch=2, rows=9, cols=40, transposed="b", type=type)])
           for kind in (ProductBias, ProductBackward) for type in (FLOAT16, FLOAT32, TF32)]


@for_each(CALLS, [])
def test_result(library, kind, options):
    kind(library, **options).run_twice()


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


ANYWHERE = """
import sys
sys.path.insert(0, "layouts")
from test_layouts import CALLS, FLOAT32, LAYOUTS, KINDS
old = {old}
for kind, options in CALLS:
    if not old or options.get("type") == FLOAT32:
        run(kind, **options)
print(len(ways))
"""


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "12.0"])
def test_results_on_other_gpus(capability):
    old = capability == "7.5"
    said = run_as_another_gpu(capability, ANYWHERE.format(old=old))
    assert int(said) == sum(not old or options.get("type") == FLOAT32 for _, options in CALLS)


def test_an_older_struct_is_one_product_that_is_not_transposed(library):
    """As callers have it that were compiled before there were layouts."""
    call = ProductLayouts(library)
    call.description.size = 64
    call.description.transpose_a = call.description.batch = 77  # which such a caller does not have
    call.run_twice()


def test_a_batch_of_one_has_no_strides(library):
    call = ProductLayouts(library)
    call.description.batch, call.description.a_batch_stride, call.description.c_batch_stride = 1, -7, 3
    call.run_twice()


def test_what_becomes_of_a_batch_is_said(library):
    """With one right factor it is one product; small products are computed at once, and long sums in turn."""
    for options, ends in (
            (dict(batch=3, shared="b"), ""), (dict(batch=3), "; 3 at once"),
            (dict(batch=3, transposed="b"), "; b transposed before; 3 at once"),
            (dict(batch=2, rows=20, cols=24, depth=4100, transposed="a"), "; a transposed before; 2 in turn")):
        call = ProductLayouts(library, type=TF32, **options)
        call.run_twice()
        said = library.fk_last_way().decode()
        assert said.endswith(ends) and (ends != "" or "at once" not in said and "in turn" not in said)


def test_hopper_reads_a_transposed_factor_as_it_lies(library):
    """In the types of 2 bytes, where one of the factors is transposed; and it adds the bias."""
    for transposed, ends in (("a", "; a as it lies, transposed"), ("b", "; b as it lies, transposed"),
                             ("ab", "; a transposed before; b transposed before; bias added after")):
        call = ProductBias(library, rows=72, cols=136, depth=40, transposed=transposed)
        call.run_twice()
        assert library.fk_last_way().decode().endswith(ends)


@pytest.fixture
def tuning(library):
    assert library.fk_tune(1) == OK
    yield
    assert library.fk_tune(0) == OK


@pytest.mark.parametrize("kind", KINDS)
def test_ways_are_tried(library, tuning, kind):
    call = kind(library, rows=73, cols=24, transposed="b", batch=2)
    call.run_twice()
    way = library.fk_last_way()
    assert library.fk_tune(0) == OK
    kind(library, rows=73, cols=24, transposed="b", batch=2).run_twice()
    assert library.fk_last_way() == way


WRONG = [
    *((dict(transpose_a=value), BAD_ARGUMENT) for value in (-1, 2)), (dict(transpose_b=2), BAD_ARGUMENT),
    *((dict(batch=value), BAD_SHAPE) for value in (-1, (1 << 20) + 1)),
    (dict(c_batch_stride=0), BAD_SHAPE), (dict(c_batch_stride=376), BAD_SHAPE),
    (dict(a_batch_stride=-8), BAD_SHAPE), (dict(b_batch_stride=1 << 41), BAD_SHAPE),
    (dict(a_batch_stride=29), BAD_ALIGNMENT), (dict(c_batch_stride=500), BAD_ALIGNMENT),
    (dict(c_stride=32, c_batch_stride=16), BAD_SHAPE),
    (dict(transpose_a=1, a_stride=16), BAD_SHAPE),  # which is less than its rows
    (dict(type=0), BAD_ARGUMENT), (dict(rows=0), BAD_SHAPE),
    (dict(batch=1 << 20, rows=1 << 26, a_batch_stride=0, c_batch_stride=1 << 40, a_stride=1 << 30), BAD_SHAPE),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    too_large = [(dict(batch=1, depth=(1 << 26) + 1), BAD_SHAPE)] if kind is ProductBackward else []
    two = dict(batch=2, a_batch_stride=273, b_batch_stride=234, c_batch_stride=378)
    refuse_what_is_damaged(library, kind, [
        ({field: value for field, value in two.items() if field not in changes} | changes, code)
        for changes, code in WRONG + too_large])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library, transposed="a"))
