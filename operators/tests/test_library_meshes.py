"""The library's operators on meshes, called as in test_library.py."""

import ctypes
import math
import struct

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, BYTES, FLOAT16, FLOAT32, OK, ROUNDING, TF32, TF32X3, Call,
                          any_numbers, call_at_the_same_time, call_in_turn, for_each, fused_kernels, in_turn, library,
                          near, numbers, packed, refuse_a_damaged_workspace, refuse_what_is_damaged,
                          run_as_another_gpu)

FP32, LEAST = 2.0**-18, 2.0**-25  # fp32's own errors, of the size of the terms; half of fp16's least number


def off_of(kind, depth):
    """What a sum of products is off by, as fk_product_forward() has it, of the sum of their sizes."""
    return {FLOAT32: depth * 2.0**-24, TF32: 2.0**-10 + depth * 2.0**-25,
            TF32X3: 2.0**-18 + depth * 2.0**-29}.get(kind, FP32)


def columns(matrix, width):
    return [matrix[col::width] for col in range(width)]


def rows(matrix, width):
    return [matrix[at:at + width] for at in range(0, len(matrix), width)]


def dot(a, b):
    """The sum of products, and of their sizes."""
    terms = [x * y for x, y in zip(a, b)]
    return sum(terms), sum(map(abs, terms))


def drawn(kind, count, seed, scale=1.0):
    """Numbers that 16-bit types hold; of fp32 any."""
    if BYTES[kind] == 2:
        return numbers(count, seed, scale)
    return [scale * value for value in any_numbers(count, seed)]


class OfMeshes(Call):
    """What both operators have in common. sizes: of meshes that differ in theirs, how many vertices each has."""
    RAGGED = False

    def __init__(self, library, kind, description, counts, values):
        """counts: of the elements of each operand."""
        self.kind, self.rounded = kind, ROUNDING.get(kind, 0) * 1.01
        self.least = LEAST if kind == FLOAT16 else 0
        self.numbers = values
        host = {name: b"\xff" * (BYTES[kind] * counts[name]) if name in self.WRITTEN else packed(values[name], kind)
                for name in self.NAMES if name != "offsets"}
        if self.RAGGED:
            host["offsets"] = struct.pack(f"{len(self.offsets)}i", *self.offsets)
        super().__init__(library, description, host)

    @classmethod
    def functions(cls, library):
        backward = cls.NAME.endswith("_backward")
        return (getattr(library, f"fk_{cls.NAME}_workspace"),
                getattr(library, f"fk_{cls.NAME}" if backward else f"fk_{cls.NAME}_forward"))

    def set_sizes(self, meshes, vertices, sizes):
        """Returns how many meshes there are, and what a description has as their vertices."""
        if self.RAGGED:
            sizes = sizes or [vertices] * meshes
            self.offsets = [sum(sizes[:mesh]) for mesh in range(len(sizes) + 1)]
            return len(sizes), self.offsets[-1]
        self.offsets = [mesh * vertices for mesh in range(meshes + 1)]
        return meshes, vertices

    def of(self, mesh):
        """The operands of a mesh; those that are written as they have been found."""
        result, ends = {}, [self.offsets[mesh], self.offsets[mesh + 1]]
        for name in self.NAMES:
            if name == "offsets":
                continue
            values = self.numbers[name]
            if name in self.WRITTEN:
                values = self.found(name, self.kind, 1, len(values))
            if name in ("x", "d_out", "out", "d_x", "basis", "mass", "gr", "gi") and not self.is_of_spectrum(name):
                row = len(values) // self.offsets[-1]
                result[name] = values[ends[0] * row:ends[1] * row]
            elif name in ("times", "d_times", "lr", "li", "d_lr", "d_li"):
                result[name] = values
            else:
                row = len(values) // (len(self.offsets) - 1)
                result[name] = values[mesh * row:(mesh + 1) * row]
        return result

    def is_of_spectrum(self, name):
        return False

    def stored(self, value):
        """How far a number may be off that is rounded to the type."""
        return self.rounded * abs(value) + self.least + 2.0**-23 * abs(value)


