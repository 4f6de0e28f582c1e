"""The library's products of multivectors, called as in test_library.py."""

import ctypes
import functools
import itertools
import math
import random

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, BYTES, FLOAT16, FLOAT32, OK, ROUNDING, SIZE, TF32, Call,
                          call_at_the_same_time, call_in_turn, for_each, fused_kernels, in_turn, library, near, numbers,
                          packed, refuse_a_damaged_workspace, refuse_what_is_damaged, run_as_another_gpu)

from fused_kernels import geometric

FP32 = 2.0**-18  # fp32's own errors, of the size of the terms
EPSILON = 1e-6


@functools.lru_cache(None)
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
        self.blades, self.null = blades, {v for v in vectors if squares[v] == 0}

    def ordered(self, order):
        """Where each blade is in one of fk_order, and its sign there."""
        rank = {v: (v not in self.null, v) if order == 3 else (True, v) for blade in self.blades for v in blade}
        words = [tuple(sorted(blade, key=rank.get)) for blade in self.blades]
        number = [sum(1 << v for v in blade) for blade in self.blades]
        keys = [(len(word), number[k]) if order == 0 else number[k] if order == 1
                else (len(word), [rank[v] for v in word]) for k, word in enumerate(words)]
        sign = [(-1)**sum(a > b for a, b in itertools.combinations(word, 2)) for word in words]
        return [sorted(keys).index(key) for key in keys], sign


def gate(s):
    return (1 + math.erf(s / math.sqrt(2))) / 2


def gate_slope(s):
    return math.exp(-s * s / 2) / math.sqrt(2 * math.pi)


class Multivectors(Call):
    """What is in lists is of a blade, then of an element of its plane. Beside each value stands its size: the sum of
    its terms' sizes, to which errors are relative."""
    ERROR = FP32

    def __init__(self, library, signature=(3, 0, 0), batch=5, features=12, normed=1, type=FLOAT32, gate=0, unweighted=0,
                 weight_type=0, layout=0, order=0, absent=(), seed=0):
        self.algebra = Algebra(*signature)
        self.plane, self.normed, self.is_gated = batch * features, normed, gate == 0
        weights = self.algebra.triples * self.weights_of(features)
        others = dict.fromkeys(("w", "d_w"), weights) | self.other_counts(batch, features)
        counts = {name: others.get(name, len(self.algebra.grade) * self.plane) for name in self.NAMES}
        self.numbers = {name: numbers(size, seed + i) for i, (name, size) in enumerate(counts.items())}
        self.types = {name: weight_type or type if name in ("w", "d_w") else type for name in self.NAMES}
        description = self.Description(ctypes.sizeof(self.Description), type, *signature, normed, batch, features, gate,
                                       unweighted, weight_type, 77, layout, order)
        self.place, self.sign = self.algebra.ordered(order)
        if unweighted:
            self.numbers["w"] = [1.0] * weights
        self.description = description
        self.numbers |= self.left_by_forward()
        super().__init__(library, description, {
            name: b"\xff" * (BYTES[self.types[name]] * len(values)) if name in self.WRITTEN
            else packed(self.as_caller(name, values, layout), self.types[name])
            for name, values in self.numbers.items()
            if name not in absent and not (unweighted and name in ("w", "d_w"))})

    def other_counts(self, batch, features):
        """Of operands that are neither multivectors nor weights."""
        return {}

    def left_by_forward(self):
        """Numbers of operands that are not those of numbers()."""
        return {}

    def is_near(self, name, expected, bound):
        """The bound is fp32's; then the result is rounded to its type. fp16 has nothing between multiples of 2^-24."""
        kind = self.types[name]
        last = ROUNDING.get(kind, 0)
        least = 2.0**-25 if kind == FLOAT16 else 0
        bound = [its + last * (abs(value) + its) + least for value, its in zip(expected, bound)]
        found = self.found(name, kind, 1, len(expected))
        return near(found, *(self.as_caller(name, values, self.description.layout, signed) for values, signed in
                             ((expected, True), (bound, False))))

    def as_caller(self, name, values, layout, signed=True):
        """Blades where the caller has them, and with his signs."""
        if name in ("w", "d_w") or (layout == 0 and self.place == sorted(self.place)):
            return values
        planes = [None] * len(self.place)
        for k, (place, sign) in enumerate(zip(self.place, self.sign)):
            plane = values[k * self.plane:(k + 1) * self.plane]
            planes[place] = [-value for value in plane] if signed and sign < 0 else plane
        return [value for item in zip(*planes) for value in item] if layout else [*itertools.chain(*planes)]

    def blades(self, name):
        values = self.numbers[name]
        return [values[at:at + self.plane] for at in range(0, len(values), self.plane)]

    def gate(self, scalar):
        return gate(scalar) if self.is_gated else 1.0

    def gate_slope(self, scalar):
        return gate_slope(scalar) if self.is_gated else 0.0

    def gated(self, name):
        values = self.blades(name)
        gates = [self.gate(scalar) for scalar in values[0]]
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
        return self.is_near("out", expected, bound)


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
        return all([self.is_near(name, *both) for name, both in self.gradients().items() if name in self.host])

    def gradients(self):
        """Of each gradient what is expected, and fp32's bound."""
        algebra, blades, gradients = self.algebra, range(len(self.algebra.grade)), {}
        P, of_P, z, size, r, off = self.forward_in_fp64()
        dz, of_dz = self.gradients_of_z(z, size, r, off)
        d_w, of_w = self.gradients_of_w(P, of_P, dz, of_dz)
        gradients["d_w"] = d_w, [self.ERROR * its for its in of_w]
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
                    value, far = self.gate(scalar) * d[k][at], self.gate(scalar) * its[k][at]
                    if k == 0:
                        slope = self.gate_slope(scalar)
                        value += slope * sum(d[i][at] * own[i][at] for i in blades)
                        far += slope * sum(its[i][at] * abs(own[i][at]) for i in blades)
                    expected.append(value)
                    bound.append(self.ERROR * far)
            gradients[f"d_{name}"] = expected, bound
        return gradients


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


