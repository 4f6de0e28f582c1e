"""The library's gradients of the gated layer, of softmax(x W) and of attention, called as in test_library.py."""

import ctypes
import math
import struct

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BAD_ALIGNMENT, BFLOAT16, BYTES, FLOAT16, FLOAT32, GATES, OK,
                          ROUNDING, TF32, TF32X3, Call, Strides, call_at_the_same_time, call_in_turn, for_each,
                          fused_kernels, in_turn, library, name_of, near, numbers, packed, refuse_a_damaged_workspace,
                          refuse_what_is_damaged, run_as_another_gpu, strided, unpacked)

HALF, FP32 = 2.0**-11 * 1.01, 2.0**-20
LEAST = 2.0**-25  # fp16 has nothing between multiples of 2^-24
# How far a factor of a product is from the number that it stands for.
FACTOR = {FLOAT16: HALF, BFLOAT16: 2.0**-8 * 1.01, FLOAT32: 0, TF32: 2.0**-10, TF32X3: 2.0**-18}


def added_up(a, b, far_a, kind_of_sum):
    """Of a (rows, n) and b (rows, m), lists of rows, a^T b; with "rows" a b^T. And how far off it is, where a is off by
    far_a, and what comes with fp32."""
    if kind_of_sum == "columns":
        a, b, far_a = ([list(each) for each in zip(*matrix)] for matrix in (a, b, far_a))
    value = [[sum(p * q for p, q in zip(one, other)) for other in b] for one in a]
    far = [[sum((e + FP32 * abs(p)) * abs(q) for p, e, q in zip(one, off, other)) for other in b]
           for one, off in zip(a, far_a)]
    return value, far


def flat(rows):
    return [value for row in rows for value in row]


class Backward(Call):
    @classmethod
    def functions(cls, library):
        return getattr(library, f"fk_{cls.NAME}_workspace"), getattr(library, f"fk_{cls.NAME}")


def gated_gradients_are_near(call, expected):
    """Whether the results of a call are those expected: {name: (rows, how far each number may be off before it is
    rounded)}. Those of weights are transposed."""
    of = call.description
    rounding, least = ROUNDING.get(of.type, 2.0**-24) * 1.01, LEAST if of.type == FLOAT16 else 0
    for name in set(expected) & set(call.host):
        turned = [list(zip(*each)) for each in expected[name]] if name in ("d_w1", "d_w2") else expected[name]
        value, far = map(flat, turned)
        bound = [rounding * abs(number) + off + least for number, off in zip(value, far)]
        if not near(call.found(name, of.type, 1, len(value)), value, bound):
            return False
    return True


class GatedBackward(Backward):
    NAME, Description = "gating_backward", fused_kernels.fk_gating
    WRITTEN = "d_x", "d_w1", "d_w2", "d_b1", "d_b2"
    NAMES = ("d_out", "x", "w1", "w2", "b1", "b2", *WRITTEN)
    OPTIONAL = "b1", "b2", "d_b1", "d_b2"

    def __init__(self, library, rows=30, inputs=24, hidden=40, x_stride=0, out_stride=0, type=FLOAT16, gate=0,
                 biases=OPTIONAL, seed=0):
        """biases: of OPTIONAL those that are not NULL."""
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.d_out = [numbers(hidden, seed + 2 * i) for i in range(rows)]
        self.w1, self.w2 = ([numbers(hidden, seed + i + j, 0.5) for i in range(inputs)] for j in (1, 2))
        self.b1, self.b2 = (numbers(hidden, seed + i) if f"b{i - 2}" in biases else [0.0] * hidden for i in (3, 4))
        counts = dict(zip(self.WRITTEN, (rows * inputs, inputs * hidden, inputs * hidden, hidden, hidden)))
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, hidden, x_stride,
                                       out_stride, gate)
        operands = {
            "d_out": strided(self.d_out, type, out_stride or hidden), "x": strided(self.x, type, x_stride or inputs),
            **{name: packed(flat(getattr(self, name)), type) for name in ("w1", "w2")},
            **{name: packed(getattr(self, name), type) for name in ("b1", "b2")},
            **{name: b"\xff" * (BYTES[type] * count) for name, count in counts.items()}}
        super().__init__(library, description, {name: content for name, content in operands.items()
                                                if name not in self.OPTIONAL or name in biases})

    def result_is_right(self):
        of = self.description
        gate, slope, steepest, bend = GATES[of.gate]
        factor, least = FACTOR[of.type], LEAST if of.type == FLOAT16 else 0
        d_s, d_v, far_s, far_v = [], [], [], []
        for x, d_row in zip(self.x, self.d_out):
            rows = [[] for _ in range(4)]
            for col, d in enumerate(d_row):
                s, v = (sum(a * w[col] for a, w in zip(x, weights)) for weights in (self.w1, self.w2))
                # In types of 2 bytes both are rounded; in fp32 the numbers here are exact.
                off_s, off_v = (factor * abs(each) + least if BYTES[of.type] == 2 else 0 for each in (s, v))
                s, v = s + self.b1[col], v + self.b2[col]
                # How far the slope may be off, besides some errors of fp32: where ReLU bends it is 0 or 1.
                off_slope = bend * off_s + (of.gate == 4 and abs(s) <= off_s)
                rows[0].append(d * v * slope(s))
                rows[1].append(d * gate(s))
                rows[2].append(abs(d) * ((abs(v) + off_v) * (off_slope + FP32) + abs(slope(s)) * off_v)
                               + factor * abs(d * v * slope(s)) + least)
                rows[3].append(abs(d) * (steepest * off_s + FP32) + factor * abs(d * gate(s)) + least)
            for to, row in zip((d_s, d_v, far_s, far_v), rows):
                to.append(row)
        ones = [[1.0] for _ in self.x]
        expected = {"d_w1": added_up(d_s, self.x, far_s, "columns"), "d_w2": added_up(d_v, self.x, far_v, "columns"),
                    "d_b1": added_up(d_s, ones, far_s, "columns"), "d_b2": added_up(d_v, ones, far_v, "columns")}
        by_s, by_v = added_up(d_s, self.w1, far_s, "rows"), added_up(d_v, self.w2, far_v, "rows")
        expected["d_x"] = tuple([[a + b for a, b in zip(*both)] for both in zip(*each)] for each in zip(by_s, by_v))
        return gated_gradients_are_near(self, expected)