class Mesh(OfMeshes):
    Description = fused_kernels.fk_diffusion

    def __init__(self, library, meshes=1, vertices=70, eigen=24, width=16, type=BFLOAT16, sizes=(), seed=0):
        meshes, vertices = self.set_sizes(meshes, vertices, sizes)
        all_vertices, spectrum = self.offsets[-1], meshes * eigen * width
        values = all_vertices * width
        counts = {"x": values, "d_out": values, "out": values, "d_x": values, "basis": all_vertices * eigen,
                  "mass": all_vertices, "evalues": meshes * eigen, "times": width, "d_times": width,
                  "spectral": spectrum, "d_spectral": spectrum}
        given = {name: drawn(type, counts[name], seed + i) for i, name in enumerate(self.NAMES) if name != "offsets"}
        # Powers of two: a product with one is not rounded. The exponent is from -2 to 0.
        given["mass"] = [2.0**round(2 * value) for value in given["mass"]]
        given["evalues"] = [2 * abs(value) for value in given["evalues"]]
        given["times"] = [abs(value) for value in given["times"]]
        description = self.Description(ctypes.sizeof(self.Description), type, meshes, vertices, eigen, width)
        super().__init__(library, type, description, counts, given)

    def damping(self, own):
        return [math.exp(-evalue * time) for evalue in own["evalues"] for time in own["times"]]


class Diffusion(Mesh):
    NAME, WRITTEN = "diffusion", ("spectral", "out")
    NAMES = ("x", "basis", "mass", "evalues", "times", "spectral", "out")

    def result_is_right(self):
        E, W = self.description.eigen, self.description.width
        for mesh in range(self.description.meshes):
            own = self.of(mesh)
            masses = [[m * b for m, b in zip(own["mass"], column)] for column in columns(own["basis"], E)]
            sums = [dot(left, x) for left in masses for x in columns(own["x"], W)]
            damping, off = self.damping(own), off_of(self.kind, len(own["mass"]))
            expected = [d * total for d, (total, _) in zip(damping, sums)]
            bound = [self.stored(value) + (off + FP32) * d * size for value, d, (_, size) in
                     zip(expected, damping, sums)]
            if not near(own["spectral"], expected, bound):
                return False
            # The second product is of what the first one has written.
            sums = [dot(row, s) for row in rows(own["basis"], E) for s in columns(own["spectral"], W)]
            bound = [self.stored(total) + off_of(self.kind, E) * size for total, size in sums]
            if not near(own["out"], [total for total, _ in sums], bound):
                return False
        return True


