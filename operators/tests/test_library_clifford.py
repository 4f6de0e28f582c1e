"""The library's products of multivectors, called as in test_library.py."""

import ctypes
import itertools
import math

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, FLOAT16, FLOAT32, Call, call_at_the_same_time,
                          call_in_turn, for_each, fused_kernels, in_turn, library, near, numbers, packed,
                          refuse_a_damaged_workspace, refuse_what_is_damaged, run_as_another_gpu)

FP32 = 2.0**-18  # fp32's own errors, of the size of the terms
EPSILON = 1e-6


class Algebra:
    """Blades as lists of basis vectors that are sorted, and products of them by sorting."""

    def __init__(self, p, q, r):
        vectors = range(p + q + r)
        squares = [1] * p + [-1] * q + [0] * r
        blades = [blade for grade in range(len(vectors) + 1) for blade in itertools.combinations(vectors, grade)]
        blades.sort(key=lambda blade: (len(blade), sum(1 << v for v in blade)))
        at = {blade: number for number, blade in enumerate(blades)}
        self.grade = [len(blade) for blade in blades]
        products = []  # (i, j, k, sign): e_i e_j = sign e_k
        for i, j in itertools.product(range(len(blades)), repeat=2):
            word, sign, swapped = list(blades[i] + blades[j]), 1, True
            while swapped:
                swapped = False
                for a in range(len(word) - 1):
                    if word[a] > word[a + 1]:
                        word[a], word[a + 1], sign, swapped = word[a + 1], word[a], -sign, True
            for v in vectors:
                if word.count(v) == 2:
                    word.remove(v)
                    word.remove(v)
                    sign *= squares[v]
            if sign:
                products.append((i, j, at[tuple(word)], sign))
        of_grades = sorted({(self.grade[i], self.grade[k], self.grade[j]) for i, j, k, _ in products})
        self.triples = len(of_grades)
        self.terms = [(i, j, k, sign, of_grades.index((self.grade[i], self.grade[k], self.grade[j])))
                      for i, j, k, sign in products]
        self.planes = sorted({(t, k) for _, _, k, _, t in self.terms})


def gate(s):
    return (1 + math.erf(s / math.sqrt(2))) / 2


def gate_slope(s):
    return math.exp(-s * s / 2) / math.sqrt(2 * math.pi)


class Multivectors(Call):
    """What is in lists is of a blade, then of an element of its plane. Beside each value stands its size: the sum of
    its terms' sizes, to which errors are relative."""
    ERROR = FP32

    def __init__(self, library, signature=(3, 0, 0), batch=5, features=12, normed=1, seed=0):
        self.algebra = Algebra(*signature)
        self.plane, self.normed = batch * features, normed
        count = len(self.algebra.grade) * self.plane
        weights = self.algebra.triples * self.weights_of(features)
        counts = {name: weights if name in ("w", "d_w") else count for name in self.NAMES}
        self.numbers = {name: numbers(size, seed + i) for i, (name, size) in enumerate(counts.items())}
        description = self.Description(ctypes.sizeof(self.Description), FLOAT32, *signature, normed, batch, features)
        super().__init__(library, description, {
            name: b"\xff" * (4 * len(values)) if name in self.WRITTEN else packed(values, FLOAT32)
            for name, values in self.numbers.items()})

    def blades(self, name):
        values = self.numbers[name]
        return [values[at:at + self.plane] for at in range(0, len(values), self.plane)]

    def gated(self, name):
        values = self.blades(name)
        gates = [gate(scalar) for scalar in values[0]]
        return [[g * value for g, value in zip(gates, of_blade)] for of_blade in values]

    def products(self):
        """P[t, k] of x' and y', and sizes."""
        x, y = self.gated("x"), self.gated("y")
        zeros = [0.0] * self.plane
        P, size = ({plane: zeros for plane in self.algebra.planes} for _ in range(2))
        for i, j, k, sign, t in self.algebra.terms:
            P[t, k] = [p + sign * a * b for p, a, b in zip(P[t, k], x[i], y[j])]
            size[t, k] = [p + abs(a * b) for p, a, b in zip(size[t, k], x[i], y[j])]
        return P, size

    def normalization(self, z, size):
        """r[c][n], and relative errors of it in units of ERROR."""
        of, grades = self.description, max(self.algebra.grade) + 1
        r, off = ([[1.0] * of.batch for _ in range(grades)] for _ in range(2))
        for c in range(grades) if self.normed else ():
            for n in range(of.batch):
                rows = [slice(n * of.features, (n + 1) * of.features)] * len(z)
                pairs = [(value, its) for k, row in enumerate(rows) if self.algebra.grade[k] == c
                         for value, its in zip(z[k][row], size[k][row])]
                squares = sum(value * value for value, _ in pairs) / of.features + EPSILON
                r[c][n] = 1 / math.sqrt(squares)
                off[c][n] = 1 + sum(abs(value) * its for value, its in pairs) / of.features / squares
        return r, off

    def forward_in_fp64(self):
        P, of_P = self.products()
        blades = range(len(self.algebra.grade))
        z, size = ([[0.0] * self.plane for _ in blades] for _ in range(2))
        for t, k in self.algebra.planes:
            z[k] = [a + b for a, b in zip(z[k], self.weighted(t, P[t, k]))]
            size[k] = [a + b for a, b in zip(size[k], self.weighted(t, of_P[t, k], abs))]
        return P, of_P, z, size, *self.normalization(z, size)

    def row(self, at):
        return at // self.description.features