class OfLogits(Backward):
    Description, WRITTEN = fused_kernels.fk_softmax, ("d_x", "d_w")

    def are_gradients_of(self, g, far):
        """Whether d_x and d_w come of these gradients of logits, which may be off by so much, and are rounded to the
        type before the products, as the results after them."""
        kind, least = self.description.type, LEAST if self.description.type == FLOAT16 else 0
        rounding = 1.01 * ROUNDING.get(kind, 0)
        far = [[off + rounding * abs(each) + least for each, off in zip(*row)] for row in zip(g, far)]
        of_w, far_w = added_up(g, self.x, far, "columns")
        for name, value, off in (("d_x", *added_up(g, self.w, far, "rows")),
                                 ("d_w", list(zip(*of_w)), list(zip(*far_w)))):
            value = flat(value)
            bound = [rounding * abs(number) + each + least for number, each in zip(value, flat(off))]
            if not near(self.found(name, kind, 1, len(value)), value, bound):
                return False
        return True


class SoftmaxBackward(OfLogits):
    NAME, NAMES = "softmax_backward", ("d_probs", "x", "w", "probs", *OfLogits.WRITTEN)

    def __init__(self, library, rows=20, inputs=24, classes=40, seed=0, type=FLOAT32):
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.d_probs = [numbers(classes, seed + 2 * i) for i in range(rows)]
        self.w = [numbers(classes, seed + 3 * i) for i in range(inputs)]
        # Any numbers will do, whose products are exact.
        self.probs = [[abs(number) / 4 for number in numbers(classes, seed + 5 * i)] for i in range(rows)]
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, classes)
        super().__init__(library, description, {
            **{name: packed(flat(getattr(self, name)), type) for name in ("d_probs", "x", "w", "probs")},
            "d_x": b"\xff" * (BYTES[type] * rows * inputs), "d_w": b"\xff" * (BYTES[type] * inputs * classes)})

    def result_is_right(self):
        g, far = [], []
        for d_row, p_row in zip(self.d_probs, self.probs):
            total = sum(d * p for d, p in zip(d_row, p_row))
            size = sum(abs(d * p) for d, p in zip(d_row, p_row))
            g.append([p * (d - total) for d, p in zip(d_row, p_row)])
            far.append([FP32 * p * (abs(d) + size) for d, p in zip(d_row, p_row)])
        return self.are_gradients_of(g, far)