class DiffusionBackward(Mesh):
    NAME, WRITTEN = "diffusion_backward", ("d_x", "d_times")
    NAMES = ("d_out", "d_spectral", "basis", "mass", "evalues", "times", "spectral", "d_x", "d_times")

    def result_is_right(self):
        of = self.description
        E, W = of.eigen, of.width
        d_times, far = [0.0] * W, [0.0] * W
        for mesh in range(of.meshes):
            own = self.of(mesh)
            sums = [dot(left, d) for left in columns(own["basis"], E) for d in columns(own["d_out"], W)]
            off = off_of(self.kind, len(own["mass"]))
            s = [more + total for more, (total, _) in zip(own["d_spectral"], sums)]
            far_s = [off * size + FP32 * abs(value) for value, (_, size) in zip(s, sums)]
            for at, (value, its, spectral) in enumerate(zip(s, far_s, own["spectral"])):
                factor = own["evalues"][at // W] * spectral
                d_times[at % W] -= factor * value
                far[at % W] += abs(factor) * (its + FP32 * abs(value))
            damping = self.damping(own)
            damped = [d * value for d, value in zip(damping, s)]
            # The damped sums are rounded before the second product, and its result.
            far_damped = [d * its + FP32 * abs(value) + self.stored(value)
                          for d, its, value in zip(damping, far_s, damped)]
            sums = [dot(row, column) for row in rows(own["basis"], E) for column in columns(damped, W)]
            more = [dot(row, column)[1] for row in rows(own["basis"], E) for column in columns(far_damped, W)]
            expected = [own["mass"][at // W] * total for at, (total, _) in enumerate(sums)]
            bound = [self.stored(value) + own["mass"][at // W] * (off_of(self.kind, E) * size + wrong)
                     for at, (value, (_, size), wrong) in enumerate(zip(expected, sums, more))]
            if not near(own["d_x"], expected, bound):
                return False
        bound = [self.stored(value) + its for value, its in zip(d_times, far)]
        return near(self.of(0)["d_times"], d_times, bound)


class Tangents(OfMeshes):
    """The gradient features."""
    Description = fused_kernels.fk_gradients

    def __init__(self, library, vertices=70, eigen=24, width=16, meshes=1, type=BFLOAT16, sizes=(), dense=False,
                 seed=0):
        """dense: of lr and li all elements are other numbers. Else each row has one, a power of two: then x lr^T and x
        li^T are exact in 16-bit types, and the bounds are close."""
        meshes, vertices = self.set_sizes(meshes, vertices, sizes)
        all_vertices = self.offsets[-1]
        counts = {"x": meshes * eigen * width, "gr": all_vertices * eigen, "gi": all_vertices * eigen,
                  "lr": width * width, "li": width * width, "out": all_vertices * width}
        counts |= {f"d_{name}": count for name, count in counts.items()}
        # Small, so that not all features are near 1 or -1.
        scales = {"gr": 1 / 4, "gi": 1 / 4, "lr": 1 / 4, "li": 1 / 4}
        given = {name: drawn(type, counts[name], seed + i, scales.get(name, 1.0))
                 for i, name in enumerate(self.NAMES) if name != "offsets"}
        for row in range(0 if dense else width):
            own = slice(row * width, (row + 1) * width)
            for name, at in (("lr", 3 * row + seed), ("li", 5 * row + 1 + seed)):
                power = (-1)**row / 2**(row % 3)
                given[name][own] = [power if col == at % width else 0.0 for col in range(width)]
        description = self.Description(ctypes.sizeof(self.Description), type, vertices, eigen, width, meshes)
        super().__init__(library, type, description, counts, given)
        self.off_m = self.rounded if dense else 0

    def is_of_spectrum(self, name):
        return name in ("x", "d_x")

    def gradients(self, own):
        """xr, xi, ar, ai of a mesh, (vertices, width) as lists of rows, each number with how far off it may be."""
        E, W = self.description.eigen, self.description.width
        lr, li = rows(own["lr"], W), rows(own["li"], W)
        x, off_w, off_e = rows(own["x"], W), off_of(self.kind, W), off_of(self.kind, E)
        by_col = list(zip(*x))
        M, far = [], []  # M1 and M2 by their columns
        for by in lr, li:
            sums = [[dot(row, weights) for row in x] for weights in by]
            M.append([[value for value, _ in column] for column in sums])
            far.append([[self.off_m * abs(value) + off_w * size for value, size in column] for column in sums])

        def product(left, right, off):
            value, size = dot(left, right)
            return value, off_e * size + (dot(left, off)[1] if off else 0)

        def combined(one, other, sign):
            return one[0] + sign * other[0], one[1] + other[1]

        result = [], [], [], []
        for real, imaginary in zip(rows(own["gr"], E), rows(own["gi"], E)):
            result[0].append([product(real, col, None) for col in by_col])
            result[1].append([product(imaginary, col, None) for col in by_col])
            four = [[product(left, column, off) for column, off in zip(M[which], far[which])]
                    for left, which in ((real, 0), (imaginary, 1), (imaginary, 0), (real, 1))]
            result[2].append([combined(*pair, -1) for pair in zip(*four[:2])])
            result[3].append([combined(*pair, 1) for pair in zip(*four[2:])])
        return result

    @staticmethod
    def argument(a, b, c, d):
        """Of tanh, and how far off it is."""
        def far(one, other):
            return abs(one[0]) * other[1] + abs(other[0]) * one[1] + one[1] * other[1]
        u = a[0] * c[0] + b[0] * d[0]
        return u, far(a, c) + far(b, d) + 2.0**-22 * (abs(a[0] * c[0]) + abs(b[0] * d[0]))


class GradientFeatures(Tangents):
    NAME, NAMES, WRITTEN = "gradients", ("x", "gr", "gi", "lr", "li", "out"), ("out",)

    def result_is_right(self):
        for mesh in range(len(self.offsets) - 1):
            own, expected, bound = self.of(mesh), [], []
            for row in zip(*self.gradients(own)):
                for factors in zip(*row):
                    u, far = self.argument(*factors)
                    value = math.tanh(u)
                    expected.append(value)
                    # tanh.approx is off by 2^-10.9; the slope of tanh is at most 1.
                    own_error = 2.0**-10 if self.kind == BFLOAT16 else 2.0**-21
                    bound.append(self.stored(value) + own_error + far)
            if not near(own["out"], expected, bound):
                return False
        return True


class GradientFeaturesBackward(Tangents):
    NAME, WRITTEN = "gradients_backward", ("d_x", "d_lr", "d_li")
    NAMES = ("d_out", "x", "gr", "gi", "lr", "li", "d_x", "d_lr", "d_li")

    def products(self, own):
        """P, Q, R and S (vertices, width), and how far each number is off."""
        W = self.description.width
        values, wrong = ([[] for _ in range(4)] for _ in range(2))
        for row, d_out in zip(zip(*self.gradients(own)), rows(own["d_out"], W)):
            for which in range(4):
                values[which].append([])
                wrong[which].append([])
            for *factors, d in zip(*row, d_out):
                u, of_u = self.argument(*factors)
                slope = 1 - math.tanh(u)**2
                g = d * slope
                # |d slope / du| <= 0.77, and 2 slope where that is less.
                steep = min(0.77, 2 * (1 - math.tanh(max(0, abs(u) - of_u))**2))
                of_g = abs(d) * (steep * of_u + FP32 * slope)
                for which, (factor, off) in enumerate(factors):
                    values[which][-1].append(g * factor)
                    wrong[which][-1].append(self.stored(g * factor) + of_g * abs(factor) + (abs(g) + of_g) * off)
        return values, wrong

    def result_is_right(self):
        """Each term of a sum may be off by what its factors are; all of this adds up, as if all had one sign."""
        of = self.description
        E, W = of.eigen, of.width
        weights = {name: ([0.0] * (W * W), [0.0] * (W * W)) for name in ("d_lr", "d_li")}
        for mesh in range(len(self.offsets) - 1):
            own = self.of(mesh)
            gr, gi, lr, li, x = (rows(own[name], count) for name, count in
                                 (("gr", E), ("gi", E), ("lr", W), ("li", W), ("x", W)))
            (P, Q, R, S), (of_p, of_q, of_r, of_s) = self.products(own)
            off = off_of(self.kind, 2 * len(gr))

            def sums(*terms):
                """(E, W): the sum over v of G[v][e] T[v][w] of terms (G, T, how far T is off, sign); how far it is
                off."""
                value, far = [[0.0] * W for _ in range(E)], [[0.0] * W for _ in range(E)]
                for G, T, of_T, sign in terms:
                    for v, row in enumerate(G):
                        for e, factor in enumerate(row):
                            for w in range(W) if factor else ():
                                value[e][w] += sign * factor * T[v][w]
                                far[e][w] += abs(factor) * (of_T[v][w] + off * abs(T[v][w]))
                return value, far

            def rounded(value, far):
                return value, [[f + self.stored(n) for f, n in zip(*both)] for both in zip(far, value)]

            dM1, off_1 = rounded(*sums((gr, P, of_p, 1), (gi, Q, of_q, 1)))
            dM2, off_2 = rounded(*sums((gr, Q, of_q, 1), (gi, P, of_p, -1)))
            D, off_d = sums((gr, R, of_r, 1), (gi, S, of_s, 1))
            off_e, off_w = off_of(self.kind, E * of.meshes), off_of(self.kind, 2 * W)
            for name, dM, wrong in (("d_lr", dM1, off_1), ("d_li", dM2, off_2)):
                expected, bound = weights[name]
                for at in range(W * W):
                    i, j = at // W, at % W
                    expected[at] += sum(dM[e][i] * x[e][j] for e in range(E))
                    bound[at] += sum((wrong[e][i] + (off_e + FP32) * abs(dM[e][i])) * abs(x[e][j]) for e in range(E))
            expected, bound = [], []
            for e in range(E):
                for w in range(W):
                    value = D[e][w] + sum(dM1[e][k] * lr[k][w] + dM2[e][k] * li[k][w] for k in range(W))
                    size = sum((off_1[e][k] + off_w * abs(dM1[e][k])) * abs(lr[k][w]) +
                               (off_2[e][k] + off_w * abs(dM2[e][k])) * abs(li[k][w]) for k in range(W))
                    expected.append(value)
                    bound.append(self.stored(value) + off_d[e][w] + size + FP32 * abs(D[e][w]))
            if not near(own["d_x"], expected, bound):
                return False
        own = self.of(0)
        return all(near(own[name], expected, [self.stored(value) + its for value, its in zip(expected, bound)])
                   for name, (expected, bound) in weights.items())


def ragged(kind):
    """The same of meshes that differ in their sizes."""
    read = [name for name in kind.NAMES if name not in kind.WRITTEN]
    name = kind.NAME.removesuffix("_backward")
    return type(f"Ragged{kind.__name__}", (kind,), {
        "NAME": kind.NAME.replace(name, f"{name}_ragged"), "NAMES": (*read, "offsets", *kind.WRITTEN), "RAGGED": True})


RaggedDiffusion, RaggedDiffusionBackward, RaggedFeatures, RaggedFeaturesBackward = RAGGED = [
    ragged(kind) for kind in (Diffusion, DiffusionBackward, GradientFeatures, GradientFeaturesBackward)]


KINDS = [Diffusion, DiffusionBackward, GradientFeatures, GradientFeaturesBackward, *RAGGED]
CALLS = [(kind, options) for kind in (Diffusion, DiffusionBackward) for options in (
    {},
    dict(vertices=1, eigen=8, width=8),
    dict(vertices=201, eigen=136, width=8),
    dict(meshes=3, vertices=21, eigen=40, width=72),
)] + [(kind, options) for kind in (GradientFeatures, GradientFeaturesBackward) for options in (
    {},
    dict(vertices=1, eigen=8, width=8),
    dict(vertices=65, eigen=136, width=8),
    dict(vertices=33, eigen=72, width=40),
    dict(vertices=65, eigen=24, width=24, dense=True),
)]
# In every type; of any size; of several meshes; and of meshes that differ, some of which have no vertices.
TYPES = FLOAT16, BFLOAT16, FLOAT32, TF32, TF32X3
CALLS += [(kind, dict(type=type, meshes=2, vertices=37, eigen=13, width=7, seed=type)) for kind in KINDS[:4]
          for type in TYPES]
CALLS += [(kind, dict(type=type, sizes=(30, 0, 1, 40, 3), eigen=9, width=10)) for kind in RAGGED for type in TYPES]
CALLS += [(kind, dict(vertices=1, eigen=1, width=1, type=TF32X3)) for kind in KINDS]
SLOW = [(kind, options) for kind in (Diffusion, DiffusionBackward) for options in (
    dict(vertices=700, eigen=32, width=264),
    dict(meshes=2, vertices=130, eigen=256, width=136),
    dict(meshes=200, vertices=9, eigen=16, width=24),
)] + [(kind, options) for kind in (GradientFeatures, GradientFeaturesBackward) for options in (
    dict(vertices=300, eigen=32, width=72),
    dict(vertices=40, eigen=256, width=136),
    dict(vertices=40, eigen=200, width=24),
)] + [(kind, dict(type=type, vertices=200, eigen=70, width=68)) for kind in KINDS[:4] for type in TYPES] + [
    (kind, dict(type=type, sizes=sizes, eigen=17, width=20)) for kind in RAGGED for type in TYPES
    for sizes in ([5] * 12, [0, 300, 0, 0, 30], [64, 64, 65])] + [
    (kind, dict(type=FLOAT32, vertices=20, eigen=300, width=20)) for kind in KINDS[:4]]


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("offsets", [(0, 30, 10, 50), (-7, 1 << 30, -(1 << 31), (1 << 31) - 1), (50, 0, 50, 0),
                                     (10, 20, 30, 40)])
def test_offsets_that_are_wrong_write_nothing_outside(library, kind, offsets):
    """That is the caller's fault, and results are undefined."""
    call = kind(library, sizes=(10, 20, 20), eigen=10, width=6, type=FLOAT32)
    assert library.cudaMemcpy(call.device["offsets"].at, struct.pack("4i", *offsets), 16, 1) == 0
    assert call.call() == OK
    for buffer in call.device.values():
        buffer.content()  # the guards are as they were
    call.free()


@pytest.mark.parametrize("kind", RAGGED)
def test_meshes_do_not_see_each_other(library, kind):
    """A NaN in one is in no other's results, though they share slots."""
    call = kind(library, sizes=(10, 20, 20), eigen=10, width=6)
    at = {"x": 10 * 6, "d_out": 10 * 6} if "diffusion" in kind.NAME else {"gr": 10 * 10}
    for name in (*at, "mass"):
        if name in call.host:
            row = call.device[name].bytes // 50
            assert library.cudaMemset(call.device[name].at + 10 * row, 0xff, 20 * row) == 0
    assert call.call() == OK
    for name in set(call.WRITTEN) - {"d_times", "d_lr", "d_li"}:
        for mesh in range(3):
            assert any(map(math.isnan, call.of(mesh)[name])) == (mesh == 1), (name, mesh)
    call.free()


IN_TURN = [
    *((kind, [dict(vertices=70, eigen=136, width=72), dict(vertices=3, eigen=8, width=8),
              dict(meshes=2, vertices=130, width=40), dict(vertices=50, eigen=9, type=TF32)])
      for kind in (Diffusion, DiffusionBackward)),
    *((kind, [dict(vertices=70, eigen=136, width=72), dict(vertices=3, eigen=8, width=8), dict(vertices=130, width=40),
              dict(vertices=50, eigen=9, type=TF32)]) for kind in (GradientFeatures, GradientFeaturesBackward)),
    *((kind, [dict(sizes=(30, 100), eigen=20), dict(sizes=(5, 0, 70), width=7, type=FLOAT32), dict(sizes=(3,))])
      for kind in RAGGED),
]


# Every size of tile: of few eigenvectors and of many; narrow ones and wide ones; of few vertices and of many.
ANYWHERE = """
import random
from test_library_meshes import (BFLOAT16, FLOAT32, KINDS, TYPES, Diffusion, DiffusionBackward, GradientFeatures,
                                 GradientFeaturesBackward)
draw = random.Random({seed})
def up_to(most, unit=1):
    return unit * draw.randint(1, most)
for kind in (Diffusion, DiffusionBackward):
    run(kind, vertices=up_to(150), eigen=up_to(8, 8), width=up_to(8, 8))
    run(kind, vertices=up_to(100), eigen=up_to(16, 8), width=64 + up_to(8, 8))
    run(kind, vertices=up_to(20), eigen=128 + up_to(16, 8), width=up_to(9, 8))
    run(kind, vertices=up_to(50), eigen=up_to(8, 8), width=up_to(4, 8), meshes=1 + up_to(5))
    run(kind, vertices=16400 + up_to(100), eigen=8, width=8)
for kind in (GradientFeatures, GradientFeaturesBackward):
    run(kind, vertices=up_to(150), eigen=up_to(8, 8), width=up_to(5, 8))
    run(kind, vertices=up_to(30), eigen=64 + up_to(8, 8), width=up_to(9, 8))
    run(kind, vertices=up_to(30), eigen=128 + up_to(16, 8), width=up_to(5, 8))
    run(kind, vertices=600 + up_to(100), eigen=up_to(2, 8), width=8)
assert len(ways) == 18
print(sum("mma.sync" in way for way in ways))
for kind in KINDS:
    sizes = dict(sizes=[draw.randint(0, 60) for _ in range(4)] + [1]) if kind.RAGGED else dict(meshes=2)
    for type in TYPES:
        run(kind, type=type, eigen=up_to(40), width=up_to(20), vertices=up_to(40), **sizes)
print(sum("any meshes" in way for way in ways))
"""


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_what_runs_on_each_gpu(capability):
    said = run_as_another_gpu(capability, ANYWHERE.format(seed=int(10 * float(capability))))
    of_eights, of_any = map(int, said.split())
    assert of_eights == (0 if capability == "9.0" else 18)
    assert of_any >= 8 * 5 - 2  # two may happen to have sizes for the others


@pytest.mark.parametrize("capability, taken_for", [("8.0", ""), ("8.6", ""), ("8.9", ""), ("12.0", ""), ("9.0", "8.0")])
def test_gradient_features_of_many_vertices(capability, taken_for):
    """Where each block has several tiles, up to 128 rows of the right factors stay in registers."""
    said = run_as_another_gpu(capability, """
from test_library_meshes import GradientFeatures, GradientFeaturesBackward
for kind in (GradientFeatures, GradientFeaturesBackward):
    run(kind, vertices=150, eigen=128, width=72)
    run(kind, vertices=257, eigen=72, width=8)
print(sum("of tiles of 32 x 64" in way for way in ways))
""", FUSED_KERNELS_CAPABILITY=taken_for, CUDA_CPU_MULTIPROCESSORS="2")
    assert said == "4\n"


def test_there_is_only_fp32_before_compute_capability_8():
    said = run_as_another_gpu("7.5", """
import ctypes
from test_library_meshes import (BFLOAT16, FLOAT32, KINDS, TYPES, Diffusion, DiffusionBackward, GradientFeatures,
                                 GradientFeaturesBackward)
for kind in KINDS:
    run(kind, type=FLOAT32, vertices=20, eigen=5, width=3)
for kind, sizes in ((Diffusion, (1, 8, 8, 8)), (GradientFeatures, (8, 8, 8))):
    description = kind.Description(ctypes.sizeof(kind.Description), BFLOAT16, *sizes)
    assert kind.functions(library)[0](ctypes.byref(description), ctypes.byref(ctypes.c_size_t())) == BAD_DEVICE
    print(library.fk_last_error().decode())
""")
    assert said.splitlines() == [f"the {name} needs a GPU of compute capability 8.0 or newer; this one has 7.5"
                                 for name in ("diffusion", "gradient features")]


@in_turn(IN_TURN)
def test_shapes_in_turn(library, kind, options):
    """(The diffusion adds in another order in each call.)"""
    call_in_turn(library, kind, options, same_bits=kind not in (Diffusion, DiffusionBackward))


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_streams_call_at_the_same_time(library, kind):
    call_at_the_same_time(library, kind)


WRONG = {}
for kind in KINDS:
    WRONG[kind] = [
        *((dict(meshes=value), BAD_SHAPE) for value in (-1, 65536, 1 << 40)),
        *((dict(vertices=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
        *((dict(eigen=value), BAD_SHAPE) for value in (0, -8, 32769, 1 << 40)),
        *((dict(width=value), BAD_SHAPE) for value in (0, -8, 32769, 1 << 40)),
        (dict(meshes=65535, eigen=16386), BAD_SHAPE),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, -1, 6)),
    ]
    if "diffusion" in kind.NAME:
        WRONG[kind].append((dict(meshes=0), BAD_SHAPE))
    if not kind.RAGGED:
        WRONG[kind].append((dict(meshes=1025, vertices=1 << 20), BAD_SHAPE))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
