"""The library's gated layer of two inputs and its gradients, called as in test_library.py."""

import ctypes
import math
import sys

from conftest import ROOT
import pytest

sys.path.insert(0, str(ROOT / "operators" / "tests"))
from test_library import (BAD_ALIGNMENT, BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, BYTES, FLOAT16, FLOAT32, GATES, ROUNDING,
                          TF32, TF32X3, Call, any_numbers, call_at_the_same_time, call_in_turn, for_each, fused_kernels,
                          in_turn, library, near, numbers, packed, refuse_a_damaged_workspace, refuse_what_is_damaged,
                          run_as_another_gpu, strided, sums_of)
from test_library_gradients import FACTOR, FP32, LEAST, added_up, flat, gated_gradients_are_near

TYPES = (FLOAT16, BFLOAT16, FLOAT32, TF32, TF32X3)
BIASES = "b1", "b2"


def function_of_values(of):
    """(function, slope, the most that the slope is, and that of the slope is) of the values."""
    return GATES[of.gate] if of.gated_values else (lambda v: v, lambda v: 1.0, 1, 0)


class GatedTwo(Call):
    NAME, NAMES, WRITTEN = "gating_two", ("x", "y", "w1", "w2", "b1", "b2", "out"), ("out",)
    OPTIONAL, KEPT = BIASES, ()
    Description = fused_kernels.fk_gating

    def __init__(self, library, rows=70, inputs=24, values=0, hidden=40, x_stride=0, y_stride=0, out_stride=0,
                 type=FLOAT16, gate=0, gated=0, biases=BIASES, exact=True, seed=0):
        """values: value_inputs. exact: as of Gated."""
        self.exact, draw, cols = exact, numbers if exact else any_numbers, values or inputs
        self.x = [draw(inputs, seed + i) for i in range(rows)]
        self.y = [draw(cols, seed + 5 * i + 1) for i in range(rows)]
        self.w1, self.w2 = (numbers(count * hidden, seed + i, 0.5) if exact else draw(count * hidden, seed + i)
                            for i, count in ((1, inputs), (2, cols)))
        self.b1, self.b2 = (draw(hidden, seed + i) if f"b{i - 2}" in biases else None for i in (3, 4))
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, hidden, x_stride,
                                       out_stride, gate, values, y_stride, gated)
        super().__init__(library, description, {
            "x": strided(self.x, type, x_stride or inputs), "y": strided(self.y, type, y_stride or cols),
            **{name: packed(getattr(self, name), type) for name in ("w1", "w2", *biases)},
            "out": b"\xff" * len(strided([[math.nan] * hidden] * rows, type, out_stride or hidden)),
            **{name: b"\xff" * (BYTES[type] * rows * hidden) for name in self.KEPT}})

    def far(self, depth):
        """What a product's sums are off by, as the header has it."""
        return 0 if self.exact else {FLOAT32: depth * 2.0**-24, TF32: 2.0**-10 + depth * 2.0**-25,
                                     TF32X3: 2.0**-18 + depth * 2.0**-29}[self.description.type]

    def result_is_right(self):
        of = self.description
        gate, _, steepest, _ = GATES[of.gate]
        function, _, steepest_of_values, _ = function_of_values(of)
        expected, bound = [], []
        for x, y in zip(self.x, self.y):
            for col in range(of.hidden):
                s, size_s = sums_of(x, self.w1, self.b1, col, of.hidden)
                v, size_v = sums_of(y, self.w2, self.b2, col, of.hidden)
                far_s, far_v = steepest * self.far(len(x)) * size_s, steepest_of_values * self.far(len(y)) * size_v
                left, right = gate(s), function(v)
                if BYTES[of.type] == 2:  # as of the gated layer with one input; the values may have a gate, too
                    own, least = 2.0**-15 if of.gate == 2 else 0, 2.0**-25 if of.type == FLOAT16 else 0
                    off = ((1.01 * ROUNDING[of.type] + own) * abs(left * right)
                           + 2.0**-27 * (abs(right) + of.gated_values * (abs(left) + 1)) + least)
                else:
                    off = 2.0**-19 * abs(left * right) + 2.0**-21 * (abs(right) + of.gated_values * (abs(left) + 1))
                expected.append(left * right)
                bound.append(off + far_s * (abs(right) + far_v) + abs(left) * far_v)
        return near(self.found("out", of.type, of.rows, of.hidden, of.out_stride), expected, bound)