class Forward(Multivectors):
    WRITTEN, NAMES = ("out",), ("x", "y", "w", "out")

    def result_is_right(self):
        _, _, z, size, r, off = self.forward_in_fp64()
        expected, bound = [], []
        for k, c in enumerate(self.algebra.grade):
            for at, (value, its) in enumerate(zip(z[k], size[k])):
                scale, wrong = r[c][self.row(at)], off[c][self.row(at)]
                expected.append(value * scale)
                bound.append(self.ERROR * scale * (its + abs(value) * wrong))
        return near(self.found("out", FLOAT32, 1, len(expected)), expected, bound)


class Backward(Multivectors):
    WRITTEN, NAMES = ("d_x", "d_y", "d_w"), ("d_out", "x", "y", "w", "d_x", "d_y", "d_w")

    @classmethod
    def functions(cls, library):
        return getattr(library, f"fk_{cls.NAME}_workspace"), getattr(library, f"fk_{cls.NAME}")

    def gradients_of_z(self, z, size, r, off):
        """dz and its size: of r d - r^3 z sum(d z) / features."""
        F, grade = self.description.features, self.algebra.grade
        d = self.blades("d_out")
        totals = {}  # of a grade and a row, the sum of d z, and how far it is off
        for c in range(max(grade) + 1):
            for n in range(self.description.batch):
                same = [(k, i) for k in range(len(grade)) if grade[k] == c for i in range(n * F, (n + 1) * F)]
                totals[c, n] = (sum(d[k][i] * z[k][i] for k, i in same),
                                sum(abs(d[k][i]) * size[k][i] for k, i in same))
        dz, of_dz = [], []
        for k, c in enumerate(grade):
            values, sizes = [], []
            for at in range(self.plane):
                n = self.row(at)
                scale, wrong = r[c][n], off[c][n]
                value, its = scale * d[k][at], scale * abs(d[k][at]) * wrong
                if self.normed:
                    total, far = totals[c, n]
                    value -= scale**3 * z[k][at] * total / F
                    its += scale**3 * (size[k][at] * (abs(total) + far) + 3 * wrong * abs(z[k][at] * total)) / F
                values.append(value)
                sizes.append(its)
            dz.append(values)
            of_dz.append(sizes)
        return dz, of_dz

    def result_is_right(self):
        algebra, blades = self.algebra, range(len(self.algebra.grade))
        P, of_P, z, size, r, off = self.forward_in_fp64()
        dz, of_dz = self.gradients_of_z(z, size, r, off)
        d_w, of_w = self.gradients_of_w(P, of_P, dz, of_dz)
        ok = near(self.found("d_w", FLOAT32, 1, len(d_w)), d_w, [self.ERROR * its for its in of_w])
        dP = {(t, k): self.weighted_back(t, dz[k]) for t, k in algebra.planes}
        of_dP = {(t, k): self.weighted_back(t, of_dz[k], abs) for t, k in algebra.planes}
        for name, other in (("x", "y"), ("y", "x")):
            own, factors = self.blades(name), self.gated(other)
            d, its = ([[0.0] * self.plane for _ in blades] for _ in range(2))  # of x', or y'
            for i, j, k, sign, t in algebra.terms:
                one, two = (i, j) if name == "x" else (j, i)
                d[one] = [a + sign * b * c for a, b, c in zip(d[one], factors[two], dP[t, k])]
                its[one] = [a + abs(b) * c for a, b, c in zip(its[one], factors[two], of_dP[t, k])]
            expected, bound = [], []
            for k in blades:
                for at, scalar in enumerate(own[0]):
                    value, far = gate(scalar) * d[k][at], gate(scalar) * its[k][at]
                    if k == 0:
                        slope = gate_slope(scalar)
                        value += slope * sum(d[i][at] * own[i][at] for i in blades)
                        far += slope * sum(its[i][at] * abs(own[i][at]) for i in blades)
                    expected.append(value)
                    bound.append(self.ERROR * far)
            ok = near(self.found(f"d_{name}", FLOAT32, 1, len(expected)), expected, bound) and ok
        return ok


