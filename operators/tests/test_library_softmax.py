"""The library's softmax(x W), and its cross-entropy, called as in test_library.py."""

import ctypes
import math
import struct

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, FLOAT16, FLOAT32, Call, call_at_the_same_time,
                          call_in_turn, fused_kernels, in_turn, library, name_of, near, numbers, packed,
                          refuse_a_damaged_workspace, refuse_what_is_damaged)


class Softmax(Call):
    NAME, NAMES, WRITTEN = "softmax", ("x", "w", "probs"), ("probs",)
    Description = fused_kernels.fk_softmax

    def __init__(self, library, rows=20, inputs=24, classes=40, seed=0):
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.w = [numbers(classes, seed + 3 * i) for i in range(inputs)]
        description = self.Description(ctypes.sizeof(self.Description), FLOAT32, rows, inputs, classes)
        super().__init__(library, description, {
            "x": packed(sum(self.x, []), FLOAT32), "w": packed(sum(self.w, []), FLOAT32),
            "probs": b"\xff" * (4 * rows * classes)})

    def result_is_right(self):
        of, expected = self.description, []
        columns = list(zip(*self.w))
        for row in self.x:
            logits = [sum(a * b for a, b in zip(row, column)) for column in columns]
            largest = max(logits)
            terms = [math.exp(logit - largest) for logit in logits]
            total = sum(terms)
            expected += [term / total for term in terms]
        # Logits of these numbers are exact in fp32; what is rounded are exponentials and their sum. An
        # exponential below 2^-126 may be 0.
        bound = [2.0**-20 * value + 2.0**-125 for value in expected]
        return near(self.found("probs", FLOAT32, of.rows, of.classes), expected, bound)


class CrossEntropy(Call):
    NAME, Description = "cross_entropy", fused_kernels.fk_softmax
    NAMES = ("x", "w", "labels", "losses", "logits", "log_sums")
    WRITTEN = ("losses", "logits", "log_sums")

    def __init__(self, library, rows=20, inputs=24, classes=40, seed=0, large=0):
        """large: a number that is added to all logits."""
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.w = [numbers(classes, seed + 3 * i) for i in range(inputs)]
        if large:
            for row in self.x:
                row[0] = large
            self.w[0] = [1.0] * classes
        self.labels = [(-100, classes, 1 << 40)[i % 3] if i % 7 == 6 else (seed + 5 * i) % classes for i in range(rows)]
        description = self.Description(ctypes.sizeof(self.Description), FLOAT32, rows, inputs, classes)
        super().__init__(library, description, {
            "x": packed(sum(self.x, []), FLOAT32), "w": packed(sum(self.w, []), FLOAT32),
            "labels": struct.pack(f"{rows}q", *self.labels),
            "losses": b"\xff" * (4 * rows), "logits": b"\xff" * (4 * rows * classes),
            "log_sums": b"\xff" * (4 * rows)})

    def result_is_right(self):
        of, logits, log_sums, losses = self.description, [], [], []
        columns = list(zip(*self.w))
        for row, label in zip(self.x, self.labels):
            own = [sum(a * b for a, b in zip(row, column)) for column in columns]
            largest = max(own)
            log_sums.append(largest + math.log(sum(math.exp(logit - largest) for logit in own)))
            is_class, own = 0 <= label < of.classes, [logit - largest for logit in own]
            losses.append(math.log(sum(map(math.exp, own))) - own[label] if is_class else 0)
            logits += [logit + largest for logit in own]
        # Logits are exact; a sum of exponentials is off by some roundings, and its logarithm by as much.
        bounds = [[2.0**-20 + 2.0**-22 * abs(value) for value in values] for values in (log_sums, losses)]
        return (near(self.found("logits", FLOAT32, of.rows, of.classes), logits, [0] * len(logits))
                and near(self.found("log_sums", FLOAT32, of.rows, 1), log_sums, bounds[0])
                and near(self.found("losses", FLOAT32, of.rows, 1), losses,
                         [0 if not 0 <= label < of.classes else bound for label, bound in zip(self.labels, bounds[1])]))


KINDS = [Softmax, CrossEntropy]
CALLS = [
    {},
    dict(rows=1, inputs=1, classes=1),
    dict(rows=65, inputs=7, classes=9),  # few columns
    dict(rows=5, inputs=130, classes=133),  # few rows
    dict(rows=33, inputs=65, classes=130),
    dict(rows=40, inputs=36, classes=300),
]
SLOW = [
    dict(rows=3, inputs=20, classes=9001),  # more than one block a row
    dict(rows=150, inputs=129, classes=517),
    dict(rows=20, inputs=8, classes=5000),
    dict(rows=2100, inputs=12, classes=10),
]


@pytest.mark.parametrize("kind, options", [
    pytest.param(kind, each, id=name_of(kind, each), marks=[pytest.mark.extensive] if each in SLOW else [])
    for kind in KINDS for each in CALLS + SLOW])
def test_result(library, kind, options):
    kind(library, **options).run_twice()


@pytest.mark.parametrize("options", [
    dict(rows=1, inputs=1, classes=3, large=1e8), dict(rows=3, inputs=20, classes=4500, large=2.0**17),
    *(dict(**each, large=2.0**17) for each in CALLS if each.get("inputs") != 1)], ids=str)
def test_large_logits(library, options):
    """A loss is computed relative to the largest: fp32 has no digits left for it in the logarithm of the sum."""
    CrossEntropy(library, **options).run_twice()


IN_TURN = [
    (kind, [dict(rows=40, inputs=136, classes=300), dict(rows=1, inputs=8, classes=5),
            dict(rows=9, inputs=40, classes=1100)]) for kind in KINDS
] + [(kind, [dict(rows=3, classes=4500), dict(rows=65, inputs=7, classes=9), dict(rows=70, inputs=40, classes=130)])
     for kind in KINDS]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


@pytest.mark.parametrize("options, slices", [(dict(rows=65, inputs=40, classes=36), b""),
                                             (dict(rows=100, inputs=2000, classes=100), b"; half fused; slices: ")])
def test_the_logits_of_losses_come_from_tensor_cores(library, options, slices):
    """Of few logits of many inputs each is the sum of slices."""
    CrossEntropy(library, **options).run_twice()
    assert slices in library.fk_last_way(), library.fk_last_way()


MOST = {Softmax: (1 << 30, (1 << 40) - 1, 65535 * 4096), CrossEntropy: (1 << 24, 1 << 26, 1 << 24)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    rows, inputs, classes = MOST[kind]
    refuse_what_is_damaged(library, kind, [
        *((dict(rows=value), BAD_SHAPE) for value in (0, -1, rows + 1, 1 << 40)),
        *((dict(inputs=value), BAD_SHAPE) for value in (0, -1, inputs + 1)),
        *((dict(classes=value), BAD_SHAPE) for value in (0, -1, classes + 1)),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, FLOAT16, BFLOAT16))])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