class GatedTwoKept(GatedTwo):
    """In types of 2 bytes sums may be rounded before their gates, and GELU's Phi is wrong by 2^-17."""
    NAME, KEPT = "gating_two_kept", ("s_slopes", "v_slopes")
    NAMES, WRITTEN = (*GatedTwo.NAMES, *KEPT), ("out", *KEPT)

    def result_is_right(self):
        of, halves = self.description, BYTES[self.description.type] == 2
        gate, slope, steepest, bend = GATES[of.gate]
        function, slope_of_values, steepest_of_values, bend_of_values = function_of_values(of)
        factor, least = FACTOR[of.type], LEAST if of.type == FLOAT16 else 0
        own = FP32 + (2.0**-15 if halves and of.gate == 2 else 0)
        expected, bounds = {name: [] for name in self.WRITTEN}, {name: [] for name in self.WRITTEN}

        def side(row, weights, bias, col):
            plain, size = sums_of(row, weights, None, col, of.hidden)
            return plain + (bias[col] if bias else 0), factor * abs(plain) + least if halves else (
                self.far(len(row)) * size)

        def add(name, one, far_one, other, far_other):
            expected[name].append(one * other)
            bounds[name].append((ROUNDING.get(of.type, 2.0**-24) * 1.01 + FP32) * abs(one * other) + least
                                + (abs(one) + far_one) * far_other + abs(other) * far_one)

        for x, y in zip(self.x, self.y):
            for col in range(of.hidden):
                (s, off_s), (v, off_v) = side(x, self.w1, self.b1, col), side(y, self.w2, self.b2, col)
                left, right = (gate(s), steepest * off_s + own * (1 + abs(s))), (
                    function(v), steepest_of_values * off_v + own * (1 + abs(v)) * of.gated_values + FP32 * abs(v))
                # How far a slope may be off: where ReLU bends it is 0 or 1.
                add("out", *left, *right)
                add("s_slopes", slope(s), bend * off_s + (of.gate == 4 and abs(s) <= off_s) + own, *right)
                add("v_slopes", *left, slope_of_values(v),
                    (bend_of_values * off_v + (of.gate == 4 and abs(v) <= off_v) + own) * of.gated_values)
        return all(near(self.found(name, of.type, of.rows, of.hidden, of.out_stride if name == "out" else 0),
                        expected[name], bounds[name]) for name in self.WRITTEN)