class OfFeatures:
    """w (features, triples)."""
    Description = fused_kernels.fk_clifford

    @staticmethod
    def weights_of(features):
        return features

    def weighted(self, t, plane, of_weight=float):
        F, T = self.description.features, self.algebra.triples
        return [of_weight(self.numbers["w"][at % F * T + t]) * value for at, value in enumerate(plane)]

    weighted_back = weighted

    def gradients_of_w(self, P, of_P, dz, of_dz):
        F, T = self.description.features, self.algebra.triples
        d_w, sizes = [0.0] * (F * T), [0.0] * (F * T)
        for t, k in self.algebra.planes:
            for at in range(self.plane):
                d_w[at % F * T + t] += P[t, k][at] * dz[k][at]
                sizes[at % F * T + t] += of_P[t, k][at] * of_dz[k][at]
        return d_w, sizes


class Clifford(OfFeatures, Forward):
    NAME = "clifford"


class CliffordBackward(OfFeatures, Backward):
    NAME = "clifford_backward"


class Connected:
    """w (triples, features, features). Products are rounded to TF32, which has these weights exactly; backward so are
    the gradients of z, which are the other factor then."""
    Description = fused_kernels.fk_clifford
    ERROR = 1.1 * 2.0**-11

    @staticmethod
    def weights_of(features):
        return features * features

    def mixed(self, t, plane, of_weight, place):
        """Of each row the product with a matrix, whose element (i, j) for result i and factor j is at place(i, j)."""
        F, w = self.description.features, self.numbers["w"]
        matrix = [[of_weight(w[t * F * F + place(i, j)]) for j in range(F)] for i in range(F)]
        rows = (plane[n:n + F] for n in range(0, self.plane, F))
        return [sum(a * b for a, b in zip(column, row)) for row in rows for column in matrix]

    def weighted(self, t, plane, of_weight=float):
        return self.mixed(t, plane, of_weight, lambda i, j: j * self.description.features + i)

    def weighted_back(self, t, plane, of_weight=float):
        return self.mixed(t, plane, of_weight, lambda i, j: i * self.description.features + j)

    def gradients_of_w(self, P, of_P, dz, of_dz):
        F, T = self.description.features, self.algebra.triples
        d_w, sizes = [0.0] * (F * F * T), [0.0] * (F * F * T)
        for t, k in self.algebra.planes:
            for n in range(0, self.plane, F):
                for i in range(F):
                    at = t * F * F + i * F
                    for j in range(F):
                        d_w[at + j] += P[t, k][n + i] * dz[k][n + j]
                        sizes[at + j] += of_P[t, k][n + i] * of_dz[k][n + j]
        return d_w, sizes


class CliffordConnected(Connected, Forward):
    NAME = "clifford_connected"


class CliffordConnectedBackward(Connected, Backward):
    NAME = "clifford_connected_backward"
    ERROR = 2.2 * 2.0**-11


KINDS = [Clifford, CliffordBackward, CliffordConnected, CliffordConnectedBackward]
CALLS = [(kind, options) for kind in (Clifford, CliffordBackward) for options in (
    {},
    dict(signature=(2, 0, 0), batch=1, features=1),
    dict(batch=3, features=13, normed=0),
    dict(signature=(2, 0, 0), batch=7, features=37),
    dict(signature=(3, 0, 1), batch=2, features=9),
    dict(signature=(1, 3, 0), batch=2, features=8),
    dict(signature=(4, 1, 0), batch=2, features=5),
)] + [(kind, options) for kind in (CliffordConnected, CliffordConnectedBackward) for options in (
    {},
    dict(signature=(2, 0, 0), batch=1, features=1),
    dict(signature=(2, 0, 0), batch=7, features=9, normed=0),
)]
SLOW = [(kind, options) for kind in (Clifford, CliffordBackward) for options in (
    dict(batch=40, features=64),
    dict(signature=(2, 0, 0), batch=3, features=1030),  # rows of two blocks
    dict(batch=2, features=1100),
    dict(signature=(4, 1, 0), batch=2, features=300),
)] + [(kind, options) for kind in (CliffordConnected, CliffordConnectedBackward) for options in (
    dict(signature=(2, 0, 0), batch=140, features=33),
    dict(batch=9, features=36),
)]


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


