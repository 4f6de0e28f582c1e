"""The library's softmax(x W), and its cross-entropy, called as in test_library.py."""

import ctypes
import math
import struct

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, BYTES, FLOAT16, FLOAT32, OK, ROUNDING, SIZE, TF32, Call,
                          call_at_the_same_time, call_in_turn, fused_kernels, in_turn, library, name_of, numbers,
                          packed, refuse_a_damaged_workspace, refuse_what_is_damaged, run_as_another_gpu)

HALVES = (FLOAT16, BFLOAT16)
INT64, INT32 = fused_kernels.FK_LABEL_INT64, fused_kernels.FK_LABEL_INT32


def as_expected(found, expected, bound):
    """Whether each number is no further from what is expected than that, or the same infinity, or NaN as well."""
    return len(found) == len(expected) and all(
        math.isnan(f) if math.isnan(e) else f == e or abs(f - e) <= b for f, e, b in zip(found, expected, bound))


class OfLogits(Call):
    Description = fused_kernels.fk_softmax

    def operands(self, rows, inputs, classes, type, seed, large, hard):
        """x and w, packed, and the logits, which are exact in fp32.

        large: a number that is added to all logits, beyond fp16's range as a product of numbers that are not.
        hard: every third class has a logit of -inf, and so has every fourth row in all classes."""
        self.x = [numbers(inputs, seed + i) for i in range(rows)]
        self.w = [numbers(classes, seed + 3 * i) for i in range(inputs)]
        if large:
            factor = 1.0 if type == FLOAT32 else 512.0
            for row in self.x:
                row[0] = large / factor
            self.w[0] = [factor] * classes
        if hard:
            for i, row in enumerate(self.x):
                row[0], row[1] = -math.inf if i % 4 == 3 else 0.5, 1.0
            self.w[0], self.w[1] = [1.0] * classes, [-math.inf if c % 3 == 1 else 0.0 for c in range(classes)]
        columns = list(zip(*self.w))
        self.logits = [[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.x]
        return {"x": packed(sum(self.x, []), type), "w": packed(sum(self.w, []), type)}


class Softmax(OfLogits):
    NAME, NAMES, WRITTEN = "softmax", ("x", "w", "probs"), ("probs",)

    def __init__(self, library, rows=20, inputs=24, classes=40, seed=0, type=FLOAT32, large=0, hard=False):
        operands = self.operands(rows, inputs, classes, type, seed, large, hard)
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, classes)
        super().__init__(library, description, operands | {"probs": b"\xff" * (BYTES[type] * rows * classes)})

    def result_is_right(self):
        of, expected = self.description, []
        for logits in self.logits:
            largest = max(logits)
            terms = [math.exp(logit - largest) for logit in logits] if largest > -math.inf else [math.nan] * of.classes
            total = sum(terms)
            expected += [term / total for term in terms]
        # Logits of these numbers are exact in fp32; what is rounded are exponentials and their sum, and then to the
        # type. An exponential below 2^-126 may be 0; fp16 has nothing between multiples of 2^-24.
        rounding, least = 1.01 * ROUNDING.get(of.type, 0), 2.0**-25 if of.type == FLOAT16 else 2.0**-125
        bound = [(2.0**-20 + rounding) * value + least for value in expected]
        return as_expected(self.found("probs", of.type, of.rows, of.classes), expected, bound)