class Kept(Connected):
    def other_counts(self, batch, features):
        return {"inverse_norms": (max(self.algebra.grade) + 1) * batch}


class CliffordConnectedKept(Kept, Forward):
    NAME = "clifford_connected_kept"
    WRITTEN, NAMES = ("out", "inverse_norms"), ("x", "y", "w", "out", "inverse_norms")

    def result_is_right(self):
        *_, r, off = self.forward_in_fp64()
        expected, wrong = (list(itertools.chain(*each)) for each in (r, off))
        if not self.normed:  # they are not written
            return set(self.device["inverse_norms"].content()) == {0xff} and super().result_is_right()
        bound = [self.ERROR * its * far for its, far in zip(expected, wrong)]
        return (near(self.found("inverse_norms", FLOAT32, 1, len(expected)), expected, bound)
                and super().result_is_right())


class CliffordConnectedKeptBackward(Kept, Backward):
    NAME = "clifford_connected_kept_backward"
    NAMES = ("d_out", "x", "y", "w", "out", "inverse_norms", "d_x", "d_y", "d_w")
    ERROR = 2.2 * 2.0**-11

    def left_by_forward(self):
        _, _, z, _, r, _ = self.forward_in_fp64()
        out = [value * r[c][self.row(at)] for k, c in enumerate(self.algebra.grade) for at, value in enumerate(z[k])]
        return {"out": out, "inverse_norms": [*itertools.chain(*r)]}


class Layer(OfFeatures):
    """mix (grades, features, features) and bias, which may be NULL. TF32 has the numbers of x and mix exactly."""
    OPTIONAL = ("bias", "d_bias")

    def other_counts(self, batch, features):
        matrices = (max(self.algebra.grade) + 1) * features * features
        return dict(mix=matrices, d_mix=matrices, bias=features, d_bias=features)

    def left_by_forward(self):
        """Small matrices: of a y that is far below 0 the gate is a small number with the errors of 1."""
        return {"mix": [value / 32 for value in self.numbers["mix"]]}

    def mixed(self, rows, transposed, of=float):
        """Of each row of each blade of `rows` the product with its grade's matrix, or with its transpose."""
        F, mix, result = self.description.features, self.numbers["mix"], []
        for k, c in enumerate(self.algebra.grade):
            matrix = [[of(mix[(c * F + i) * F + j]) for j in range(F)] for i in range(F)]
            columns = matrix if transposed else [*zip(*matrix)]
            result.append([sum(a * b for a, b in zip(column, rows[k][n:n + F]))
                           for n in range(0, self.plane, F) for column in columns])
        return result


