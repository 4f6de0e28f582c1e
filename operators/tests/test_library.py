"""The library as another program calls it: through ctypes alone, built for the CPU backend."""

import concurrent.futures
import ctypes
import math
import os
import random
import re
import shutil
import signal
import struct
import sys
import threading

from conftest import CPU_BUILD, CUDA_BUILD, NO_GPU, ROOT, execute
import pytest

sys.path.insert(0, str(ROOT / "docs"))
sys.path.insert(0, str(ROOT / "operators" / "python"))
import functions
import fused_kernels
from fused_kernels import (FK_BAD_ALIGNMENT as BAD_ALIGNMENT, FK_BAD_ARGUMENT as BAD_ARGUMENT,
                           FK_BAD_DEVICE as BAD_DEVICE, FK_BAD_SHAPE as BAD_SHAPE,
                           FK_BAD_WORKSPACE as BAD_WORKSPACE, FK_BFLOAT16 as BFLOAT16, FK_FLOAT16 as FLOAT16,
                           FK_FLOAT32 as FLOAT32, FK_OK as OK, FK_OVERLAP as OVERLAP, FK_TF32 as TF32,
                           FK_TF32X3 as TF32X3, fk_attention, fk_gating, fk_product, fk_strides as Strides)

LIBRARY = CPU_BUILD / "libfused_kernels.so"
HEADER = ROOT / "operators" / "include"
BINDING = ROOT / "operators" / "python"
GUARD, POISON = 256, 0xAB  # bytes before and after each operand, and what is there
SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p
BYTES = {FLOAT16: 2, BFLOAT16: 2, FLOAT32: 4, TF32: 4, TF32X3: 4}
ROUNDING = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}  # unit roundoff


@pytest.fixture(scope="module")
def library():
    if not LIBRARY.exists():
        pytest.skip("scons library has not been run")
    return loaded_library()


def loaded_library():
    loaded = fused_kernels.load(LIBRARY)
    loaded.cudaMalloc.argtypes = [POINTER, SIZE]
    loaded.cudaFree.argtypes = [POINTER]
    loaded.cudaMemcpy.argtypes = [POINTER, POINTER, SIZE, ctypes.c_int]
    loaded.cudaMemset.argtypes = [POINTER, ctypes.c_int, SIZE]
    loaded.cudaStreamCreate.argtypes = loaded.cudaStreamSynchronize.argtypes = [POINTER]
    return loaded


class Buffer:
    """Bytes on the device between two guards."""

    def __init__(self, library, content):
        self.library, self.bytes, self.start = library, len(content), POINTER()
        whole = bytes([POISON]) * GUARD + content + bytes([POISON]) * GUARD
        assert library.cudaMalloc(ctypes.byref(self.start), len(whole)) == 0
        assert library.cudaMemcpy(self.start, whole, len(whole), 1) == 0
        self.at = self.start.value + GUARD

    def all(self):
        whole = ctypes.create_string_buffer(self.bytes + 2 * GUARD)
        assert self.library.cudaMemcpy(whole, self.start, len(whole), 2) == 0
        return whole.raw

    def content(self):
        """What is between the guards, which are as they were."""
        whole = self.all()
        assert set(whole[:GUARD]) | set(whole[-GUARD:]) == {POISON}
        return whole[GUARD:-GUARD]

    def free(self):
        self.library.cudaFree(self.start)