class CrossEntropyBackward(OfLogits):
    NAME = "cross_entropy_backward"
    NAMES = ("d_losses", "x", "w", "labels", "logits", "log_sums", *OfLogits.WRITTEN)

    def __init__(self, library, rows=20, inputs=24, classes=40, seed=0, large=0, type=FLOAT32, label_type=0,
                 hard=False):
        """large: a number that is added to all logits; then log_sums are what forward would have written. hard: every
        third class has a logit of -inf, and rows whose labels are no classes have it in all."""
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.w = [numbers(classes, seed + 3 * i) for i in range(inputs)]
        self.labels = [(-100, classes)[i % 2] if i % 7 == 6 else (seed + 5 * i) % classes for i in range(rows)]
        self.d_losses, self.log_sums = numbers(rows, seed + 4), numbers(rows, seed + 6)
        self.logits = [numbers(classes, seed + 2 * i) for i in range(rows)]  # any will do
        if large:
            self.log_sums = [math.log(sum(map(math.exp, row))) for row in self.logits]
        self.exponentials = [[math.exp(logit - log_sum) for logit in row]
                             for row, log_sum in zip(self.logits, self.log_sums)]
        self.log_sums = [large + each for each in self.log_sums]
        self.logits = [[large + each for each in row] for row in self.logits]
        for i, label in enumerate(self.labels if hard else []):
            none = not 0 <= label < classes
            for c in range(classes):
                if none or c % 3 == 1:
                    self.logits[i][c], self.exponentials[i][c] = -math.inf, 0.0
            self.log_sums[i] = -math.inf if none else self.log_sums[i]
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, classes, label_type)
        super().__init__(library, description, {
            **{name: packed(getattr(self, name), FLOAT32) for name in ("d_losses", "log_sums")},
            **{name: packed(flat(getattr(self, name)), type) for name in ("x", "w")},
            "logits": packed(flat(self.logits), FLOAT32),
            "labels": struct.pack(f"{rows}{'i' if label_type else 'q'}", *self.labels),
            "d_x": b"\xff" * (BYTES[type] * rows * inputs), "d_w": b"\xff" * (BYTES[type] * inputs * classes)})

    def result_is_right(self):
        g, far, classes = [], [], self.description.classes
        for each, label, d in zip(self.exponentials, self.labels, self.d_losses):
            d = d if 0 <= label < classes else 0
            g.append([d * (value - (c == label)) for c, value in enumerate(each)])
            far.append([FP32 * abs(d) * (value + 1) for value in each])
        return self.are_gradients_of(g, far)