class CrossEntropy(OfLogits):
    NAME, NAMES = "cross_entropy", ("x", "w", "labels", "losses", "logits", "log_sums")
    WRITTEN = ("losses", "logits", "log_sums")

    def __init__(self, library, rows=20, inputs=24, classes=40, seed=0, large=0, type=FLOAT32, label_type=INT64,
                 hard=False):
        operands = self.operands(rows, inputs, classes, type, seed, large, hard)
        far = 1 << 40 if label_type == INT64 else (1 << 31) - 1
        self.labels = [(-100, classes, far)[i % 3] if i % 7 == 6 else (seed + 5 * i) % classes for i in range(rows)]
        description = self.Description(ctypes.sizeof(self.Description), type, rows, inputs, classes, label_type)
        super().__init__(library, description, operands | {
            "labels": struct.pack(f"{rows}{'i' if label_type == INT32 else 'q'}", *self.labels),
            "losses": b"\xff" * (4 * rows), "logits": b"\xff" * (4 * rows * classes),
            "log_sums": b"\xff" * (4 * rows)})

    def result_is_right(self):
        """All results are fp32, whatever the type is."""
        of, log_sums, losses = self.description, [], []
        for own, label in zip(self.logits, self.labels):
            largest, is_class = max(own), 0 <= label < of.classes
            if largest == -math.inf:
                log_sums.append(largest)
                losses.append(math.nan if is_class else 0)
                continue
            log_sum = math.log(sum(math.exp(logit - largest) for logit in own))
            log_sums.append(largest + log_sum)
            losses.append(log_sum - (own[label] - largest) if is_class else 0)
        # Logits are exact; a sum of exponentials is off by some roundings, and its logarithm by as much.
        bounds = [[2.0**-20 + 2.0**-22 * abs(value) for value in values] for values in (log_sums, losses)]
        logits = sum(self.logits, [])
        return (as_expected(self.found("logits", FLOAT32, of.rows, of.classes), logits, [0] * len(logits))
                and as_expected(self.found("log_sums", FLOAT32, of.rows, 1), log_sums, bounds[0])
                and as_expected(self.found("losses", FLOAT32, of.rows, 1), losses,
                                [0 if not 0 <= label < of.classes else bound
                                 for label, bound in zip(self.labels, bounds[1])]))


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
# In fp16 and bf16. Each count of classes has another kernel for its rows, or is no multiple of 4; and a depth that is
# cut into slices.
OF_HALVES = [
    dict(rows=1, inputs=1, classes=1),
    dict(rows=65, inputs=7, classes=9),
    dict(rows=33, inputs=65, classes=130),
    dict(rows=9, inputs=40, classes=640),
    dict(rows=3, inputs=20, classes=1501),
    dict(rows=2, inputs=1100, classes=24),
]
SLOW_HALVES = [
    dict(rows=3, inputs=20, classes=3000),
    dict(rows=3, inputs=20, classes=5003),  # of cross-entropy, more than one block a row
    dict(rows=2, inputs=9, classes=8500),  # of softmax, too
    dict(rows=520, inputs=12, classes=200),
    dict(rows=300, inputs=136, classes=400),
]
CALLS = CALLS + [each | dict(type=type) for type in HALVES for each in OF_HALVES]
SLOW = SLOW + [each | dict(type=type) for type in HALVES for each in SLOW_HALVES]


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


@pytest.mark.parametrize("options", [dict(classes=130), dict(rows=3, classes=9001)], ids=str)
@pytest.mark.parametrize("type", HALVES)
def test_logits_beyond_the_range_of_fp16(library, type, options):
    """Softmax depends on their differences alone, and nothing rounds them before it."""
    Softmax(library, **options, type=type, large=2.0**17).run_twice()


@pytest.mark.parametrize("options", [dict(), dict(rows=9, classes=1501), dict(rows=5, inputs=9, classes=4500),
                                     dict(rows=5, inputs=9, classes=8500)], ids=str)