class CliffordLayer(Layer, Forward):
    NAME = "clifford_layer"
    WRITTEN, NAMES = ("y", "out"), ("x", "mix", "bias", "w", "y", "out")

    def result_is_right(self):
        """y, and the product of x and of the y that was found."""
        F = self.description.features
        expected = self.mixed(self.blades("x"), True)
        size = self.mixed([[*map(abs, plane)] for plane in self.blades("x")], True, abs)
        if "bias" in self.host:
            bias = self.numbers["bias"]
            expected[0] = [value + bias[at % F] for at, value in enumerate(expected[0])]
            size[0] = [its + abs(bias[at % F]) for at, its in enumerate(size[0])]
        expected, size = ([*itertools.chain(*each)] for each in (expected, size))
        self.numbers["y"] = self.found("y", FLOAT32, 1, len(expected))
        return near(self.numbers["y"], expected, [FP32 * its for its in size]) and super().result_is_right()


class CliffordLayerBackward(Layer, Backward):
    NAME = "clifford_layer_backward"
    WRITTEN = ("d_x", "d_mix", "d_bias", "d_w")
    NAMES = ("d_out", "x", "y", "mix", "bias", "w", *WRITTEN)

    def gradients(self):
        """Those of y are rounded to TF32 before they are multiplied."""
        F, grade, plane, found = self.description.features, self.algebra.grade, self.plane, super().gradients()
        d_y, off = ([each[at:at + plane] for at in range(0, len(each), plane)] for each in found.pop("d_y"))
        size = [[far + abs(value) for far, value in zip(*both)] for both in zip(off, d_y)]
        off = [[far + 2.0**-11 * its for far, its in zip(*both)] for both in zip(off, size)]
        d_x, of_x = found["d_x"]
        more, far, its = self.mixed(d_y, False), self.mixed(off, False, abs), self.mixed(size, False, abs)
        found["d_x"] = ([a + b for a, b in zip(d_x, itertools.chain(*more))],
                        [a + b + FP32 * c for a, b, c in zip(of_x, itertools.chain(*far), itertools.chain(*its))])
        x, d_mix, of_mix = self.blades("x"), [], []
        for c, i, j in itertools.product(range(max(grade) + 1), range(F), range(F)):
            terms = [(k, n) for k, its in enumerate(grade) if its == c for n in range(0, plane, F)]
            d_mix.append(sum(d_y[k][n + i] * x[k][n + j] for k, n in terms))
            of_mix.append(sum((off[k][n + i] + FP32 * size[k][n + i]) * abs(x[k][n + j]) for k, n in terms))
        sums = [[sum(each[0][i::F]) for i in range(F)] for each in (d_y, off)]
        return found | {"d_mix": (d_mix, of_mix), "d_bias": tuple(sums)}