class GatedTwoBackward(Call):
    NAME, Description = "gating_two_backward", fused_kernels.fk_gating
    WRITTEN = "d_x", "d_y", "d_w1", "d_w2", "d_b1", "d_b2"
    NAMES = ("d_out", "x", "y", "w1", "w2", "b1", "b2", *WRITTEN)
    OPTIONAL = *BIASES, "d_b1", "d_b2"

    def __init__(self, library, rows=30, inputs=24, values=0, hidden=40, x_stride=0, y_stride=0, out_stride=0,
                 type=FLOAT16, gate=0, gated=0, biases=OPTIONAL, seed=0):
        cols = values or inputs
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.y = [numbers(cols, seed + 5 * i + 1) for i in range(rows)]
        self.d_out = [numbers(hidden, seed + 2 * i) for i in range(rows)]
        self.w1, self.w2 = ([numbers(hidden, seed + i + j, 0.5) for i in range(count)]
                            for j, count in ((1, inputs), (2, cols)))
        self.b1, self.b2 = (numbers(hidden, seed + i) if f"b{i - 2}" in biases else [0.0] * hidden for i in (3, 4))
        counts = rows * inputs, rows * cols, inputs * hidden, cols * hidden, hidden, hidden
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, hidden, x_stride,
                                       out_stride, gate, values, y_stride, gated)
        operands = {
            "d_out": strided(self.d_out, type, out_stride or hidden), "x": strided(self.x, type, x_stride or inputs),
            "y": strided(self.y, type, y_stride or cols),
            **{name: packed(flat(getattr(self, name)), type) for name in ("w1", "w2")},
            **{name: packed(getattr(self, name), type) for name in BIASES},
            **{name: b"\xff" * (BYTES[type] * count) for name, count in zip(self.WRITTEN, counts)}}
        operands |= self.kept(rows, hidden, type, seed)
        super().__init__(library, description, {name: content for name, content in operands.items()
                                                if name not in self.OPTIONAL or name in biases})

    def kept(self, rows, hidden, type, seed):
        """What forward has kept, if it is read."""
        return {}

    @classmethod
    def functions(cls, library):
        return getattr(library, f"fk_{cls.NAME}_workspace"), getattr(library, f"fk_{cls.NAME}")

    def gate_gradients(self):
        """d_s and d_v, and how far they are off."""
        of = self.description
        gate, slope, steepest, bend = GATES[of.gate]
        function, slope_of_values, steepest_of_values, bend_of_values = function_of_values(of)
        factor, least = FACTOR[of.type], LEAST if of.type == FLOAT16 else 0

        def side(row, weights, bias, col):
            """A sum, and how far it is off; in types of 2 bytes it is rounded before the bias."""
            plain = sum(a * w[col] for a, w in zip(row, weights))
            return plain + bias[col], factor * abs(plain) + least if BYTES[of.type] == 2 else 0

        d_s, d_v, far_s, far_v = [], [], [], []
        for x, y, d_row in zip(self.x, self.y, self.d_out):
            rows = [[] for _ in range(4)]
            for col, d in enumerate(d_row):
                (s, off_s), (v, off_v) = side(x, self.w1, self.b1, col), side(y, self.w2, self.b2, col)
                left, right, at_s, at_v = gate(s), function(v), slope(s), slope_of_values(v)
                off_left, off_right = steepest * off_s + FP32, steepest_of_values * off_v + FP32 * of.gated_values
                # How far a slope may be off: where ReLU bends it is 0 or 1.
                off_at_s = bend * off_s + (of.gate == 4 and abs(s) <= off_s) + FP32
                off_at_v = (bend_of_values * off_v + (of.gate == 4 and abs(v) <= off_v) + FP32) * of.gated_values
                rows[0].append(d * right * at_s)
                rows[1].append(d * left * at_v)
                rows[2].append(abs(d) * ((abs(right) + off_right) * off_at_s + abs(at_s) * off_right)
                               + (factor + FP32) * abs(d * right * at_s) + least)
                rows[3].append(abs(d) * ((abs(left) + off_left) * off_at_v + abs(at_v) * off_left)
                               + (factor + FP32) * abs(d * left * at_v) + least)
            for to, row in zip((d_s, d_v, far_s, far_v), rows):
                to.append(row)
        return d_s, d_v, far_s, far_v

    def result_is_right(self):
        d_s, d_v, far_s, far_v = self.gate_gradients()
        ones = [[1.0] for _ in self.x]
        expected = {"d_w1": added_up(d_s, self.x, far_s, "columns"), "d_w2": added_up(d_v, self.y, far_v, "columns"),
                    "d_b1": added_up(d_s, ones, far_s, "columns"), "d_b2": added_up(d_v, ones, far_v, "columns"),
                    "d_x": added_up(d_s, self.w1, far_s, "rows"), "d_y": added_up(d_v, self.w2, far_v, "rows")}
        return gated_gradients_are_near(self, expected)


class GatedTwoKeptBackward(GatedTwoBackward):
    """The slopes are any numbers."""
    NAME = "gating_two_kept_backward"
    NAMES = (*GatedTwoBackward.NAMES[:7], "s_slopes", "v_slopes", *GatedTwoBackward.WRITTEN)

    def kept(self, rows, hidden, type, seed):
        self.slopes = [[numbers(hidden, seed + 7 * i + j, 0.5) for i in range(rows)] for j in (0, 3)]
        return {name: packed(flat(each), type) for name, each in zip(("s_slopes", "v_slopes"), self.slopes)}

    def gate_gradients(self):
        of, found, far = self.description, [], []
        factor, least = FACTOR[of.type], LEAST if of.type == FLOAT16 else 0
        for slopes in self.slopes:
            found.append([[d * slope for d, slope in zip(*rows)] for rows in zip(self.d_out, slopes)])
            far.append([[factor * abs(d) + least for d in row] for row in found[-1]])
        return *found, *far