@pytest.mark.parametrize("type", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_logits(library, kind, type, options):
    """Of classes and of whole rows. The loss of a class whose logit is -inf is inf."""
    kind(library, **options, type=type, hard=True).run_twice()


@pytest.mark.parametrize("type", (*HALVES, FLOAT32))
@pytest.mark.parametrize("options", [dict(), dict(rows=65, classes=9), dict(rows=9, classes=1501),
                                     dict(rows=9, inputs=9, classes=4500)], ids=str)
def test_labels_of_32_bits(library, type, options):
    CrossEntropy(library, **options, type=type, label_type=INT32).run_twice()


def test_labels_are_of_64_bits_for_a_caller_that_knows_no_other(library):
    """Whose description ends before label_type."""
    call = CrossEntropy(library)
    call.description.size, call.description.label_type = fused_kernels.fk_softmax.label_type.offset, 77
    call.run_twice()


ON_OTHER_GPUS = """
from test_library_softmax import CALLS, HALVES, KINDS
from test_library_gradients import CALLS as BACKWARD, CrossEntropyBackward, SoftmaxBackward
for kind in KINDS:
    for options in CALLS:
        if options.get("type") in HALVES:
            run(kind, **options)
    for type in HALVES:
        run(kind, type=type, large=2.0**17)
        run(kind, type=type, hard=True)
for kind, options in BACKWARD:
    if kind in (CrossEntropyBackward, SoftmaxBackward) and options.get("type") in HALVES:
        run(kind, **options)
assert all("mma.sync" in way for way in ways), ways
print(len(ways) > 40)
"""


@pytest.mark.parametrize("capability, taken_for", [("8.0", ""), ("8.6", ""), ("12.0", ""), ("9.0", "8.0")])
def test_halves_on_other_gpus(capability, taken_for):
    """By mma.sync, as the way says."""
    assert run_as_another_gpu(capability, ON_OTHER_GPUS, FUSED_KERNELS_CAPABILITY=taken_for) == "True\n"


def test_there_are_no_halves_before_compute_capability_8():
    said = run_as_another_gpu("7.5", """
import ctypes
from test_library_softmax import BFLOAT16, FLOAT16, Softmax
for type in (FLOAT16, BFLOAT16):
    for name in ("softmax", "softmax_backward", "cross_entropy", "cross_entropy_backward"):
        description, bytes = Softmax.Description(48, type, 8, 8, 8), ctypes.c_size_t()
        query = getattr(library, f"fk_{name}_workspace")
        assert query(ctypes.byref(description), ctypes.byref(bytes)) == BAD_DEVICE
print(library.fk_last_error().decode())
""")
    assert said == "softmax in fp16 or bf16 needs a GPU of compute capability 8.0 or newer; this one has 7.5\n"


IN_TURN = [
    (kind, [dict(rows=40, inputs=136, classes=300), dict(rows=1, inputs=8, classes=5),
            dict(rows=9, inputs=40, classes=1100)]) for kind in KINDS
] + [(kind, [dict(rows=3, classes=4500), dict(rows=65, inputs=7, classes=9), dict(rows=70, inputs=40, classes=130)])
     for kind in KINDS
] + [(kind, [dict(rows=70, inputs=40, classes=130, type=FLOAT16), dict(rows=3, inputs=9, classes=4500, type=FLOAT16),
             dict(rows=20, inputs=136, classes=9)]) for kind in KINDS]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


@pytest.mark.parametrize("options, slices", [(dict(rows=65, inputs=40, classes=36), b""),
                                             (dict(rows=100, inputs=2000, classes=100), b"; slices: ")])
def test_the_logits_of_losses_come_from_products(library, options, slices):
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
        *((dict(type=value), BAD_ARGUMENT) for value in (0, TF32, 77)),
        *((dict(label_type=value), BAD_ARGUMENT) for value in (-1, 2, 77)),
        *([(dict(label_type=INT32), BAD_ARGUMENT)] if kind is Softmax else [])])


@pytest.mark.parametrize("type", HALVES)
def test_sizes_of_halves_are_those_of_fp32(library, type):
    """A description of the largest sizes has a plan: of many classes, and of many rows."""
    for rows, inputs, classes in ((1, 1, 65535 * 4096), (1 << 30, 1, 1), (1, 1 << 30, 1), (1 << 30, 8, 8)):
        description, needed = Softmax.Description(48, type, rows, inputs, classes), SIZE()
        code = library.fk_softmax_workspace(ctypes.byref(description), ctypes.byref(needed))
        assert code == OK, (rows, inputs, classes, library.fk_last_error())
        assert needed.value >= 4 * rows * classes  # logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