HALVES = (BFLOAT16, FLOAT16)
PLAIN = dict(gate=1, unweighted=1, normed=0)  # the geometric product alone
OF_CONNECTED = [CliffordConnected, CliffordConnectedBackward, CliffordConnectedKept, CliffordConnectedKeptBackward]
OF_LAYERS = [CliffordLayer, CliffordLayerBackward]
KINDS = [Clifford, CliffordBackward, *OF_CONNECTED, *OF_LAYERS]
CALLS = [(kind, options) for kind in (Clifford, CliffordBackward) for options in (
    {},
    dict(signature=(2, 0, 0), batch=1, features=1),
    dict(batch=3, features=13, normed=0),
    dict(signature=(2, 0, 0), batch=7, features=37),
    dict(signature=(3, 0, 1), batch=2, features=9),
    dict(signature=(1, 3, 0), batch=2, features=8),
    dict(signature=(4, 1, 0), batch=2, features=5),
    *(dict(type=type) for type in HALVES),
    *(dict(type=type, batch=3, features=72) for type in HALVES),
    *(dict(type=type, weight_type=FLOAT32, signature=(2, 0, 0), features=8) for type in HALVES),
    *(dict(type=type, weight_type=FLOAT32, signature=(2, 0, 0), batch=7, features=37) for type in HALVES),
    dict(type=FLOAT16, signature=(3, 0, 1), batch=2, features=9),
    dict(type=BFLOAT16, signature=(1, 3, 0), batch=3, features=16, normed=0),
    dict(type=BFLOAT16, signature=(4, 1, 0), batch=2, features=5),
    dict(type=FLOAT16, signature=(4, 1, 0), batch=3, features=8, weight_type=FLOAT16),
    dict(gate=1), dict(gate=1, type=BFLOAT16, signature=(2, 0, 0), features=9),
    dict(unweighted=1), dict(unweighted=1, type=FLOAT16, signature=(3, 0, 1), batch=2, features=16),
    dict(unweighted=1, weight_type=FLOAT32, type=BFLOAT16, features=64),
    *(dict(PLAIN, signature=signature, type=type, batch=3, features=10)
      for signature in ((3, 0, 0), (4, 1, 0)) for type in (FLOAT32, *HALVES)),
    dict(signature=(0, 3, 0), batch=2, features=530),  # a block does not have the row at once
    dict(signature=(0, 0, 2), batch=2, features=1100, type=BFLOAT16, gate=1),
    dict(signature=(0, 1, 0), batch=1, features=130, normed=0),
    dict(signature=(2, 2, 0), batch=2, features=40),
    *(dict(PLAIN, layout=1, signature=signature, type=type, batch=3, features=features, order=order)
      for signature, type, features, order in (((3, 0, 1), FLOAT32, 61, 3), ((3, 0, 0), BFLOAT16, 12, 1),
                                               ((1, 0, 0), FLOAT16, 7, 0), ((4, 1, 0), FLOAT32, 25, 2),
                                               ((0, 0, 1), FLOAT32, 50, 3), ((1, 1, 2), FLOAT16, 9, 3))),
    # In registers: one access an item, two and four; an odd number of items, and one more than a block has.
    *(dict(PLAIN, layout=1, signature=signature, type=type, batch=3, features=features, order=order)
      for signature, order in (((3, 0, 0), 0), ((3, 0, 1), 3), ((1, 3, 0), 2)) for type in (FLOAT32, BFLOAT16, FLOAT16)
      for features in (1, 43)),
    dict(unweighted=1, normed=0, layout=1, batch=2, features=70),  # with the gate
    dict(unweighted=1, normed=0, order=1, batch=2, features=70, signature=(2, 1, 1)),
    dict(layout=1, batch=2, features=9), dict(order=3, signature=(3, 0, 1), batch=2, features=9, type=BFLOAT16),
    dict(layout=1, order=2, signature=(2, 2, 0), batch=2, features=5, unweighted=1, type=FLOAT16),
)] + [(kind, options) for kind in OF_CONNECTED for options in (
    {},
    dict(signature=(2, 0, 0), batch=1, features=1),
    dict(signature=(2, 0, 0), batch=7, features=9, normed=0),
)] + [(kind, options) for kind in OF_LAYERS for options in (
    {},
    dict(signature=(2, 0, 0), batch=1, features=1),  # copied, as features are no multiple of 4
    dict(signature=(2, 0, 0), batch=37, features=9, normed=0),
    dict(signature=(2, 0, 0), batch=140, features=20, absent=("bias", "d_bias")),
    dict(batch=3, features=16, absent=("d_bias",)),
    dict(signature=(1, 3, 0), batch=2, features=8), dict(signature=(0, 1, 2), batch=5, features=6),
    dict(signature=(4, 1, 0), batch=2, features=4), dict(signature=(0, 1, 0), batch=33, features=36),
)]
SLOW = [(kind, options) for kind in (Clifford, CliffordBackward) for options in (
    *(dict(type=type, batch=2, features=1100) for type in HALVES),
    *(dict(type=type, batch=40, features=64) for type in HALVES),
    dict(signature=(5, 0, 0), batch=2, features=300),
    dict(batch=40, features=64),
    dict(signature=(2, 0, 0), batch=3, features=1030),  # rows of two blocks
    dict(batch=2, features=1100),
    dict(signature=(4, 1, 0), batch=2, features=300),
)] + [(kind, options) for kind in OF_CONNECTED for options in (
    dict(signature=(2, 0, 0), batch=140, features=33),
    dict(batch=9, features=36),
)] + [(kind, dict(signature=(2, 0, 0), batch=batch, features=features)) for kind in OF_LAYERS
      for batch, features in ((600, 12), (9, 132), (9, 130))]


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