KINDS = GatedTwo, GatedTwoKept, GatedTwoBackward, GatedTwoKeptBackward
# In each type, of each gate, of one or of both; depths below a step, at it and beyond, of one input or of both; rows
# that are aligned and not, or apart; without biases or their gradients.
CALLS = [
    *((of, dict(rows=40, values=16, gate=gate, gated=gated, type=kind)) for of in (GatedTwo, GatedTwoKept)
      for gate in GATES for gated in (0, 1) for kind in TYPES),
    *((GatedTwoBackward, dict(rows=20, values=16, gate=gate, gated=gated, type=kind))
      for gate in GATES for gated in (0, 1) for kind in TYPES),
    *((kind, dict(rows=33, inputs=inputs, values=values, hidden=hidden, gate=1, gated=1, type=type))
      for kind in KINDS for type in (FLOAT16, BFLOAT16, TF32)
      for inputs, values, hidden in ((7, 13, 9), (65, 8, 70), (8, 65, 70), (64, 128, 24), (13, 0, 66))),
    *((kind, dict(rows=21, inputs=13, values=10, hidden=70, x_stride=16, y_stride=24, out_stride=88, gate=1, type=type))
      for kind in KINDS for type in TYPES),
    *((kind, dict(rows=9, inputs=8, values=24, hidden=hidden, biases=biases, type=type))
      for kind in KINDS for hidden in (7, 8) for type in (FLOAT16, FLOAT32) for biases in ((), ("b1",), ("b2",))),
    *((kind, dict(rows=1, inputs=1, values=1, hidden=1, type=type)) for kind in KINDS for type in TYPES),
    *((kind, dict(rows=20, inputs=33, values=70, hidden=30, exact=False, gate=1, gated=gated, type=type))
      for kind in KINDS[:2] for gated in (0, 1) for type in (FLOAT32, TF32, TF32X3)),
    (GatedTwo, dict(rows=8, inputs=1100, values=600, hidden=8)),  # both products in slices
    # Gates between the products of as many values as they take; and of fewer; whole tiles of weights.
    (GatedTwoKept, dict(rows=140, inputs=72, values=264, hidden=136, gate=2, gated=1, type=BFLOAT16)),
    (GatedTwoKeptBackward, dict(rows=140, inputs=72, values=264, hidden=136, type=BFLOAT16)),
    *((kind, dict(rows=700, inputs=16, values=8, hidden=hidden, type=BFLOAT16))  # weights from slices
      for kind in KINDS[2:] for hidden in (9, 16)),
]
SLOW = [
    *((kind, dict(rows=300, inputs=72, values=200, hidden=264, gate=1, gated=1, type=type))
      for kind in KINDS[:2] for type in TYPES),
    *((kind, dict(rows=300, inputs=64, values=40, hidden=72)) for kind in KINDS[2:]),
]


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


@pytest.mark.parametrize("capability", ["8.0", "8.6", "12.0"])
def test_results_on_other_gpus(capability):
    said = run_as_another_gpu(capability, """
import sys
sys.path.insert(0, "gating")
from test_two_inputs import BFLOAT16, FLOAT16, FLOAT32, KINDS, TF32
for kind in KINDS:
    for type in (FLOAT16, BFLOAT16, FLOAT32, TF32):
        run(kind, rows=70, inputs=33, values=70, hidden=40, gate=1, gated=1, type=type)
        run(kind, rows=21, inputs=13, values=10, hidden=70, x_stride=16, y_stride=24, out_stride=88, type=type)
    run(kind, rows=1, inputs=1, values=1, hidden=1)
run(KINDS[0], rows=150, inputs=72, values=8, hidden=136, gate=2)
print(sum("two inputs; mma.sync" in way for way in ways))
""")
    assert int(said) == 6


IN_TURN = [(kind, [dict(rows=40, inputs=136, values=72, hidden=70, type=type, gate=1, gated=1),
                   dict(rows=5, inputs=8, values=8, hidden=8, type=type), dict(rows=60, inputs=40, type=type)])
           for kind in KINDS for type in (FLOAT16, TF32)]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


WRONG = dict.fromkeys(KINDS, [
    *((dict(rows=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1)),
    *((dict(inputs=value), BAD_SHAPE) for value in (0, -5, 1 << 30, 1 << 40)),
    *((dict(value_inputs=value), BAD_SHAPE) for value in (-1, 1 << 30, 1 << 40)),
    *((dict(value_stride=value), BAD_SHAPE) for value in (-8, 8, 1 << 40)), (dict(value_stride=26), BAD_ALIGNMENT),
    *((dict(gated_values=value), BAD_ARGUMENT) for value in (-1, 2)),
    (dict(type=0), BAD_ARGUMENT), (dict(gate=6), BAD_ARGUMENT), (dict(type=FLOAT32, value_inputs=1 << 25), BAD_SHAPE),
])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