def numbers(count, seed, scale=1.0):
    """Multiples of scale / 8 that each type holds."""
    return [scale * ((i * 37 + i // 11 * 5 + 13 * seed) % 17 - 8) / 8 for i in range(count)]


def any_numbers(count, seed):
    """Numbers of fp32, of all 24 bits."""
    draw = random.Random(seed).uniform
    return struct.unpack(f"{count}f", struct.pack(f"{count}f", *(draw(-1, 1) for _ in range(count))))


def packed(values, kind):
    if kind == BFLOAT16:  # these numbers end in zeros
        floats = struct.pack(f"{len(values)}f", *values)
        return b"".join(floats[i + 2:i + 4] for i in range(0, len(floats), 4))
    return struct.pack(f"{len(values)}{'e' if kind == FLOAT16 else 'f'}", *values)


def unpacked(data, kind):
    if kind == BFLOAT16:
        data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
    count = len(data) // (2 if kind == FLOAT16 else 4)
    return struct.unpack(f"{count}{'e' if kind == FLOAT16 else 'f'}", data)


def strided(rows, kind, stride):
    """Rows `stride` elements apart, NaN between them."""
    gap = b"\xff" * (BYTES[kind] * (stride - len(rows[0])))
    return gap.join(packed(row, kind) for row in rows)


def near(found, expected, bound):
    """Whether all of `found` are no further from what is expected than that; a NaN never is."""
    return len(found) == len(expected) and all(abs(f - e) <= b for f, e, b in zip(found, expected, bound))


class Call:
    """A call of the library: a description, and operands on the device. A kind of call has NAMES, those of
    its operands in the order of the function's arguments, and of them WRITTEN, and OPTIONAL ones, which may be
    NULL; a Description, its struct."""
    OPTIONAL = ()

    def __init__(self, library, description, operands):
        self.library, self.description, self.host = library, description, operands
        self.workspace_of, self.forward = self.functions(library)
        self.device = {name: Buffer(library, content) for name, content in operands.items()}
        needed = SIZE()
        assert self.workspace_of(ctypes.byref(description), ctypes.byref(needed)) == OK, library.fk_last_error()
        self.needed = needed.value
        self.device["workspace"] = Buffer(library, b"\xff" * max(self.needed, 1))  # NaN

    @classmethod
    def functions(cls, library):
        return getattr(library, f"fk_{cls.NAME}_workspace"), getattr(library, f"fk_{cls.NAME}_forward")

    def call(self, stream=None, **instead):
        at = {name: buffer.at for name, buffer in self.device.items()}
        at |= {"bytes": self.needed, "description": ctypes.byref(self.description)} | instead
        return self.forward(at["description"], *(at.get(name) for name in self.NAMES), at["workspace"],
                            at["bytes"], stream)

    def all(self):
        return {name: buffer.all() for name, buffer in self.device.items()}

    def found(self, name, kind, rows, cols, stride=0):
        """The rows of an output; what is between them is as it was."""
        data, unit, stride = self.device[name].content(), BYTES[kind], (stride or cols) * BYTES[kind]
        result = []
        for row in range(rows):
            result += unpacked(data[row * stride:row * stride + cols * unit], kind)
            assert set(data[row * stride + cols * unit:(row + 1) * stride]) <= {0xff}
        return result

    def is_right(self):
        for name in set(self.host) - set(self.WRITTEN):
            assert self.device[name].content() == self.host[name]
        self.device["workspace"].content()
        return self.result_is_right()

    def clear(self):
        """What is written, of NaN."""
        for name in set(self.WRITTEN) & set(self.device):
            self.library.cudaMemset(self.device[name].at, 0xff, self.device[name].bytes)

    def results(self):
        return [self.device[name].content() for name in self.WRITTEN if name in self.device]

    def run_twice(self):
        """The second time the workspace is as the first one has left it."""
        for _ in range(2):
            self.clear()
            assert self.call() == OK, self.library.fk_last_error()
            assert self.is_right()
        self.free()

    def free(self):
        for buffer in self.device.values():
            buffer.free()


def normal(s):
    """Phi(s), of the normal distribution."""
    return 0.5 * math.erfc(-s / math.sqrt(2))


def sigmoid(s):
    return 1 / (1 + math.exp(-s)) if s > -700 else 0.0


TANH, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715
# Of each fk_gate its value and its slope; and the most that its slope and the slope of that are.
GATES = {
    0: (sigmoid, lambda s: sigmoid(s) * sigmoid(-s), 0.25, 0.0963),
    1: (lambda s: s * sigmoid(s), lambda s: sigmoid(s) * (1 + s * sigmoid(-s)), 1.1, 0.5),
    2: (lambda s: s * normal(s), lambda s: normal(s) + s * math.exp(-s * s / 2) / math.sqrt(2 * math.pi), 1.13, 0.8),
    3: (lambda s: s * sigmoid(TANH * (s + CUBIC * s**3)),
        lambda s: (sigmoid(TANH * (s + CUBIC * s**3)) *
                   (1 + s * sigmoid(-TANH * (s + CUBIC * s**3)) * TANH * (1 + 3 * CUBIC * s * s))), 1.13, 0.8),
    4: (lambda s: max(s, 0.0), lambda s: float(s > 0), 1, 0),  # where it bends there is no slope
    5: (lambda s: s, lambda s: 1.0, 1, 0),
}


def sums_of(x, weights, bias, col, cols):
    """An element of x w + b, and the sum of its absolute products."""
    products = [a * b for a, b in zip(x, weights[col::cols])]
    return math.fsum(products) + (bias[col] if bias else 0), sum(map(abs, products))


class Gated(Call):
    NAME, NAMES, WRITTEN = "gating", ("x", "w1", "w2", "b1", "b2", "out"), ("out",)
    OPTIONAL = ("b1", "b2")
    Description = fk_gating

    def __init__(self, library, rows=70, inputs=24, hidden=40, x_stride=0, out_stride=0, type=FLOAT16, gate=0,
                 biases=("b1", "b2"), exact=True, seed=0):
        """biases: those that are not NULL. exact: of numbers whose products and sums are exact in each type; else any
        of fp32."""
        self.exact, draw = exact, numbers if exact else any_numbers
        self.x = [draw(inputs, seed + i) for i in range(rows)]
        self.w1, self.w2 = (numbers(inputs * hidden, seed + i, 0.5) if exact else draw(inputs * hidden, seed + i)
                            for i in (1, 2))
        self.b1, self.b2 = (draw(hidden, seed + i) if f"b{i - 2}" in biases else None for i in (3, 4))
        dense = {name: packed(getattr(self, name), type) for name in ("w1", "w2", *biases)}
        nan = [[math.nan] * hidden] * rows
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, hidden, x_stride,
                                       out_stride, gate)
        super().__init__(library, description, {
            "x": strided(self.x, type, x_stride or inputs), **dense,
            "out": b"\xff" * len(strided(nan, type, out_stride or hidden))})

    def result_is_right(self):
        of = self.description
        gate, _, steepest, _ = GATES[of.gate]
        # What a product's sums are off by, as the header has it.
        far = 0 if self.exact else {FLOAT32: of.inputs * 2.0**-24, TF32: 2.0**-10 + of.inputs * 2.0**-25,
                                    TF32X3: 2.0**-18 + of.inputs * 2.0**-29}[of.type]
        expected, bound = [], []
        for x in self.x:
            for col in range(of.hidden):
                (s, size_s), (v, size_v) = (sums_of(x, w, b, col, of.hidden)
                                            for w, b in ((self.w1, self.b1), (self.w2, self.b2)))
                far_s, far_v = far * size_s, far * size_v
                value = gate(s) * v
                if BYTES[of.type] == 2:
                    # Rounding; fp16 has nothing between multiples of 2^-24. The gate has some errors of fp32, and erf
                    # is wrong by 2^-17 of the gate and 2^-28.
                    own, least = 2.0**-16 if of.gate == 2 else 0, 2.0**-25 if of.type == FLOAT16 else 0
                    off = (1.01 * ROUNDING[of.type] + own) * abs(value) + 2.0**-27 * abs(v) + least
                else:  # some errors of fp32, of the result, and of a sigmoid that is at most 1
                    off = 2.0**-20 * abs(value) + 2.0**-21 * abs(v)
                expected.append(value)
                bound.append(off + steepest * far_s * (abs(v) + far_v) + abs(gate(s)) * far_v)
        return near(self.found("out", of.type, of.rows, of.hidden, of.out_stride), expected, bound)


class Product(Call):
    NAME, NAMES, WRITTEN = "product", ("a", "b", "c"), ("c",)
    Description = fk_product

    def __init__(self, library, rows=70, cols=40, depth=24, type=FLOAT16, a_stride=0, b_stride=0, c_stride=0, seed=0,
                 exact=True):
        """exact: of numbers whose products and sums are exact in each type; else any of fp32."""
        self.exact, draw = exact, numbers if exact else any_numbers
        self.a = [draw(depth, seed + i) for i in range(rows)]
        self.b = [draw(cols, seed + 3 * i) for i in range(depth)]
        nan = [[math.nan] * cols] * rows
        description = self.Description(ctypes.sizeof(self.Description), type, rows, cols, depth, a_stride, b_stride,
                                       c_stride)
        super().__init__(library, description, {
            "a": strided(self.a, type, a_stride or depth), "b": strided(self.b, type, b_stride or cols),
            "c": b"\xff" * len(strided(nan, type, c_stride or cols))})

    def result_is_right(self):
        of = self.description
        columns = list(zip(*self.b))
        pairs = [(row, column) for row in self.a for column in columns]
        expected = [math.fsum(a * b for a, b in zip(*pair)) for pair in pairs]
        if self.exact:  # but for the last rounding
            bound = [ROUNDING.get(of.type, 0) * abs(value) for value in expected]
        else:  # as the header has it
            error = {FLOAT32: of.depth * 2.0**-24, TF32: 2.0**-10 + of.depth * 2.0**-25,
                     TF32X3: 2.0**-18 + of.depth * 2.0**-29}[of.type]
            bound = [error * sum(abs(a * b) for a, b in zip(*pair)) for pair in pairs]
        return near(self.found("c", of.type, of.rows, of.cols, of.c_stride), expected, bound)


class Attention(Call):
    NAME, NAMES, WRITTEN = "attention", ("q", "k", "v", "out", "log_sums"), ("out", "log_sums")
    OPTIONAL = ("log_sums",)
    Description = fk_attention

    def __init__(self, library, batch=1, queries=20, keys=30, heads=2, kv_heads=1, width=16, causal=0, type=FLOAT16,
                 heads_first=False, log_sums=True, seed=0, large=0):
        """large: a number to which every other query has all its elements equal; and to which, or to half of which,
        the first and the middle third of the keys have. Within a third these queries' logits are equal."""
        self.heads_first = heads_first

        def strides(rows, of_heads):
            return Strides(rows * of_heads * width, width, rows * width) if heads_first else Strides(0, 0, 0)

        of_queries, of_keys = batch * queries * heads * width, batch * keys * kv_heads * width
        self.q, self.k, self.v = (numbers(count, seed + i) for i, count in enumerate((of_queries, of_keys, of_keys)))
        if large:
            assert not heads_first
            for values, row, count, levels in ((self.q, heads * width, 2, (large, 0)),
                                               (self.k, kv_heads * width, keys, (large, large / 2, 0))):
                for at in range(0, len(values), row):
                    level = levels[at // row % count * len(levels) // count]
                    if level:
                        values[at:at + row] = [level] * row
        operands = {name: packed(getattr(self, name), type) for name in ("q", "k", "v")}
        operands["out"] = b"\xff" * (2 * of_queries)
        if log_sums:
            operands["log_sums"] = b"\xff" * (4 * batch * queries * heads)
        description = self.Description(ctypes.sizeof(self.Description), type, causal, batch, queries, keys, heads,
                                       kv_heads, width, strides(queries, heads), strides(keys, kv_heads),
                                       strides(keys, kv_heads), strides(queries, heads), 0.5)
        super().__init__(library, description, operands)

    def place(self, batch, row, head, rows, heads):
        """Of the first element of a row of a tensor."""
        inner = (head * rows + row) if self.heads_first else (row * heads + head)
        return (batch * rows * heads + inner) * self.description.width

    def result_is_right(self):
        of = self.description
        out = self.found("out", of.type, 1, of.batch * of.queries * of.heads * of.width)
        log_sums = None
        if "log_sums" in self.host:
            log_sums = self.found("log_sums", FLOAT32, 1, of.batch * of.queries * of.heads)
        rounding = ROUNDING[of.type]
        for batch in range(of.batch):
            for head in range(of.heads):
                keys = [self.place(batch, t, head * of.kv_heads // of.heads, of.keys, of.kv_heads)
                        for t in range(of.keys)]
                for s in range(of.queries):
                    at = self.place(batch, s, head, of.queries, of.heads)
                    seen = keys[:max(0, s + of.keys - of.queries + 1)] if of.causal else keys
                    q = self.q[at:at + of.width]
                    logits = [0.5 * sum(a * b for a, b in zip(q, self.k[t:t + of.width])) for t in seen]
                    largest = max(logits, default=0)
                    weights = [math.exp(logit - largest) for logit in logits]
                    total = sum(weights)
                    expected, bound = [], []
                    for i in range(of.width):
                        parts = [w / total * self.v[t + i] for w, t in zip(weights, seen)]
                        expected.append(sum(parts))
                        # Exponentials are rounded to the type before the second product, and the result after
                        # it; fp32's own errors are some 2^-20 of the logits' size, at most 16 here. fp16 has
                        # nothing between multiples of 2^-24: what is below 2^-14 is rounded to them.
                        least = 2.0**-25 * (1 + sum(abs(self.v[t + i]) for t in seen)) if of.type == FLOAT16 else 0
                        bound.append((1.01 * rounding + 2.0**-16) * (sum(map(abs, parts)) + abs(sum(parts))) + least)
                    if not near(out[at:at + of.width], expected, bound):
                        return False
                    if log_sums:
                        found = log_sums[(batch * of.heads + head) * of.queries + s]
                        wanted = largest + math.log(total) if seen else -math.inf
                        if not (found == wanted or abs(found - wanted) <= 2.0**-16 * max(1, abs(wanted))):
                            return False
        return True


# ---- Right results ----------------------------------------------------------------------------------

BY_TENSOR_CORES = [  # of fp32
    *((Product, dict(rows=rows, cols=cols, depth=depth, type=kind, exact=exact))
      for kind in (TF32, TF32X3) for exact in (True, False)
      for rows, cols, depth in ((70, 40, 24), (1, 1, 1), (65, 9, 7), (33, 130, 65))),
    *((Product, dict(rows=40, cols=40, depth=1, type=kind, exact=False)) for kind in (TF32, TF32X3)),
    *((Product, dict(rows=21, cols=70, depth=13, type=kind, a_stride=16, b_stride=72, c_stride=76))
      for kind in (TF32, TF32X3)),
    *((Product, dict(rows=37, cols=131, depth=41, type=kind, b_stride=136, exact=False)) for kind in (TF32, TF32X3)),
    # Up to a depth of 1024 TF32X3 may be true fp32.
    *((Product, dict(rows=rows, cols=cols, depth=depth, type=TF32X3, exact=False))
      for rows, cols, depth in ((70, 40, 1032), (1, 1, 1027), (33, 130, 1025))),
    (Product, dict(rows=21, cols=70, depth=1033, type=TF32X3, a_stride=1036, b_stride=72, c_stride=76)),
]
# In each type; of each gate where weights stay on chip and where the layer is a product, whose rows are aligned or not;
# without biases.
GATED = [
    *((Gated, dict(rows=48, inputs=24, hidden=40, gate=gate, type=kind)) for gate in GATES
      for kind in (FLOAT16, BFLOAT16)),
    *((Gated, dict(rows=33, inputs=65, hidden=70, gate=gate, type=kind)) for gate in GATES
      for kind in (FLOAT16, BFLOAT16)),
    *((Gated, dict(rows=rows, inputs=inputs, hidden=hidden, x_stride=x_stride, out_stride=out_stride, type=BFLOAT16))
      for rows, inputs, hidden, x_stride, out_stride in (
          (1, 1, 1, 0, 0), (65, 7, 9, 0, 0), (24, 40, 36, 56, 0), (21, 13, 70, 16, 88), (72, 72, 136, 0, 0))),
    *((Gated, dict(rows=rows, inputs=16, hidden=hidden, gate=gate, type=kind, biases=biases))
      for rows, hidden in ((40, 24), (9, 7)) for kind in (FLOAT16, BFLOAT16)
      for gate, biases in ((0, ()), (1, ()), (1, ("b1",)), (2, ("b2",)))),
]
GATED_FP32 = [
    *((Gated, dict(rows=20, inputs=24, hidden=40, gate=gate, type=kind, exact=exact)) for gate in GATES
      for kind, exact in ((FLOAT32, True), (TF32, True), (TF32X3, False))),
    *((Gated, dict(rows=rows, inputs=inputs, hidden=hidden, gate=1, type=kind, biases=(), exact=False))
      for kind in (FLOAT32, TF32, TF32X3) for rows, inputs, hidden in ((1, 1, 1), (33, 65, 130))),
    *((Gated, dict(rows=21, inputs=13, hidden=70, x_stride=16, out_stride=76, type=kind)) for kind in (TF32, TF32X3)),
    (Gated, dict(rows=21, inputs=13, hidden=70, x_stride=16, out_stride=76, type=FLOAT32)),
]
CALLS = [
    *GATED_FP32,
    (Gated, {}),
    (Gated, dict(rows=1, inputs=1, hidden=1)),
    (Gated, dict(rows=65, inputs=7, hidden=9)),
    (Gated, dict(rows=33, inputs=65, hidden=130)),
    (Gated, dict(rows=24, inputs=40, hidden=36, x_stride=56)),
    (Gated, dict(rows=21, inputs=13, hidden=70, x_stride=16, out_stride=88)),
    *GATED,
    *((Product, dict(rows=rows, cols=cols, depth=depth, type=kind))
      for kind in (FLOAT16, BFLOAT16, FLOAT32)
      for rows, cols, depth in ((70, 40, 24), (1, 1, 1), (65, 9, 7), (33, 130, 65))),
    *((Product, dict(rows=21, cols=70, depth=13, type=kind, a_stride=16, b_stride=88, c_stride=80))
      for kind in (FLOAT16, BFLOAT16, FLOAT32)),
    *((Product, dict([(stride, 160)], rows=40, cols=150, depth=100, type=kind))
      for kind in (FLOAT16, FLOAT32) for stride in ("a_stride", "b_stride", "c_stride")),
    (Product, dict(rows=33, cols=130, depth=65, type=FLOAT32, exact=False)),
    *BY_TENSOR_CORES,
    *((Attention, dict(type=kind)) for kind in (FLOAT16, BFLOAT16)),
    (Attention, dict(batch=1, queries=1, keys=1, heads=1, kv_heads=1, width=1)),
    (Attention, dict(batch=2, queries=5, keys=9, heads=4, kv_heads=2, width=24, causal=1, heads_first=True)),
    (Attention, dict(queries=9, keys=5, heads=1, width=7, causal=1, type=BFLOAT16)),  # some queries see no key
    (Attention, dict(queries=3, keys=300, heads=2, kv_heads=2, width=72, log_sums=False)),
]
SLOW = [
    (Gated, dict(rows=40, inputs=512, hidden=256)),
    (Gated, dict(rows=600, inputs=64, hidden=64)),
    *((Product, dict(rows=150, cols=264, depth=200, type=kind))
      for kind in (FLOAT16, BFLOAT16, FLOAT32, TF32, TF32X3)),
    *((Product, dict(rows=rows, cols=cols, depth=depth, type=kind, exact=False)) for kind in (TF32, TF32X3)
      for rows, cols, depth in ((600, 260, 40), (130, 1100, 33))),
    (Product, dict(rows=100, cols=333, depth=129)),
    (Attention, dict(batch=2, queries=100, keys=200, heads=4, kv_heads=2, width=128, causal=1, type=BFLOAT16)),
    (Attention, dict(queries=2, keys=700, heads=8, kv_heads=1, width=256)),
]


def name_of(kind, options):
    return "-".join([kind.NAME, *(f"{name}={value}" for name, value in options.items())])


def for_each(calls, slow):
    """Runs a test for each (kind, options) of the calls, and, where all is tested, of the slow ones."""
    return pytest.mark.parametrize("kind, options", [
        *(pytest.param(*each, id=name_of(*each)) for each in calls),
        *(pytest.param(*each, id=name_of(*each), marks=pytest.mark.extensive) for each in slow),
    ])


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


AS_ANOTHER_GPU = """
from test_library import BAD_DEVICE, BY_TENSOR_CORES, TF32, TF32X3, Product, loaded_library
library = loaded_library()
ways = []
def run(kind, **options):
    try:
        kind(library, **options).run_twice()
    except AssertionError as error:
        raise AssertionError((kind.NAME, options, library.fk_last_error())) from error
    ways.append(library.fk_last_way().decode())
"""


def run_as_another_gpu(capability, program, **variables):
    """The program's output, on a CPU that plays a GPU of this compute capability. It has run(kind, **options), and
    `ways`: in which way each of these calls was computed."""
    result = execute([sys.executable, "-c", AS_ANOTHER_GPU + program], cwd=ROOT / "operators" / "tests",
                     env={"CUDA_CPU_COMPUTE_CAPABILITY": capability, "PYTHONPATH": str(ROOT)} | variables)
    assert result.rc == 0, result.stderr
    return result.stdout


def test_results_in_tf32_on_other_gpus():
    """By mma.sync, as the way says."""
    said = run_as_another_gpu("8.0", """
for kind, options in BY_TENSOR_CORES:
    kind(library, **options).run_twice()
    may_be_fp32 = options["type"] == TF32X3 and options["depth"] <= 1024
    assert may_be_fp32 or b"by mma.sync" in library.fk_last_way()
print(len(BY_TENSOR_CORES), "are right")
""")
    assert said == f"{len(BY_TENSOR_CORES)} are right\n"


def test_there_is_no_tf32_before_compute_capability_8():
    said = run_as_another_gpu("7.5", """
import ctypes
description, bytes = Product.Description(64, TF32, 8, 8, 8, 0, 0, 0), ctypes.c_size_t()
assert library.fk_product_workspace(ctypes.byref(description), ctypes.byref(bytes)) == BAD_DEVICE
print(library.fk_last_error().decode())
""")
    assert said == "the product in TF32 needs a GPU of compute capability 8.0 or newer; this one has 7.5\n"


# In fp16 and bf16: those from above; a depth that is cut into slices; rows for several tiles of each warp, and columns
# for several panels.
HALVES = [
    *((kind, options) for kind, options in CALLS
      if kind in (Gated, Product) and options.get("type", FLOAT16) in (FLOAT16, BFLOAT16)),
    *((Product, dict(rows=20, cols=24, depth=1100, type=kind)) for kind in (FLOAT16, BFLOAT16)),
    (Product, dict(rows=150, cols=264, depth=72)),
    (Gated, dict(rows=500, inputs=40, hidden=16)),
    (Gated, dict(rows=300, inputs=40, hidden=72, type=BFLOAT16, gate=1, biases=())),
    (Gated, dict(rows=300, inputs=13, hidden=72, x_stride=16)),
    (Gated, dict(rows=20, inputs=1032, hidden=16)),
]


@pytest.mark.parametrize("capability, taken_for", [
    ("8.0", ""), ("8.6", ""), ("8.9", ""), ("12.0", ""), ("9.0", "8.0"), ("9.0", "8.6"),
])
def test_halves_on_other_gpus(capability, taken_for):
    """By mma.sync, as the way says; and the gradients of the gated layer, which the same products compute."""
    said = run_as_another_gpu(capability, """
from test_library import HALVES
from test_library_gradients import GatedBackward
for kind, options in HALVES:
    kind(library, **options).run_twice()
    assert b"mma.sync" in library.fk_last_way()
for rows, inputs, hidden, strides in ((1, 1, 1, (0, 0)), (65, 7, 9, (0, 0)), (33, 65, 130, (0, 0)),
                                      (70, 24, 40, (0, 0)), (24, 40, 36, (56, 88))):
    GatedBackward(library, rows=rows, inputs=inputs, hidden=hidden, x_stride=strides[0],
                  out_stride=strides[1]).run_twice()
print(len(HALVES), "are right")
""", FUSED_KERNELS_CAPABILITY=taken_for)
    assert said == f"{len(HALVES)} are right\n"


SAYS_WAYS = """
from test_library import HALVES
for kind, options in BY_TENSOR_CORES + HALVES:
    run(kind, **options)
for way in ways:
    print(way)
"""


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9"])
def test_a_gpu_is_taken_for_an_older_one(capability):
    """Then it computes in the ways that the older one would take."""
    taken = run_as_another_gpu("9.0", SAYS_WAYS, FUSED_KERNELS_CAPABILITY=capability)
    assert taken == run_as_another_gpu(capability, SAYS_WAYS) != run_as_another_gpu("9.0", SAYS_WAYS)


@pytest.mark.parametrize("taken_for, code, sentence", [
    ("7.5", "BAD_DEVICE", "the product in TF32 needs a GPU of compute capability 8.0 or newer; this one has 9.0 and "
                          "is taken for 7.5"),
    ("12.0", "BAD_DEVICE", "FUSED_KERNELS_CAPABILITY is 12.0; this GPU has only 9.0"),
    *((wrong, "BAD_ARGUMENT", f'FUSED_KERNELS_CAPABILITY is "{wrong}"; it has to be a compute capability, such as 8.0')
      for wrong in ("8", "80", "8.3", "8.0 ", "Ampere")),
])
def test_what_a_gpu_cannot_be_taken_for(taken_for, code, sentence):
    said = run_as_another_gpu("9.0", f"""
import ctypes
from test_library import BAD_ARGUMENT
description, bytes = Product.Description(64, TF32, 8, 8, 8, 0, 0, 0), ctypes.c_size_t()
assert library.fk_product_workspace(ctypes.byref(description), ctypes.byref(bytes)) == {code}
print(library.fk_last_error().decode())
""", FUSED_KERNELS_CAPABILITY=taken_for)
    assert said == sentence + "\n"


LARGE = [(kind, options | dict(type=type, large=large)) for type, large in ((FLOAT16, 30000), (BFLOAT16, 133120))
         for kind, options in (
    (Attention, dict(queries=1, keys=1, heads=1, width=64)),
    (Attention, dict(queries=20, keys=400, width=64)),
    (Attention, dict(queries=70, keys=130, width=40, causal=1)),
    (Attention, dict(queries=20, keys=300, heads=2, kv_heads=2, width=72)),
    (Attention, dict(queries=2, keys=700, heads=8, kv_heads=1, width=64)),  # keys in parts
    (Attention, dict(queries=9, keys=200, width=136)),
    (Attention, dict(queries=9, keys=200, width=7)),
)]


@for_each(LARGE, [])
def test_large_logits(library, kind, options):
    """A rounding error of their product with the scale is far more than 1."""
    kind(library, **options).run_twice()


def test_large_logits_on_other_gpus():
    said = run_as_another_gpu("8.0", """
from test_library import LARGE
for kind, options in LARGE:
    kind(library, **options).run_twice()
    assert b"mma.sync" in library.fk_last_way()
print(len(LARGE), "are right")
""")
    assert said == f"{len(LARGE)} are right\n"


# The operators that run on each GPU, as docs/library.md has it: besides those of fp32's product and softmax.
ATTENTION_ANYWHERE = """
import random
from test_library import Attention, BFLOAT16, FLOAT16, FLOAT32, TF32X3
from test_library_softmax import CrossEntropy, Softmax
from test_library_gradients import CrossEntropyBackward, SoftmaxBackward
draw = random.Random({seed})
def up_to(most):
    return draw.randint(1, most)
for type in {types}:
    for width in (up_to(64), 64 + up_to(64), 128 + up_to(128), 8 * up_to(8), 64 + 8 * up_to(8), 128 + 8 * up_to(16)):
        for queries, keys in ((up_to(20), up_to(80)), (1, 64 + up_to(300))):
            run(Attention, type=type, width=width, queries=queries, keys=keys, causal=draw.randint(0, 1), heads=2,
                kv_heads=up_to(2))
for _ in range(3):
    run(Product, type=FLOAT32, rows=up_to(80), cols=up_to(80), depth=up_to(40))
    if {tf32}:
        run(Product, type=TF32X3, rows=up_to(80), cols=up_to(80), depth=up_to(40))
    for kind in (Softmax, CrossEntropy, SoftmaxBackward, CrossEntropyBackward):
        run(kind, rows=up_to(40), inputs=up_to(40), classes=up_to(300))
print(len(ways))
"""


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "9.0", "12.0"])
def test_what_runs_on_each_gpu(capability):
    """At random shapes. Where shared memory is small, too, and where it is just large enough."""
    old = capability == "7.5"
    program = ATTENTION_ANYWHERE.format(seed=int(10 * float(capability)), tf32=not old,
                                        types="(FLOAT16,)" if old else "(FLOAT16, BFLOAT16)")
    assert int(run_as_another_gpu(capability, program)) == (27 if old else 42)


def test_what_does_not_run_on_a_gpu_is_refused():
    """Before anything is written."""
    said = run_as_another_gpu("7.5", """
import ctypes
from test_library import BFLOAT16, Attention, Gated
for kind, words in ((Attention, (BFLOAT16, 0, 1, 1, 1, 1, 1, 64)), (Gated, (1, 8, 8, 8, 0, 0))):
    description, bytes = kind.Description(ctypes.sizeof(kind.Description), *words), ctypes.c_size_t()
    if kind is Attention:
        description.scale = 1
    assert kind.functions(library)[0](ctypes.byref(description), ctypes.byref(bytes)) == BAD_DEVICE
    print(library.fk_last_error().decode())
""")
    assert said.splitlines() == ["attention needs a GPU of compute capability 8.0 or newer; this one has 7.5",
                                 "the gated layer needs a GPU of compute capability 8.0 or newer; this one has 7.5"]


def call_in_turn(library, kind, options, same_bits=True):
    """Calls of three shapes A, B and C, as A, B, A, C, B, A: what one of them leaves behind shall not be in the way of
    another. By one thread, and then by four at the same time, each with operands of its own. The results have to be
    those that the shape had alone (same_bits=False: be right, too)."""
    def right(own, alone):
        return own.results() == alone if same_bits else own.is_right()

    def call(own):
        own.clear()
        assert own.call() == OK, library.fk_last_error()
        return own.results()

    def all_of_a_thread(turn):
        calls = [kind(library, **each) for each in options]
        start.wait()
        wrong = [(at, code) for at in (0, 1, 0, 2, 1, 0) for own in [calls[(at + turn) % 3]] for _ in [own.clear()]
                 for code in [own.call()] if code != OK or not right(own, alone[(at + turn) % 3])]
        for own in calls:
            own.free()
        return wrong

    calls, alone, start = [kind(library, **each) for each in options], [], threading.Barrier(4)
    for own in calls:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            alone.append(thread.submit(call, own).result())
    for at in (0, 1, 0, 2, 1, 0):
        call(calls[at])
        assert right(calls[at], alone[at])
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(all_of_a_thread, range(4))) == [[]] * 4
    for own in calls:
        own.free()


def in_turn(shapes):
    """Runs a test for each (kind, three shapes)."""
    return pytest.mark.parametrize("kind, options", [
        pytest.param(kind, options, id=name_of(kind, options[0])) for kind, options in shapes])


IN_TURN = [
    (Gated, [dict(rows=40, inputs=136, hidden=70), dict(rows=5, inputs=8, hidden=8), dict(rows=70, inputs=40)]),
    *((Gated, [dict(rows=40, inputs=136, hidden=70, type=kind, gate=1), dict(rows=5, inputs=8, hidden=8, type=kind),
               dict(rows=70, inputs=40, type=kind, gate=3)]) for kind in (BFLOAT16, TF32)),
    *((Product, [dict(rows=70, depth=70, type=kind), dict(rows=3, cols=8, depth=8, type=kind),
                 dict(rows=30, cols=130, depth=30, type=kind)]) for kind in (FLOAT16, FLOAT32, TF32, TF32X3)),
    (Attention, [dict(keys=150, width=64), dict(queries=1, width=8), dict(queries=70, width=136)]),
    (Attention, [dict(width=250), dict(width=5), dict(width=70)]),
]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


def test_a_process_that_fork_has_made(library):
    """It has none of its parent's threads, which compute on the CPU: it needs its own."""
    product = Product(library)
    assert product.call() == OK
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            product.run_twice()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    product.run_twice()


def call_at_the_same_time(library, kind):
    """By two threads; then by one with the operands of both, for which it plans once."""
    calls, codes = [kind(library, seed=seed) for seed in (1, 2)], []

    def run(own):
        stream = POINTER()
        codes.append(library.cudaStreamCreate(ctypes.byref(stream)))
        codes.extend(own.call(stream) for _ in range(3))
        codes.append(library.cudaStreamSynchronize(stream))

    threads = [threading.Thread(target=run, args=(own,)) for own in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [OK] * 10 and all(own.is_right() for own in calls)
    for own in calls * 2:
        own.clear()
        assert own.call() == OK, library.fk_last_error()
        assert own.is_right()
    for own in calls:
        own.free()


@pytest.mark.parametrize("kind", [Gated, Product, Attention])
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


def test_one_thread_uses_two_streams(library):
    calls, streams = [Product(library, seed=seed) for seed in (1, 2)], [POINTER(), POINTER()]
    for stream in streams:
        assert library.cudaStreamCreate(ctypes.byref(stream)) == OK
    assert [own.call(stream) for own, stream in [*zip(calls, streams)] * 3] == [OK] * 6
    for stream in streams:
        assert library.cudaStreamSynchronize(stream) == OK
    assert all(own.is_right() for own in calls)


def test_a_query_depends_on_the_description_alone(library):
    layer = Gated(library, rows=33, inputs=65, hidden=130)
    again = SIZE(77)
    assert layer.workspace_of(ctypes.byref(layer.description), ctypes.byref(again)) == OK
    assert again.value == layer.needed > 0
    assert layer.workspace_of(ctypes.byref(layer.description), None) == BAD_ARGUMENT


# ---- Refusals ---------------------------------------------------------------------------------------

# Of each kind: fields that are wrong, and the code and the word of the sentence for it.
WRONG = {
    Gated: [
        *((dict(rows=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
        *((dict(inputs=value), BAD_SHAPE) for value in (0, -5, 1 << 40)),
        *((dict(hidden=value), BAD_SHAPE) for value in (0, -1, 1 << 21)),
        *((dict(x_stride=value), BAD_SHAPE) for value in (-8, 16, 1 << 40)),
        (dict(x_stride=26), BAD_ALIGNMENT), (dict(out_stride=41), BAD_ALIGNMENT), (dict(out_stride=32), BAD_SHAPE),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, 6, 77)),
        *((dict(gate=value), BAD_ARGUMENT) for value in (-1, 6, 1 << 30)),
        (dict(type=FLOAT32, x_stride=26), BAD_ALIGNMENT), (dict(type=FLOAT32, inputs=1 << 25), BAD_SHAPE),
        (dict(type=TF32, x_stride=26), BAD_ALIGNMENT),
        *((dict([(field, value)]), BAD_ARGUMENT) for field in ("value_inputs", "value_stride", "gated_values")
          for value in (-1, 1, 24)),
    ],
    Product: [
        *((dict(rows=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
        *((dict(cols=value), BAD_SHAPE) for value in (0, -1, (1 << 26) + 1)),
        *((dict(depth=value), BAD_SHAPE) for value in (0, -1, 1 << 40)),
        (dict(a_stride=16), BAD_SHAPE), (dict(b_stride=-8), BAD_SHAPE), (dict(c_stride=42), BAD_ALIGNMENT),
        (dict(type=0), BAD_ARGUMENT), (dict(type=6), BAD_ARGUMENT),
        (dict(type=TF32, a_stride=26), BAD_ALIGNMENT), (dict(type=TF32X3, c_stride=39), BAD_SHAPE),
        (dict(type=FLOAT32, a_stride=26), BAD_ALIGNMENT), (dict(type=FLOAT32, depth=1 << 25), BAD_SHAPE),
    ],
    Attention: [
        *((dict(batch=value), BAD_SHAPE) for value in (0, -1, 1 << 40)),
        *((dict(queries=value), BAD_SHAPE) for value in (0, -1, 1 << 30)),
        *((dict(keys=value), BAD_SHAPE) for value in (0, -1, 1 << 40)),
        *((dict(heads=value), BAD_SHAPE) for value in (0, -1, 1 << 30)),
        *((dict(kv_heads=value), BAD_SHAPE) for value in (0, -1, 3)),
        *((dict(width=value), BAD_SHAPE) for value in (0, -1, 257)),
        *((dict(scale=value), BAD_ARGUMENT) for value in (0, -1, math.inf, math.nan)),
        (dict(causal=2), BAD_ARGUMENT), (dict(type=FLOAT32), BAD_ARGUMENT),
        (dict(q_strides=Strides(640, 32, 8)), BAD_SHAPE), (dict(k_strides=Strides(0, -16, 0)), BAD_SHAPE),
        (dict(v_strides=Strides(0, 1 << 40, 0)), BAD_SHAPE), (dict(out_strides=Strides(0, 16, 16)), BAD_SHAPE),
        (dict(queries=(1 << 26) + 1, q_strides=Strides(0, 1 << 38, 16)), BAD_SHAPE),  # 2^64 elements
    ],
}


def damaged(kind, wrong):
    """Of each mistake: the code, a word of the sentence, what is changed in the description, and a function of
    the call that says which arguments are others."""
    for changes, code in wrong:
        yield code, list(changes)[-1], changes, None
    yield BAD_ARGUMENT, "size is 8", dict(size=8), None
    yield BAD_ARGUMENT, " is NULL", {}, lambda _: {"description": None}
    for name in kind.NAMES:
        if name not in kind.OPTIONAL:
            yield BAD_ARGUMENT, f"{name} is NULL", {}, lambda _, n=name: {n: None}
        yield (BAD_ALIGNMENT, f"{name}: the pointer is not aligned to 16", {},
               lambda call, n=name: {n: call.device[n].at + 2})
        yield BAD_DEVICE, f"{name} is not memory of a GPU", {}, lambda _, n=name: {n: 1 << 20}
        for written in kind.WRITTEN:
            if name != written:
                yield (OVERLAP, "which is written, overlaps", {},
                       lambda call, n=name, w=written: {w: call.device[n].at})
                yield (OVERLAP, "which is written, overlaps", {},
                       lambda call, n=name, w=written: {
                           w: (call.device[n].at + call.device[n].bytes - 1) // 16 * 16})


def refuse_what_is_damaged(library, kind, wrong):
    call = kind(library)
    before, count = call.all(), 0
    for code, words, changes, arguments in damaged(kind, wrong):
        whole = kind.Description.from_buffer_copy(call.description)
        for field, value in changes.items():
            setattr(call.description, field, value)
        assert call.call(**(arguments(call) if arguments else {})) == code, (changes, library.fk_last_error())
        assert words in library.fk_last_error().decode()
        if changes:
            needed = SIZE(77)
            assert call.workspace_of(ctypes.byref(call.description), ctypes.byref(needed)) == code
            assert needed.value == 77
        call.description, count = whole, count + 1
        assert before == call.all(), (words, changes)
    assert count > 20
    call.free()


def refuse_a_damaged_workspace(call):
    assert call.needed > 0
    before, at = call.all(), call.device["workspace"].at
    for code, words, instead in (
            (BAD_WORKSPACE, "are needed", {"bytes": call.needed - 1}), (BAD_WORKSPACE, "are needed", {"bytes": 0}),
            (BAD_ARGUMENT, "workspace is NULL", {"workspace": None}),
            (BAD_ALIGNMENT, "workspace: the pointer", {"workspace": at + 16}),
            (BAD_DEVICE, "workspace is not memory of a GPU", {"workspace": 1 << 20}),
            *((OVERLAP, "overlaps", {"workspace": call.device[name].at // 256 * 256}) for name in call.host)):
        assert call.call(**instead) == code
        assert words in call.library.fk_last_error().decode()
        assert before == call.all()
    call.free()


@pytest.mark.parametrize("kind", [Gated, Product, Attention])
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG[kind])


@pytest.mark.parametrize("kind, options", [
    (Gated, dict(rows=33, inputs=65, hidden=130)), (Product, dict(rows=65, cols=9, depth=7)),
    (Attention, dict(queries=3, keys=300, width=72)),
])
def test_a_damaged_workspace_is_refused(library, kind, options):
    refuse_a_damaged_workspace(kind(library, **options))


def test_the_way_is_said(library):
    """Of each thread's last launch. What is refused changes nothing."""
    product, gated = Product(library, rows=65, cols=9, depth=7), Gated(library, rows=33, inputs=65, hidden=130)
    assert product.call() == OK
    of_product = library.fk_last_way()
    assert product.call(bytes=0) == BAD_WORKSPACE and library.fk_last_way() == of_product
    assert gated.call() == OK
    assert b"" != of_product != library.fk_last_way() != b""
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other.submit(library.fk_last_way).result() == b""
    product.free()
    gated.free()


# ---- What is kept from one call to the next ---------------------------------------------------------


def test_calls_of_one_description_with_other_operands(library):
    calls = [Gated(library, seed=seed) for seed in range(6)]
    for own in [*calls, *calls[:2] * 2, *calls]:
        library.cudaMemset(own.device["out"].at, 0xff, own.device["out"].bytes)
        assert own.call() == OK, library.fk_last_error()
        assert own.is_right()
    for own in calls:
        own.free()


def test_operands_that_are_one_the_first_time_alone(library):
    square = Product(library, rows=24, cols=24, depth=24)
    assert square.call(a=square.device["b"].at) == OK
    square.run_twice()


def test_more_descriptions_than_are_kept(library):
    calls = [Product(library, rows=rows, cols=8, depth=8) for rows in range(1, 71)]
    for own in [*calls, *calls]:
        library.cudaMemset(own.device["c"].at, 0xff, own.device["c"].bytes)
        assert own.call() == OK, library.fk_last_error()
        assert own.is_right()
    for own in calls:
        own.free()


def test_a_description_is_not_taken_for_another(library):
    """Of the same sizes, but another type or stride; and log_sums or none."""
    calls = [Product(library, type=FLOAT16), Product(library, type=BFLOAT16), Product(library, type=FLOAT32),
             Product(library, type=TF32, exact=False), Product(library, type=TF32X3, exact=False),
             Product(library, a_stride=32), Attention(library), Attention(library, log_sums=False),
             Attention(library, causal=1), Attention(library, heads_first=True)]
    for own in [*calls, *calls]:
        for name in set(own.WRITTEN) & set(own.device):
            library.cudaMemset(own.device[name].at, 0xff, own.device[name].bytes)
        assert own.call() == OK and own.is_right()
    for own in calls:
        own.free()


def test_what_was_freed_is_refused(library):
    """Also where calls have used it before."""
    product = Product(library)
    assert product.call() == OK and product.call() == OK
    product.device["a"].free()
    assert product.call() == BAD_DEVICE
    assert library.fk_last_error() == b"a is not memory of a GPU"
    product.device["a"] = Buffer(library, product.host["a"])
    product.run_twice()


def test_threads_that_call_the_same(library):
    """Each with operands of its own, and of two descriptions in turn."""
    def run(seed):
        calls = [Product(library, seed=seed), Product(library, rows=9, seed=seed)]
        codes = [own.call() for own in calls * 8]
        return codes == [OK] * 16 and all(own.is_right() for own in calls)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(12)))


@pytest.fixture
def tuning(library):
    assert library.fk_tune(1) == OK
    yield
    assert library.fk_tune(0) == OK


@pytest.mark.parametrize("kind, options", [
    (Product, dict(rows=71, cols=40)), (Product, dict(rows=71, type=FLOAT32)), (Gated, dict(rows=71)),
    *((Product, dict(rows=71, cols=39, type=kind, exact=False)) for kind in (TF32, TF32X3)),
    (Attention, dict(queries=3, keys=290, width=40)),
])
def test_ways_are_tried(library, tuning, kind, options):
    """Once; what was the fastest is used from then on, by other threads too."""
    call = kind(library, **options)
    assert call.call() == OK, library.fk_last_error()
    assert call.is_right()
    way = library.fk_last_way()
    call.run_twice()
    assert library.fk_last_way() == way
    assert library.fk_tune(0) == OK
    again = kind(library, **options)

    def run():
        assert again.call() == OK
        return library.fk_last_way()

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other.submit(run).result() == way
    again.run_twice()


@pytest.mark.parametrize("options", [dict(rows=20, cols=24, depth=8200), dict(rows=70, cols=7, depth=8199),
                                     dict(rows=9, cols=40, depth=8200, type=BFLOAT16, c_stride=48)], ids=str)
def test_a_product_of_few_tiles_comes_in_slices(library, options):
    call = Product(library, **options)
    call.run_twice()
    assert b"slices: " in library.fk_last_way()


def test_trying_finds_what_the_estimate_does_not(library):
    """The estimate is of a GPU, for which six small tiles are better than two large ones. On the CPU the six take
    three times as long."""
    for rows in (72, 71, 70, 69):  # where other programs run, a time may mislead once
        product = Product(library, rows=rows, type=FLOAT32)
        assert product.call() == OK
        expected = library.fk_last_way()
        assert library.fk_tune(1) == product.call() == library.fk_tune(0) == OK
        if library.fk_last_way() != expected:
            break
    assert library.fk_last_way() != expected
    product.run_twice()
    assert library.fk_last_way() != expected


def test_tuning_is_on_or_off(library):
    assert library.fk_tune(2) == library.fk_tune(-1) == BAD_ARGUMENT
    assert library.fk_last_error() == b"on is -1; it has to be 0 or 1"


# ---- The header, the example, the page --------------------------------------------------------------


def test_the_header_is_c99(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    source = tmp_path / "includes.c"
    source.write_text('#include "fused_kernels.h"\nint main(void) { return FK_OK; }\n')
    result = execute(["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER}",
                      "-fsyntax-only", source])
    assert result.rc == 0, result.stderr


def test_the_example(library, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    program = tmp_path / "gated_layer"
    result = execute(["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER}",
                      f"-I{ROOT / 'cpu/c'}", ROOT / "examples/gated_layer.c", f"-L{CPU_BUILD}",
                      f"-Wl,-rpath,{CPU_BUILD}", "-lfused_kernels", "-o", program])
    assert result.rc == 0, result.stderr
    result = execute([program])
    assert result.rc == 0, result.stdout + result.stderr


def test_the_page_has_the_whole_example():
    """That of test_the_example, and README leads to it."""
    assert f"```c\n{(ROOT / 'examples/gated_layer.c').read_text()}```" in (ROOT / "docs/library.md").read_text()
    assert "](docs/library.md#a-whole-program)" in (ROOT / "README.md").read_text()


def test_readme_calls_the_layer_as_the_header_has_it(tmp_path):
    """The four calls that README shows, around which there is only what they name."""
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    (calls,) = re.findall(r"```c\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    source = tmp_path / "calls.c"
    source.write_text("#include <cuda_runtime_api.h>\n#include \"fused_kernels.h\"\n"
                      "void call(int rows, int inputs, int hidden, void *x, void *w1, void *w2, void *b1, void *b2,\n"
                      "          void *out) {\n" + calls + "}\n")
    result = execute(["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER}",
                      f"-I{ROOT / 'cpu/c'}", "-fsyntax-only", source])
    assert result.rc == 0, result.stderr


def test_without_a_driver_the_library_loads_and_refuses():
    """In a process that sees no GPU."""
    built = CUDA_BUILD / "libfused_kernels.so"
    if not built.exists():
        pytest.skip("the library has not been built by nvcc")
    program = f"""
import ctypes
from fused_kernels import FK_FLOAT16, fk_gating, load
library = load({str(built)!r})
description = fk_gating(ctypes.sizeof(fk_gating), FK_FLOAT16, 64, 64, 64, 0, 0)
needed = ctypes.c_size_t()
print(library.fk_version(), library.fk_gating_workspace(ctypes.byref(description), ctypes.byref(needed)))
print(library.fk_last_error().decode())
"""
    result = execute([sys.executable, "-c", program], env={**NO_GPU, "PYTHONPATH": str(BINDING)})
    assert result.rc == 0, result.stderr
    numbers_printed, sentence = result.stdout.splitlines()
    assert numbers_printed == "1 7" and "cuda" in sentence


def test_the_page_has_the_headers_functions():
    declared = set(re.findall(r"\b(fk_\w+)\(", re.sub(r"/\*.*?\*/", "", (HEADER / "fused_kernels.h").read_text(),
                                                      flags=re.DOTALL)))
    assert {name for name, _ in functions.functions()} == declared
    assert functions.PAGE.read_text() == functions.page()
