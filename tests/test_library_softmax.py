"""The library's softmax(x W), called as in test_library.py."""

import ctypes
import math

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, FLOAT16, FLOAT32, Call, call_at_the_same_time,
                          fused_kernels, library, name_of, near, numbers, packed, refuse_a_damaged_workspace,
                          refuse_what_is_damaged)


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


@pytest.mark.parametrize("options", [
    *(pytest.param(each, id=name_of(Softmax, each)) for each in CALLS),
    *(pytest.param(each, id=name_of(Softmax, each), marks=pytest.mark.extensive) for each in SLOW),
])
def test_result(library, options):
    Softmax(library, **options).run_twice()


def test_two_threads_with_two_streams_call_at_the_same_time(library):
    call_at_the_same_time(library, Softmax)


WRONG = [
    *((dict(rows=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
    *((dict(inputs=value), BAD_SHAPE) for value in (0, -1, 1 << 40)),
    *((dict(classes=value), BAD_SHAPE) for value in (0, -1, 65536 * 4096)),
    *((dict(type=value), BAD_ARGUMENT) for value in (0, FLOAT16, BFLOAT16)),
]


def test_what_is_damaged_is_refused(library):
    refuse_what_is_damaged(library, Softmax, WRONG)


def test_a_damaged_workspace_is_refused(library):
    refuse_a_damaged_workspace(Softmax(library))