class AttentionBackward(Backward):
    NAME, Description = "attention_backward", fused_kernels.fk_attention_gradients
    OF_QUERIES, OF_KEYS, WRITTEN = ("d_out", "q", "out", "d_q"), ("k", "v", "d_k", "d_v"), ("d_q", "d_k", "d_v")
    NAMES, MORE_ROWS = ("d_out", "q", "k", "v", "out", "log_sums", *WRITTEN), 70

    def __init__(self, library, batch=1, queries=20, keys=30, heads=2, kv_heads=1, width=16, causal=0, type=FLOAT16,
                 layout="dense", deterministic=0, large=1.0, seed=0):
        """layout: "dense"; "heads first", (batch, heads, rows, width); "apart", with gaps between rows and heads; or
        "longer", where the rows of a batch element are the first of more, which are infinite. q is multiplied by
        `large`, and so are logits, which are up to 4 with the default width."""
        self.layout, far = layout, width + 8 * (layout == "apart")
        of = self.description = self.Description(
            ctypes.sizeof(self.Description), type, causal, batch, queries, keys, heads, kv_heads, width, scale=0.5,
            deterministic=deterministic)
        self.by, self.rows, operands = {}, {}, {}
        for i, name in enumerate((*self.OF_QUERIES, *self.OF_KEYS)):
            rows, of_heads = (queries, heads) if name in self.OF_QUERIES else (keys, kv_heads)
            self.by[name] = by = ((rows * of_heads * far, far, rows * far) if layout == "heads first" else
                                  (rows * of_heads * far + 16, of_heads * far, far))
            if layout != "dense":
                setattr(of, f"{name}_strides", Strides(*by))
            else:
                self.by[name] = by = (rows * of_heads * far, *by[1:])
            between, behind = b"\xff\xff", 0
            if layout == "longer":
                behind = self.MORE_ROWS * of_heads * far
                self.by[name] = by = (rows * of_heads * far + behind, *by[1:])
                setattr(of, f"{name}_strides", Strides(*by))
                if name not in self.WRITTEN:
                    between = packed([math.inf], type)
            content = bytearray(between * (self.place(name, batch - 1, rows - 1, of_heads - 1) + width + behind))
            if name not in self.WRITTEN:
                values = numbers(batch * rows * of_heads * width, seed + i, large if name == "q" else 1.0)
                self.rows[name] = {}
                for at in range(batch * rows * of_heads):
                    row = values[at * width:(at + 1) * width]
                    where = at // of_heads // rows, at // of_heads % rows, at % of_heads
                    self.rows[name][where] = row
                    begin = 2 * self.place(name, *where)
                    content[begin:begin + 2 * width] = packed(row, type)
            operands[name] = bytes(content)
        self.log_sums = []
        for b in range(batch):
            for head in range(heads):
                for s in range(queries):
                    logits = [self.logit(b, s, t, head) for t in self.seen(s)]
                    most = max(logits, default=0)
                    self.log_sums.append(most + math.log(sum(math.exp(each - most) for each in logits)) if logits
                                         else -math.inf)
        operands["log_sums"] = packed(self.log_sums, FLOAT32)
        self.log_sums = unpacked(operands["log_sums"], FLOAT32)
        super().__init__(library, of, operands)

    def place(self, name, batch, row, head):
        by = self.by[name]
        return batch * by[0] + row * by[1] + head * by[2]

    def seen(self, s):
        of = self.description
        return range(max(0, s + of.keys - of.queries + 1) if of.causal else of.keys)

    def logit(self, batch, s, t, head):
        of = self.description
        q, k = self.rows["q"][batch, s, head], self.rows["k"][batch, t, head * of.kv_heads // of.heads]
        return 0.5 * sum(a * b for a, b in zip(q, k))

    def expected(self):
        """(gradient, how far it may be off) of each row, by name and place. P and dS are rounded to the type before the
        second products, dS perhaps after a rounding of its P. fp32's own errors are as forward's, and in P those of
        logits that are large."""
        of = self.description
        rounding, least = ROUNDING[of.type], LEAST if of.type == FLOAT16 else 2.0**-120  # of fp32's exponentials
        result = {name: {} for name in self.WRITTEN}

        def add(name, where, factor, off, row):
            value, far = result[name].setdefault(where, ([0.0] * of.width, [0.0] * of.width))
            for i, each in enumerate(row):
                value[i] += factor * each
                far[i] += off * abs(each)

        for name, rows, of_heads in (("d_q", of.queries, of.heads), ("d_k", of.keys, of.kv_heads),
                                     ("d_v", of.keys, of.kv_heads)):
            for b in range(of.batch):
                for row in range(rows):
                    for head in range(of_heads):
                        add(name, (b, row, head), 0, 0, [0.0] * of.width)
        for (b, s, head), d_out in self.rows["d_out"].items():
            out, g = self.rows["out"][b, s, head], head * of.kv_heads // of.heads
            row_sum, size = sum(a * c for a, c in zip(d_out, out)), sum(abs(a * c) for a, c in zip(d_out, out))
            log_sum = self.log_sums[(b * of.heads + head) * of.queries + s]
            for t in self.seen(s):
                p, v = math.exp(self.logit(b, s, t, head) - log_sum), self.rows["v"][b, t, g]
                d_p = sum(a * c for a, c in zip(d_out, v))
                d_s = p * (d_p - row_sum)
                far_p = 2.0**-16 + 2.0**-22 * abs(log_sum)
                far_s = (2.02 * rounding + far_p) * abs(d_s) + FP32 * p * (
                    size + sum(abs(a * c) for a, c in zip(d_out, v))) + least * (1 + abs(d_p - row_sum))
                add("d_v", (b, t, g), p, (1.01 * rounding + far_p) * p + least, d_out)
                add("d_q", (b, s, head), 0.5 * d_s, 0.5 * far_s, self.rows["k"][b, t, g])
                add("d_k", (b, t, g), 0.5 * d_s, 0.5 * far_s, self.rows["q"][b, s, head])
        return {name: {where: (value, [1.01 * rounding * abs(each) + off + least for each, off in zip(value, far)])
                       for where, (value, far) in rows.items()} for name, rows in result.items()}

    def result_is_right(self):
        of, unit = self.description, 2 * self.description.width
        if not hasattr(self, "wanted"):
            self.wanted = self.expected()
        for name, rows in self.wanted.items():
            data = bytearray(self.device[name].content())
            for where, (value, bound) in rows.items():
                begin = 2 * self.place(name, *where)
                if not near(unpacked(bytes(data[begin:begin + unit]), of.type), value, bound):
                    return False
                data[begin:begin + unit] = b"\xff" * unit
            assert set(data) == {0xff}  # between rows all is as it was
        return True


KINDS = [GatedBackward, SoftmaxBackward, CrossEntropyBackward, AttentionBackward]
# Tiles that are not full, of queries and of keys; several of them; heads that share keys; queries without a key.
ATTENTION = [
    *((AttentionBackward, dict(type=kind)) for kind in (FLOAT16, BFLOAT16)),
    (AttentionBackward, dict(queries=1, keys=1, heads=1, width=8)),
    (AttentionBackward, dict(queries=70, keys=140, heads=1, width=64, type=BFLOAT16)),
    (AttentionBackward, dict(queries=130, keys=66, heads=1, width=8, causal=1)),
    (AttentionBackward, dict(queries=20, keys=150, heads=1, width=128, causal=1)),
    (AttentionBackward, dict(batch=2, queries=7, keys=9, heads=6, kv_heads=2, width=72, type=BFLOAT16)),
    (AttentionBackward, dict(batch=2, queries=35, keys=18, heads=2, kv_heads=2, width=40, causal=1,
                             layout="heads first")),
    (AttentionBackward, dict(batch=2, queries=9, keys=33, heads=4, kv_heads=2, width=24, causal=1, layout="apart")),
    (AttentionBackward, dict(batch=2, queries=5, keys=9, heads=2, kv_heads=2, width=104, layout="apart",
                             type=BFLOAT16)),
    # Rows behind the last one that are infinite; logits of 10000 and more, of which few have a probability above 0.
    *((AttentionBackward, dict(batch=2, queries=70, keys=67, heads=2, kv_heads=1, width=64, causal=causal,
                               layout="longer", deterministic=causal)) for causal in (0, 1)),
    (AttentionBackward, dict(queries=40, keys=70, heads=1, width=64, layout="longer", type=BFLOAT16)),
    *((AttentionBackward, dict(queries=40, keys=150, heads=1, width=width, causal=1, large=2.0**11, type=kind))
      for width, kind in ((64, FLOAT16), (128, BFLOAT16))),
    # Wide: dK and dV are divided, and on Hopper two blocks share queries; the second one's keys may all be hidden, or
    # there may be none.
    (AttentionBackward, dict(queries=9, keys=20, heads=1, width=256)),
    (AttentionBackward, dict(queries=70, keys=140, heads=1, width=136, type=BFLOAT16)),
    (AttentionBackward, dict(queries=130, keys=66, heads=1, width=144, causal=1)),
    (AttentionBackward, dict(batch=2, queries=18, keys=35, heads=4, kv_heads=2, width=200, causal=1,
                             layout="heads first")),
    (AttentionBackward, dict(queries=9, keys=33, heads=2, kv_heads=2, width=248, layout="apart", type=BFLOAT16)),
    (AttentionBackward, dict(queries=140, keys=270, heads=1, width=136, causal=1, deterministic=1)),
    (AttentionBackward, dict(batch=2, queries=70, keys=150, heads=2, kv_heads=1, width=136, layout="heads first",
                             deterministic=1)),
    # On other GPUs there are tiles of 128 queries where there are so many.
    *((AttentionBackward, dict(queries=1030, keys=130, heads=1, width=8, type=kind, deterministic=deterministic))
      for deterministic, kind in enumerate((FLOAT16, BFLOAT16))),
    # In order: several tiles of both, heads that alternate, queries without a key, more sequences than come abreast.
    (AttentionBackward, dict(queries=70, keys=140, heads=1, width=64, type=BFLOAT16, deterministic=1)),
    (AttentionBackward, dict(queries=150, keys=66, heads=2, width=8, causal=1, deterministic=1)),
    (AttentionBackward, dict(batch=2, queries=70, keys=150, heads=2, width=72, causal=1, layout="heads first",
                             deterministic=1)),
]
# On a Hopper of 8 multiprocessors these have so few tiles of keys that their steps are divided; or so many that blocks
# have several, and those that make no whole round are divided.
DIVIDED = [
    (AttentionBackward, dict(queries=140, keys=20, heads=4, kv_heads=1, width=72, type=BFLOAT16)),
    (AttentionBackward, dict(queries=250, keys=260, heads=2, kv_heads=1, width=24, causal=1, deterministic=1)),
    (AttentionBackward, dict(queries=420, keys=20, heads=4, kv_heads=1, width=8, causal=1)),
    (AttentionBackward, dict(queries=70, keys=20, heads=3, kv_heads=1, width=136, type=BFLOAT16)),
    (AttentionBackward, dict(batch=9, queries=100, keys=20, heads=3, kv_heads=1, width=80)),
    (AttentionBackward, dict(batch=9, queries=100, keys=20, heads=3, kv_heads=1, width=80, deterministic=1)),
]
# There, too, a block has a run of steps: the end of a tile of keys and the beginning of the next one. Heads of 8, 80
# and 128 have kernels of their own. (These take half a minute each here, and are computed on such a Hopper only.)
RUNS = [(AttentionBackward, dict(queries=queries, keys=600, heads=heads, kv_heads=1, width=width, type=kind))
        for queries, heads, width, kind in ((200, 5, 8, FLOAT16), (120, 7, 80, BFLOAT16), (120, 7, 128, FLOAT16))]
# On Hopper a block has all keys, of up to 128, 192 or 256. On one of 8 multiprocessors a block has two heads; heads
# share keys; queries see none, or not the last keys; tiles are not full.
SHORT = [
    (AttentionBackward, dict(queries=70, keys=20, heads=2, width=64, type=BFLOAT16)),
    (AttentionBackward, dict(batch=9, queries=66, keys=70, heads=1, width=24, causal=1)),
    (AttentionBackward, dict(queries=120, keys=130, heads=2, kv_heads=1, width=64, causal=1, type=BFLOAT16)),
    (AttentionBackward, dict(batch=5, queries=70, keys=150, heads=2, kv_heads=2, width=8, causal=1, layout="apart")),
    (AttentionBackward, dict(queries=20, keys=192, heads=2, kv_heads=1, width=40, layout="heads first",
                             deterministic=1)),
    (AttentionBackward, dict(batch=3, queries=140, keys=200, heads=1, width=16, causal=1, layout="longer")),
    (AttentionBackward, dict(batch=9, queries=9, keys=256, heads=1, width=56, type=BFLOAT16)),
]
ATTENTION += [
    *DIVIDED, *SHORT,
    (AttentionBackward, dict(batch=5, queries=30, keys=20, heads=2, kv_heads=2, width=24, causal=1)),  # none is divided
]
# In each type, of each gate; rows that are aligned and not, or apart; without biases or their gradients.
GATED = [
    *((GatedBackward, dict(rows=20, inputs=24, hidden=40, gate=gate, type=kind)) for gate in GATES
      for kind in (FLOAT16, BFLOAT16, FLOAT32, TF32, TF32X3)),
    *((GatedBackward, dict(rows=33, inputs=7, hidden=9, gate=1, type=kind, biases=()))
      for kind in (FLOAT16, BFLOAT16, FLOAT32, TF32, TF32X3)),
    *((GatedBackward, dict(rows=21, inputs=13, hidden=70, x_stride=16, out_stride=88, gate=2, type=kind))
      for kind in (BFLOAT16, TF32, TF32X3)),
    (GatedBackward, dict(rows=21, inputs=13, hidden=70, x_stride=16, out_stride=88, gate=3, type=FLOAT32)),
    *((GatedBackward, dict(rows=9, inputs=8, hidden=8, gate=5, biases=biases))
      for biases in ((), ("b1", "d_b2"), ("b2", "d_b1"), ("b1", "b2"), ("d_b1", "d_b2"))),
    *((GatedBackward, dict(rows=1, inputs=1, hidden=1, type=kind)) for kind in (BFLOAT16, FLOAT32, TF32, TF32X3)),
    (GatedBackward, dict(rows=1300, inputs=16, hidden=9, type=BFLOAT16, gate=1)),  # weights from slices of the rows
]
CALLS = [
    *GATED,
    (GatedBackward, {}),
    (GatedBackward, dict(rows=1, inputs=1, hidden=1)),
    (GatedBackward, dict(rows=65, inputs=7, hidden=9)),
    (GatedBackward, dict(rows=21, inputs=13, hidden=70, x_stride=16, out_stride=88)),
    (SoftmaxBackward, {}),
    (SoftmaxBackward, dict(rows=1, inputs=1, classes=1)),
    (SoftmaxBackward, dict(rows=65, inputs=7, classes=9)),
    (SoftmaxBackward, dict(rows=5, inputs=33, classes=300)),
    (CrossEntropyBackward, {}),
    (CrossEntropyBackward, dict(rows=1, inputs=1, classes=1)),
    (CrossEntropyBackward, dict(rows=65, inputs=7, classes=9)),
    (CrossEntropyBackward, dict(rows=5, inputs=33, classes=300)),
    *((kind, options | dict(type=type)) for type in (FLOAT16, BFLOAT16)
      for kind in (SoftmaxBackward, CrossEntropyBackward) for options in (
          dict(rows=16), dict(rows=1, inputs=1, classes=1), dict(rows=65, inputs=7, classes=9),
          dict(rows=5, inputs=33, classes=300), dict(rows=9, inputs=24, classes=601))),
    *((CrossEntropyBackward, dict(rows=30, hard=True, type=type)) for type in (FLOAT16, BFLOAT16, FLOAT32)),
    *((CrossEntropyBackward, dict(label_type=1, type=type)) for type in (FLOAT16, FLOAT32)),
    *ATTENTION,
]
SLOW = [
    (GatedBackward, dict(rows=300, inputs=64, hidden=72)),
    (SoftmaxBackward, dict(rows=150, inputs=60, classes=130)),
    (CrossEntropyBackward, dict(rows=150, inputs=60, classes=130)),
    *((kind, dict(rows=rows, inputs=20, classes=classes, type=type)) for rows, classes in ((150, 130), (6, 5001))
      for kind in (SoftmaxBackward, CrossEntropyBackward) for type in (FLOAT16, BFLOAT16)),
    (AttentionBackward, dict(queries=150, keys=300, heads=2, width=128, causal=1, type=BFLOAT16)),
    (AttentionBackward, dict(queries=300, keys=280, heads=1, width=64, causal=1)),
    (AttentionBackward, dict(queries=300, keys=280, heads=2, kv_heads=1, width=256, causal=1, deterministic=1)),
]


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


@pytest.mark.parametrize("gate", GATES)
def test_slopes_are_differences(gate):
    """What the tests above compare with: the slope of a gate is a difference of its values, but for what is of third
    order, and for what rounding does to a difference."""
    value, slope, steepest, _ = GATES[gate]
    step = 2.0**-10
    for i in range(-800, 801):
        s = (i + 0.5) / 100
        assert abs((value(s + step) - value(s - step)) / (2 * step) - slope(s)) <= 4 * step**2 + 2.0**-40, s
        assert abs(slope(s)) <= steepest


@pytest.mark.parametrize("capability, taken_for", [("8.0", ""), ("8.6", ""), ("12.0", ""), ("9.0", "8.0")])
def test_gates_on_other_gpus(capability, taken_for):
    """Forward and backward, in each type."""
    said = run_as_another_gpu(capability, """
from test_library import GATED, GATED_FP32
import test_library_gradients as gradients
calls = GATED[::2] + GATED_FP32[::2] + gradients.GATED[::2]
for kind, options in calls:
    run(kind, **options)
print(len(calls) - len(ways), "are wrong")
""", FUSED_KERNELS_CAPABILITY=taken_for)
    assert said == "0 are wrong\n"


# A row; tiles for some blocks and not for others, the last one not whole; all columns; rows that are apart.
ON_CHIP = [
    (GatedBackward, dict(rows=1, inputs=8, hidden=8)),
    (GatedBackward, dict(rows=600, inputs=40, hidden=24, type=BFLOAT16, gate=1)),
    (GatedBackward, dict(rows=300, inputs=128, hidden=64)),
    (GatedBackward, dict(rows=150, inputs=13, hidden=61, x_stride=16, out_stride=72, gate=2, biases=())),
]


@pytest.mark.parametrize("capability, taken_for", [("8.0", ""), ("8.6", ""), ("9.0", "8.0")])
def test_a_layer_of_few_columns_has_its_gradients_by_one_kernel(capability, taken_for):
    said = run_as_another_gpu(capability, """
from test_library_gradients import ON_CHIP
for kind, options in ON_CHIP:
    run(kind, **options)
print({way.split(" for ")[0] for way in ways}, len(ways))
""", FUSED_KERNELS_CAPABILITY=taken_for, CUDA_CPU_MULTIPROCESSORS="2")
    assert said == f"{ {'one kernel'} } {len(ON_CHIP)}\n"


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("type", [FLOAT16, BFLOAT16, TF32])
def test_a_gate_is_tuned(library, type, gate):
    """Each of the ways that are tried is right, or the one that is kept would not be."""
    call = GatedBackward(library, rows=40, inputs=16, hidden=24, type=type, gate=gate)
    assert library.fk_tune(1) == OK
    try:
        assert call.call() == OK, library.fk_last_error()
    finally:
        assert library.fk_tune(0) == OK
    call.run_twice()


@pytest.mark.parametrize("capability, taken_for", [("8.0", ""), ("8.6", ""), ("12.0", ""), ("9.0", "8.0"), ("9.0", "")])
def test_attention_on_other_gpus(capability, taken_for):
    said = run_as_another_gpu(capability, f"""
from test_library_gradients import ATTENTION
for kind, options in ATTENTION:
    run(kind, **options)
    assert {b"wgmma" if (capability, taken_for) == ("9.0", "") else b"mma.sync"!r} in library.fk_last_way()
print(len(ATTENTION), "are right")
""", FUSED_KERNELS_CAPABILITY=taken_for)
    assert said == f"{len(ATTENTION)} are right\n"


@pytest.mark.parametrize("words, options", [
    *(("divided by", options) for _, options in DIVIDED),  # steps of few keys, among blocks that would have nothing to do
    *(("divided in runs", options) for _, options in RUNS),
    *(("keys in a block", options) for _, options in SHORT),  # all of few keys: then nothing is added up in memory
], ids=str)
def test_few_keys_on_a_hopper_of_8_multiprocessors(words, options):
    said = run_as_another_gpu("9.0", f"""
from test_library_gradients import AttentionBackward
run(AttentionBackward, **{options})
print({words!r} in ways[0])
""", CUDA_CPU_MULTIPROCESSORS="8")
    assert said == "True\n"


def test_there_are_no_gradients_of_attention_before_compute_capability_8():
    said = run_as_another_gpu("7.5", """
import ctypes
from test_library_gradients import AttentionBackward
description, bytes = AttentionBackward.Description(264, 1, 0, 1, 8, 8, 1, 1, 64, scale=1), ctypes.c_size_t()
assert library.fk_attention_backward_workspace(ctypes.byref(description), ctypes.byref(bytes)) == BAD_DEVICE
print(library.fk_last_error().decode())
""")
    assert said == "attention's backward pass needs a GPU of compute capability 8.0 or newer; this one has 7.5\n"


@pytest.mark.parametrize("options, slices", [
    (dict(rows=1300, inputs=16, hidden=9), True), (dict(rows=600, inputs=136, hidden=66, out_stride=72), True),
    (dict(rows=1300, inputs=7, hidden=9), False)], ids=str)
def test_few_weights_of_many_rows_come_from_slices(library, options, slices):
    """Where rows of x are aligned."""
    call = GatedBackward(library, **options)
    call.run_twice()
    assert (b"slices" in library.fk_last_way()) == slices


@pytest.mark.parametrize("options", [
    dict(rows=1, inputs=1, classes=3, large=2.0**19), dict(large=2.0**19),
    dict(rows=9, inputs=7, classes=600, large=2.0**19),
    dict(rows=3, inputs=5, classes=2100, large=-2.0**19)], ids=str)
def test_large_logits(library, options):
    """Of a cross-entropy, whose log_sums then have been rounded by far more than a loss may be off."""
    CrossEntropyBackward(library, **options).run_twice()


IN_TURN = [
    (GatedBackward, [dict(rows=70, inputs=72, hidden=66), dict(rows=3, inputs=8, hidden=8), dict(rows=200)]),
    *((GatedBackward, [dict(rows=40, inputs=24, hidden=66, type=kind, gate=1),
                       dict(rows=3, inputs=8, hidden=8, type=kind), dict(rows=60, type=kind, gate=2)])
      for kind in (BFLOAT16, TF32X3)),
    *((kind, [dict(rows=70, inputs=40, classes=130), dict(rows=3, inputs=8, classes=5), dict(rows=9, classes=600)])
      for kind in (SoftmaxBackward, CrossEntropyBackward)),
    *((kind, [dict(rows=70, inputs=40, classes=130, type=BFLOAT16), dict(rows=3, inputs=8, classes=5, type=BFLOAT16),
              dict(rows=9, classes=300)]) for kind in (SoftmaxBackward, CrossEntropyBackward)),
    (AttentionBackward, [dict(keys=150, width=64), dict(queries=1, width=8), dict(queries=70, width=72)]),
    (AttentionBackward, [dict(keys=400, heads=1, width=64, deterministic=1), dict(width=8, deterministic=1),
                         dict(queries=70, keys=150, width=72, deterministic=1)]),
]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    """(Where attention has several tiles of keys it adds in another order in each call, unless it is asked not to.)"""
    in_order = all(each.get("deterministic") for each in options)
    call_in_turn(library, kind, options, same_bits=kind is not AttentionBackward or in_order)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


WRONG = {
    GatedBackward: [
        *((dict(rows=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
        *((dict(inputs=value), BAD_SHAPE) for value in (0, -5, (1 << 26) + 1, 1 << 40)),
        *((dict(hidden=value), BAD_SHAPE) for value in (0, -1, 1 << 21)),
        *((dict(x_stride=value), BAD_SHAPE) for value in (-8, 16, 1 << 40)),
        (dict(x_stride=26), BAD_ALIGNMENT), (dict(out_stride=41), BAD_ALIGNMENT), (dict(out_stride=32), BAD_SHAPE),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, 6, 77)),
        *((dict(gate=value), BAD_ARGUMENT) for value in (-1, 6)),
        (dict(type=FLOAT32, x_stride=26), BAD_ALIGNMENT), (dict(type=FLOAT32, rows=1 << 25), BAD_SHAPE),
        (dict(type=FLOAT32, inputs=1 << 25), BAD_SHAPE), (dict(type=TF32, out_stride=41), BAD_ALIGNMENT),
    ],
    **dict.fromkeys((SoftmaxBackward, CrossEntropyBackward), [
        *((dict(rows=value), BAD_SHAPE) for value in (0, -1, (1 << 24) + 1, 1 << 40)),
        *((dict(inputs=value), BAD_SHAPE) for value in (0, -1, (1 << 26) + 1)),
        *((dict(classes=value), BAD_SHAPE) for value in (0, -1, (1 << 24) + 1)),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, TF32, 77)),
        *((dict(label_type=value), BAD_ARGUMENT) for value in (-1, 2, 77)),
    ]),
    AttentionBackward: [
        *((dict(batch=value), BAD_SHAPE) for value in (0, -1, 1 << 40, 1 << 23)),
        *((dict(queries=value), BAD_SHAPE) for value in (0, -1, 1 << 30)),
        *((dict(keys=value), BAD_SHAPE) for value in (0, -1, 1 << 40)),
        *((dict(heads=value), BAD_SHAPE) for value in (0, -1, 1 << 30)),
        *((dict(kv_heads=value), BAD_SHAPE) for value in (0, -1, 3)),
        *((dict(width=value), BAD_SHAPE) for value in (0, -1, 12, 129, 257, 264)),
        *((dict(scale=value), BAD_ARGUMENT) for value in (0, -1, math.inf, math.nan)),
        (dict(causal=2), BAD_ARGUMENT), (dict(type=FLOAT32), BAD_ARGUMENT),
        *((dict(deterministic=value), BAD_ARGUMENT) for value in (-1, 2, 1 << 32)),
        (dict(d_out_strides=Strides(640, 32, 8)), BAD_SHAPE), (dict(k_strides=Strides(0, -16, 0)), BAD_SHAPE),
        (dict(d_v_strides=Strides(0, 1 << 40, 0)), BAD_SHAPE), (dict(d_q_strides=Strides(0, 16, 16)), BAD_SHAPE),
        (dict(queries=(1 << 26) + 1, d_q_strides=Strides(0, 1 << 38, 16)), BAD_SHAPE),  # 2^64 elements
        *((dict([(f"{name}_strides", Strides(0, 36, 16))]), BAD_ALIGNMENT) for name in AttentionBackward.NAMES
          if name != "log_sums"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG[kind])


@pytest.mark.parametrize("function", ["gating_backward", "gating_two_backward"])
def test_more_weights_than_a_grid_has_tiles_for(library, function):
    """Their number is more than 32 bits hold."""
    layer = fused_kernels.fk_gating(type=FLOAT16, rows=1 << 15, inputs=1 << 26, hidden=1 << 20)
    layer.size, needed = ctypes.sizeof(layer), ctypes.c_size_t(77)
    assert getattr(library, f"fk_{function}_workspace")(ctypes.byref(layer), ctypes.byref(needed)) == BAD_SHAPE
    assert library.fk_last_error() == b"this device has no way to compute this shape"
    assert needed.value == 77


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library, **(dict(width=72) if kind == AttentionBackward else {})))