IN_TURN = [
    *((kind, [dict(signature=signature, batch=1, features=features) for features in (512, 64, 700)])
      for kind in (Clifford, CliffordBackward) for signature in fused_kernels.TRIPLES),
    *((kind, [dict(signature=(2, 0, 0), batch=140, features=36), dict(batch=3, features=8), dict(batch=9, features=36)])
      for kind in (CliffordConnected, CliffordConnectedBackward)),
]


ANYWHERE = """
import random
from test_library_clifford import Clifford, CliffordBackward, fused_kernels
draw = random.Random({seed})
for kind in (Clifford, CliffordBackward):
    for signature in fused_kernels.TRIPLES:
        most = 40 if sum(signature) < 4 else 12
        run(kind, signature=signature, batch=draw.randint(1, 9), features=draw.randint(1, most),
            normed=draw.randint(0, 1))
        run(kind, signature=signature, batch=draw.randint(1, 9), features=4 * draw.randint(1, most // 4))
    run(kind, batch=150, features=draw.randint(1, 9))
for features in (2 * draw.randint(481, 512), draw.randint(1025, 1100)):
    for kind in (Clifford, CliffordBackward):
        run(kind, batch=2, features=features)
print(len(ways), *(way.split(", ")[1] if "on chip" in way else way.split(":")[0] for way in ways[-4:]), sep="; ")
"""
STREAMED, TWICE, ONE_STAGE, TWO_STAGES = "rows streamed", "row read twice", "stages: 1", "stages: 2"


@pytest.mark.parametrize("capability, wide_rows", [
    ("7.5", [TWICE, TWICE]), ("8.0", [TWO_STAGES, "staged: 2"]),
    *((capability, [ONE_STAGE, "staged: 0"]) for capability in ("8.6", "8.9", "12.0")),
    ("9.0", [STREAMED, STREAMED]), ("10.0", [TWO_STAGES, "staged: 2"]),
])
def test_what_runs_on_each_gpu(capability, wide_rows):
    """At random shapes, among them rows that fill a block, and longer ones."""
    said = run_as_another_gpu(capability, ANYWHERE.format(seed=int(10 * float(capability))))
    of_longer_rows = wide_rows if capability == "9.0" else [TWICE, TWICE]
    assert said.strip().split("; ") == ["26", *wide_rows, *of_longer_rows]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


@pytest.mark.parametrize("signature", fused_kernels.TRIPLES, ids=str)
def test_triples(signature):
    assert fused_kernels.TRIPLES[signature] == Algebra(*signature).triples


WRONG = [
    *((dict(p=value), BAD_ARGUMENT) for value in (0, -1, 4, 1 << 30)),
    (dict(q=1), BAD_ARGUMENT), (dict(r=2), BAD_ARGUMENT), (dict(r=-1), BAD_ARGUMENT),
    *((dict(normed=value), BAD_ARGUMENT) for value in (-1, 2)),
    *((dict(batch=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
    *((dict(features=value), BAD_SHAPE) for value in (0, -1, 8193, 1 << 40)),
    (dict(features=4, batch=(1 << 28) + 1), BAD_SHAPE),
    (dict(p=5, q=5, r=5), BAD_ARGUMENT), (dict(p=3, q=-1, r=1), BAD_ARGUMENT),
    *((dict(type=value), BAD_ARGUMENT) for value in (0, FLOAT16, BFLOAT16)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG)


@pytest.mark.parametrize("signature", [(3, 0, 1), (1, 3, 0), (4, 1, 0)], ids=str)
def test_algebras_that_are_not_fully_connected(library, signature):
    call = CliffordConnected(library)
    call.description.p, call.description.q, call.description.r = signature
    assert call.call() == BAD_ARGUMENT
    assert "p, q, r are" in library.fk_last_error().decode()


@pytest.mark.parametrize("kind", [CliffordBackward, CliffordConnected, CliffordConnectedBackward])
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