EVERY_SIGNATURE = [(p, q, n - p - q) for n in range(1, 6) for p in range(n + 1) for q in range(n + 1 - p)]


@pytest.mark.parametrize("kind", [Clifford, CliffordBackward])
def test_every_signature(library, kind):
    """Each with other options."""
    for turn, signature in enumerate(EVERY_SIGNATURE):
        kind(library, signature=signature, batch=2, features=3 + turn % 6, type=(FLOAT32, *HALVES)[turn % 3],
             normed=turn // 2 % 2, gate=turn // 3 % 2, unweighted=turn // 5 % 2, layout=turn // 4 % 2,
             order=turn // 7 % 4, seed=turn).run_twice()
    assert len(EVERY_SIGNATURE) == 55


@pytest.mark.parametrize("options", [
    dict(), dict(signature=(1, 1, 1), gate=1), dict(signature=(2, 0, 0), normed=0),
    dict(signature=(0, 2, 1), unweighted=1),
], ids=str)
def test_expected_gradients_are_differences(library, options):
    """Those that results are compared with: along a random direction of each of x, y and w the sum of d_out * out, in
    fp64, changes as they say. h^2 = 2^-34 is of the size of what a central difference leaves out, and 2^-53 / h of what
    rounding adds."""
    of, h, draw = CliffordBackward(library, batch=2, features=5, **options), 2.0**-17, random.Random(1)

    def total():
        _, _, z, _, r, _ = of.forward_in_fp64()
        return math.fsum(d * z[k][at] * r[c][of.row(at)] for k, c in enumerate(of.algebra.grade)
                         for at, d in enumerate(of.blades("d_out")[k]))

    for name, (expected, _) in of.gradients().items():
        values = of.numbers[name[2:]]
        direction = [draw.uniform(-1, 1) for _ in values]
        ends = []
        for by in (h, -h):
            of.numbers[name[2:]] = [value + by * its for value, its in zip(values, direction)]
            ends.append(total())
        of.numbers[name[2:]] = values
        along = math.fsum(d * its for d, its in zip(expected, direction))
        assert along and abs((ends[0] - ends[1]) / (2 * h) - along) <= 2.0**-22 * math.fsum(map(abs, expected))
    of.free()


IN_TURN = [
    *((kind, [dict(signature=signature, batch=1, features=features) for features in (512, 64, 700)])
      for kind in (Clifford, CliffordBackward) for signature in fused_kernels.TRIPLES),
    *((kind, [dict(batch=3, features=32, type=BFLOAT16), dict(signature=(0, 4, 0), batch=9, features=5, type=FLOAT16),
              dict(PLAIN, batch=2, features=90, type=BFLOAT16)]) for kind in (Clifford, CliffordBackward)),
    *((kind, [dict(signature=(2, 0, 0), batch=140, features=36), dict(batch=3, features=8), dict(batch=9, features=36)])
      for kind in OF_CONNECTED),
    *((kind, [dict(signature=(2, 0, 0), batch=70, features=36), dict(batch=3, features=9), dict(batch=300, features=4)])
      for kind in OF_LAYERS),
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


HALVES_ANYWHERE = """
import random
from test_library_clifford import HALVES, Clifford, CliffordBackward, fused_kernels
draw = random.Random({seed})
for kind in (Clifford, CliffordBackward):
    for type in HALVES:
        for signature in fused_kernels.TRIPLES:
            for features in (8 * draw.randint(1, 4), 2 * draw.randint(1, 12) + 1):
                run(kind, type=type, signature=signature, batch=draw.randint(1, 9), features=features,
                    normed=draw.randint(0, 1), gate=draw.randint(0, 1), unweighted=draw.randint(0, 1))
        run(kind, type=type, batch=150, features=8)
        run(kind, type=type, batch=2, features=1032)
print(*("streamed" in way for way in ways))
"""


@pytest.mark.parametrize("capability", ["7.5", "8.0", "9.0", "12.0"])
def test_halves_on_each_gpu(capability):
    """On Hopper by the copy engine, but for rows of up to 8 blades that do not start at multiples of 16 bytes, or are
    too long for a block; and elsewhere by the kernels of any algebra."""
    said = run_as_another_gpu(capability, HALVES_ANYWHERE.format(seed=int(10 * float(capability))))
    streamed = [*[blades > 8 or whole for blades in (4, 8, 16, 16, 32) for whole in (True, False)], True, False]
    assert said.split() == [str(capability == "9.0" and each) for each in streamed * 4]


CONNECTED_ANYWHERE = """
import random
from test_library_clifford import OF_CONNECTED
draw = random.Random({seed})
for kind in OF_CONNECTED:
    for signature in ((2, 0, 0), (3, 0, 0)):
        run(kind, signature=signature, batch=draw.randint(1, 9), features=draw.randint(1, 20))
        run(kind, signature=signature, batch=draw.randint(10, 40), features=4 * draw.randint(1, 5), normed=0)
    run(kind, signature=(2, 0, 0), batch=draw.randint(260, 300), features=draw.randint(2, 5))  # shares of the batch
    run(kind, signature=(2, 0, 0), batch=3, features=draw.randint(65, 70))  # more than a tile
print(len(ways), all("mma.sync" in way for way in ways))
"""


@pytest.mark.parametrize("capability, taken_for", [
    *((capability, "") for capability in ("8.0", "8.6", "8.9", "12.0")), ("9.0", "8.0"),
])
def test_connected_on_other_gpus(capability, taken_for):
    """By products in TF32 that need no Hopper."""
    said = run_as_another_gpu(capability, CONNECTED_ANYWHERE.format(seed=int(10 * float(capability))),
                              FUSED_KERNELS_CAPABILITY=taken_for)
    assert said.split() == ["24", "True"]


LAYERS_ANYWHERE = """
import random
from test_library_clifford import OF_LAYERS
draw = random.Random({seed})
for kind in OF_LAYERS:
    for signature in ((2, 0, 0), (0, 1, 0), (1, 1, 1)):
        run(kind, signature=signature, batch=draw.randint(1, 9), features=draw.randint(1, 20))
        run(kind, signature=signature, batch=draw.randint(10, 40), features=4 * draw.randint(1, 5), normed=0)
    run(kind, signature=(2, 0, 0), batch=draw.randint(520, 600), features=draw.randint(2, 5))  # shares of the batch
    run(kind, signature=(2, 0, 0), batch=3, features=draw.randint(65, 70))  # more than a tile
print(len(ways))
"""


@pytest.mark.parametrize("capability, taken_for", [("8.0", ""), ("12.0", ""), ("9.0", "8.0")])
def test_layers_on_other_gpus(capability, taken_for):
    assert run_as_another_gpu(capability, LAYERS_ANYWHERE.format(seed=int(10 * float(capability))),
                              FUSED_KERNELS_CAPABILITY=taken_for).split() == ["16"]


def test_connected_needs_tensor_cores_of_tf32():
    said = run_as_another_gpu("7.5", """
import ctypes
from test_library_clifford import CliffordConnected, FLOAT32
of = CliffordConnected.Description(ctypes.sizeof(CliffordConnected.Description), FLOAT32, 3, 0, 0, 1, 5, 12)
needed = ctypes.c_size_t()
assert library.fk_clifford_connected_workspace(ctypes.byref(of), ctypes.byref(needed)) == BAD_DEVICE
print(library.fk_last_error().decode())
""")
    assert said == ("the fully connected Clifford product needs a GPU of compute capability 8.0 or newer; "
                    "this one has 7.5\n")


@pytest.mark.parametrize("name", ["layer", "layer_backward"])
def test_rows_of_all_blades_are_counted_in_32_bits(library, name):
    """By Hopper's copy engine. Where they are more, factors are copied into the workspace."""
    found = []
    for batch in ((1 << 26) - 64, 1 << 26):
        of = fused_kernels.fk_clifford(type=FLOAT32, p=5, normed=1, batch=batch, features=4)
        of.size, needed = ctypes.sizeof(of), ctypes.c_size_t()
        assert getattr(library, f"fk_clifford_{name}_workspace")(ctypes.byref(of), ctypes.byref(needed)) == OK
        found.append(needed.value)
    copies = 2**5 * 2**26 * 32 * 4  # bytes of 32 features, of which 4 are not zeros
    assert found[0] < copies <= found[1]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    call_in_turn(library, kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


@pytest.mark.parametrize("signature", fused_kernels.TRIPLES, ids=str)
def test_triples(signature):
    assert fused_kernels.TRIPLES[signature] == Algebra(*signature).triples


@pytest.mark.parametrize("signature", EVERY_SIGNATURE, ids=str)
def test_triples_of_every_signature(signature):
    """As geometric_product() takes weights for them."""
    terms, grade = Algebra(*signature).terms, Algebra(*signature).grade
    expected = sorted({(grade[i], grade[k], grade[j]) for i, j, k, _, _ in terms})
    assert [*geometric.triples(signature)] == expected and len(expected) == Algebra(*signature).triples


def test_orders_of_blades():
    """Written out; and as the library counts them, which has e4 where a word says e0."""
    assert geometric.blades(3, "bits") == ((), (0,), (1,), (0, 1), (2,), (0, 2), (1, 2), (0, 1, 2))
    assert geometric.blades(4, "shortlex")[5:11] == ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    assert geometric.blades(4, "grade")[5:11] == ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    assert geometric.blades(4, "null_first", null=1) == (
        (), (3,), (0,), (1,), (2,), (3, 0), (3, 1), (3, 2), (0, 1), (0, 2), (1, 2), (3, 0, 1), (3, 0, 2), (3, 1, 2),
        (0, 1, 2), (3, 0, 1, 2))
    for signature, (number, order) in itertools.product(EVERY_SIGNATURE, enumerate(geometric.ORDERS)):
        algebra = Algebra(*signature)
        place, sign = algebra.ordered(number)
        words = geometric.blades(sum(signature), order, null=signature[2])
        for k, blade in enumerate(algebra.blades):
            word = words[place[k]]
            assert tuple(sorted(word)) == blade
            assert sign[k] == (-1)**sum(a > b for a, b in itertools.combinations(word, 2))


WRONG = [
    *((dict(p=value), BAD_ARGUMENT) for value in (0, -1, 6, 1 << 30)),
    (dict(q=3), BAD_ARGUMENT), (dict(r=1 << 30), BAD_ARGUMENT), (dict(r=-1), BAD_ARGUMENT),
    *((dict(normed=value), BAD_ARGUMENT) for value in (-1, 2)),
    *((dict(batch=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
    *((dict(features=value), BAD_SHAPE) for value in (0, -1, 8193, 1 << 40)),
    (dict(features=4, batch=(1 << 28) + 1), BAD_SHAPE),
    (dict(p=5, q=5, r=5), BAD_ARGUMENT), (dict(p=3, q=-1, r=1), BAD_ARGUMENT),
    *((dict(type=value), BAD_ARGUMENT) for value in (0, TF32, 77)),
    *((dict(gate=value), BAD_ARGUMENT) for value in (-1, 2)),
    *((dict(unweighted=value), BAD_ARGUMENT) for value in (-1, 2)),
    *((dict(layout=value), BAD_ARGUMENT) for value in (-1, 2)),
    *((dict(order=value), BAD_ARGUMENT) for value in (-1, 4)),
    *((dict(weight_type=value), BAD_ARGUMENT) for value in (-1, FLOAT16, BFLOAT16, TF32)),
]
ONLY_FOR_THE_OTHERS = [
    *((dict(type=value), BAD_ARGUMENT) for value in HALVES), (dict(gate=1), BAD_ARGUMENT),
    (dict(unweighted=1), BAD_ARGUMENT), (dict(weight_type=FLOAT32), BAD_ARGUMENT), (dict(q=1), BAD_ARGUMENT),
    (dict(layout=1), BAD_ARGUMENT), (dict(order=2), BAD_ARGUMENT),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    alone = ONLY_FOR_THE_OTHERS if kind in OF_CONNECTED else []
    if kind in OF_LAYERS:
        alone = [each for each in ONLY_FOR_THE_OTHERS if each[0] != dict(q=1)]
    refuse_what_is_damaged(library, kind, WRONG + alone)


@pytest.mark.parametrize("kind", [Clifford, CliffordBackward])
def test_weights_where_there_are_none(library, kind):
    """What the description says is not there has to be NULL, and what it says is there may not be."""
    call, weighted = kind(library, unweighted=1), kind(library)
    before = call.all()
    for name in set(call.NAMES) & {"w", "d_w"}:
        assert call.call(**{name: weighted.device[name].at}) == BAD_ARGUMENT
        assert library.fk_last_error().decode() == f"{name} is given; by the description it has to be NULL"
        assert weighted.call(**{name: None}) == BAD_ARGUMENT
        assert library.fk_last_error().decode() == f"{name} is NULL"
    assert before == call.all()
    call.free()
    weighted.free()


@pytest.mark.parametrize("signature", [(0, 0, 0), (6, 0, 0), (3, -1, 1), (2, 2, 2)], ids=str)
def test_the_sentence_about_a_signature(library, signature):
    call = Clifford(library)
    call.description.p, call.description.q, call.description.r = signature
    assert call.call() == BAD_ARGUMENT
    assert library.fk_last_error().decode() == (
        f"p, q, r are {', '.join(map(str, signature))}; they have to be 0 or more each, and 1 to 5 in all")
    call.free()


@pytest.mark.parametrize("signature, most", [((0, 3, 0), 8192), ((2, 2, 0), 4096), ((5, 0, 0), 2048)], ids=str)
def test_the_longest_rows(library, signature, most):
    call, needed = Clifford(library, signature=signature, batch=1, features=1), SIZE()
    for features, code in ((most, OK), (most + 1, BAD_SHAPE)):
        call.description.features = features
        assert call.workspace_of(ctypes.byref(call.description), ctypes.byref(needed)) == code
    call.free()


@pytest.mark.parametrize("type", HALVES)
def test_results_that_the_type_cannot_hold(library, type):
    """In fp16 they become infinite, as PyTorch's do; bf16 has fp32's range."""
    call = Clifford(library, **PLAIN, type=type, signature=(1, 0, 0), batch=1, features=4)
    for name in ("x", "y"):
        call.numbers[name] = [256.0, 1.0, 0.0, 0.0] + [0.0] * 4
        call.host[name] = packed(call.numbers[name], type)
        assert library.cudaMemcpy(call.device[name].at, call.host[name], len(call.host[name]), 1) == OK
    assert call.call() == OK
    assert call.found("out", type, 1, 8)[:2] == [math.inf if type == FLOAT16 else 65536.0, 1.0]
    call.free()


@pytest.mark.parametrize("signature", [(3, 0, 1), (1, 3, 0), (4, 1, 0)], ids=str)
def test_algebras_that_are_not_fully_connected(library, signature):
    call = CliffordConnected(library)
    call.description.p, call.description.q, call.description.r = signature
    assert call.call() == BAD_ARGUMENT
    assert "p, q, r are" in library.fk_last_error().decode()


@pytest.mark.parametrize("kind", [CliffordBackward, CliffordConnected, CliffordConnectedBackward])
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
