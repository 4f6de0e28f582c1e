"""The library's operators on meshes, called as in test_library.py."""

import ctypes
import math

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, FLOAT16, FLOAT32, ROUNDING, Call, call_at_the_same_time,
                          call_in_turn, for_each, fused_kernels, in_turn, library, near, numbers, packed,
                          refuse_a_damaged_workspace, refuse_what_is_damaged, run_as_another_gpu)

ROUNDED, FP32 = ROUNDING[BFLOAT16], 2.0**-18  # the second: fp32's own errors, of the size of the terms


def columns(matrix, width):
    return [matrix[col::width] for col in range(width)]


def rows(matrix, width):
    return [matrix[at:at + width] for at in range(0, len(matrix), width)]


def dot(a, b):
    """The sum of products, and of their sizes."""
    terms = [x * y for x, y in zip(a, b)]
    return sum(terms), sum(map(abs, terms))


class Mesh(Call):
    """Of each mesh its own: self.of(mesh)."""
    Description = fused_kernels.fk_diffusion

    def __init__(self, library, meshes=1, vertices=70, eigen=24, width=16, seed=0):
        counts = self.counts(meshes, vertices, eigen, width)
        self.numbers = {name: numbers(counts[name], seed + i) for i, name in enumerate(self.NAMES)}
        # Powers of two: a product with one is not rounded. The exponent is from -2 to 0.
        self.numbers["mass"] = [2.0**round(2 * value) for value in self.numbers["mass"]]
        self.numbers["evalues"] = [2 * abs(value) for value in self.numbers["evalues"]]
        self.numbers["times"] = [abs(value) for value in self.numbers["times"]]
        description = self.Description(ctypes.sizeof(self.Description), BFLOAT16, meshes, vertices, eigen, width)
        super().__init__(library, description, {
            name: b"\xff" * (2 * counts[name]) if name in self.WRITTEN else packed(values, BFLOAT16)
            for name, values in self.numbers.items()})

    @staticmethod
    def counts(meshes, vertices, eigen, width):
        values, spectrum = meshes * vertices * width, meshes * eigen * width
        return {"x": values, "d_out": values, "out": values, "d_x": values, "basis": meshes * vertices * eigen,
                "mass": meshes * vertices, "evalues": meshes * eigen, "times": width, "d_times": width,
                "spectral": spectrum, "d_spectral": spectrum}

    def of(self, mesh):
        """Its operands; those that are written as they have been found."""
        all_of = self.numbers | {name: self.found(name, BFLOAT16, 1, len(self.numbers[name])) for name in self.WRITTEN}
        shared = ("times", "d_times")
        return {name: values if name in shared else rows(values, len(values) // self.description.meshes)[mesh]
                for name, values in all_of.items()}

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
            damping = self.damping(own)
            expected = [d * total for d, (total, _) in zip(damping, sums)]
            bound = [ROUNDED * 1.01 * abs(value) + FP32 * d * size for value, d, (_, size) in
                     zip(expected, damping, sums)]
            if not near(own["spectral"], expected, bound):
                return False
            # The second product is of what the first one has written.
            sums = [dot(row, s) for row in rows(own["basis"], E) for s in columns(own["spectral"], W)]
            bound = [ROUNDED * abs(total) + FP32 * size for total, size in sums]
            if not near(own["out"], [total for total, _ in sums], bound):
                return False
        return True


class DiffusionBackward(Mesh):
    NAME, WRITTEN = "diffusion_backward", ("d_x", "d_times")
    NAMES = ("d_out", "d_spectral", "basis", "mass", "evalues", "times", "spectral", "d_x", "d_times")

    @classmethod
    def functions(cls, library):
        return library.fk_diffusion_backward_workspace, library.fk_diffusion_backward

    def result_is_right(self):
        of = self.description
        E, W = of.eigen, of.width
        d_times, sizes = [0.0] * W, [0.0] * W
        for mesh in range(of.meshes):
            own = self.of(mesh)
            sums = [dot(left, d) for left in columns(own["basis"], E) for d in columns(own["d_out"], W)]
            s = [more + total for more, (total, _) in zip(own["d_spectral"], sums)]
            for at, (value, spectral) in enumerate(zip(s, own["spectral"])):
                term = own["evalues"][at // W] * value * spectral
                d_times[at % W] -= term
                sizes[at % W] += abs(term) + own["evalues"][at // W] * sums[at][1] * abs(spectral)
            damped = [d * value for d, value in zip(self.damping(own), s)]
            sums = [dot(row, column) for row in rows(own["basis"], E) for column in columns(damped, W)]
            expected = [own["mass"][at // W] * total for at, (total, _) in enumerate(sums)]
            # The damped sums are rounded before the second product, and its result.
            bound = [ROUNDED * abs(value) + own["mass"][at // W] * (ROUNDED * 1.01 + FP32) * size
                     for at, (value, (_, size)) in enumerate(zip(expected, sums))]
            if not near(own["d_x"], expected, bound):
                return False
        bound = [ROUNDED * abs(value) + FP32 * size for value, size in zip(d_times, sizes)]
        return near(self.of(0)["d_times"], d_times, bound)


class Tangents(Call):
    """The gradient features."""
    Description = fused_kernels.fk_gradients

    def __init__(self, library, vertices=70, eigen=24, width=16, dense=False, seed=0):
        """dense: of lr and li all elements are other numbers. Else each row has one, a power of two: then x lr^T and x
        li^T are exact in bf16, and the bounds are close."""
        sizes = {"x": (eigen, width), "gr": (vertices, eigen), "gi": (vertices, eigen), "lr": (width, width),
                 "li": (width, width), "out": (vertices, width)}
        self.sizes = {name: sizes[name.removeprefix("d_")] for name in self.NAMES}
        # Small, so that not all features are near 1 or -1.
        scales = {"gr": 1 / 4, "gi": 1 / 4, "lr": 1 / 4, "li": 1 / 4}
        self.numbers = {name: numbers(a * b, seed + i, scales.get(name, 1.0))
                        for i, (name, (a, b)) in enumerate(self.sizes.items())}
        self.rounded = ROUNDED * 1.01 if dense else 0
        for row in range(0 if dense else width):
            own = slice(row * width, (row + 1) * width)
            for name, at in (("lr", 3 * row + seed), ("li", 5 * row + 1 + seed)):
                power = (-1)**row / 2**(row % 3)
                self.numbers[name][own] = [power if col == at % width else 0.0 for col in range(width)]
        description = self.Description(ctypes.sizeof(self.Description), BFLOAT16, vertices, eigen, width)
        super().__init__(library, description, {
            name: b"\xff" * (2 * len(values)) if name in self.WRITTEN else packed(values, BFLOAT16)
            for name, values in self.numbers.items()})

    def gradients(self):
        """xr, xi, ar, ai (vertices, width) as lists of rows, and how far off ar and ai may be."""
        E, W = self.description.eigen, self.description.width
        x, gr, gi, lr, li = (rows(self.numbers[name], self.sizes[name][1]) for name in ("x", "gr", "gi", "lr", "li"))
        by_col = list(zip(*x))
        xr, xi = ([[dot(row, col)[0] for col in by_col] for row in g] for g in (gr, gi))
        m1, m2 = ([[dot(row, weights)[0] for weights in by] for row in x] for by in (lr, li))  # (E, W), not rounded
        ar, ai, off = [], [], []
        for left, right in zip(gr, gi):
            real, imaginary, wrong = [], [], []
            for w in range(W):
                first, size_1 = dot(left, [m1[e][w] for e in range(E)])
                second, size_2 = dot(right, [m2[e][w] for e in range(E)])
                third, size_3 = dot(right, [m1[e][w] for e in range(E)])
                fourth, size_4 = dot(left, [m2[e][w] for e in range(E)])
                real.append(first - second)
                imaginary.append(third + fourth)
                # M1 and M2 are rounded.
                wrong.append((self.rounded + FP32) * max(size_1 + size_2, size_3 + size_4))
            ar.append(real)
            ai.append(imaginary)
            off.append(wrong)
        return xr, xi, ar, ai, off


class GradientFeatures(Tangents):
    NAME, NAMES, WRITTEN = "gradients", ("x", "gr", "gi", "lr", "li", "out"), ("out",)

    def result_is_right(self):
        expected, bound = [], []
        for xr, xi, ar, ai, off in zip(*self.gradients()):
            for a, b, c, d, wrong in zip(xr, xi, ar, ai, off):
                value = math.tanh(a * c + b * d)
                expected.append(value)
                # tanh.approx is off by 2^-10.9; its slope is at most 1.
                bound.append(ROUNDED * abs(value) + 2.0**-10 + (abs(a) + abs(b)) * wrong)
        return near(self.found("out", BFLOAT16, 1, len(expected)), expected, bound)


class GradientFeaturesBackward(Tangents):
    NAME, WRITTEN = "gradients_backward", ("d_x", "d_lr", "d_li")
    NAMES = ("d_out", "x", "gr", "gi", "lr", "li", "d_x", "d_lr", "d_li")

    @classmethod
    def functions(cls, library):
        return library.fk_gradients_backward_workspace, library.fk_gradients_backward

    def result_is_right(self):
        """Each term of a sum may be off by what its factors are; all of this adds up, as if all had one sign."""
        of = self.description
        E, W, V = of.eigen, of.width, of.vertices
        xr, xi, ar, ai, off = self.gradients()
        d_out, gr, gi, lr, li = (rows(self.numbers[name], self.sizes[name][1])
                                 for name in ("d_out", "gr", "gi", "lr", "li"))
        P, Q, R, S, wrong_p, wrong_q, wrong_r, wrong_s = ([[0.0] * W for _ in range(V)] for _ in range(8))
        for v in range(V):
            for w in range(W):
                a, b, c, d, wrong = xr[v][w], xi[v][w], ar[v][w], ai[v][w], off[v][w]
                u, of_u = a * c + b * d, (abs(a) + abs(b)) * wrong
                slope = 1 - math.tanh(u)**2
                g = d_out[v][w] * slope
                # |d slope / du| <= 0.77, and 2 slope where that is less.
                steep = min(0.77, 2 * (1 - math.tanh(max(0, abs(u) - of_u))**2))
                of_g = abs(d_out[v][w]) * (steep * of_u + FP32 * slope)
                for to, off_by, factor, of_factor in ((P, wrong_p, a, 0), (Q, wrong_q, b, 0), (R, wrong_r, c, wrong),
                                                      (S, wrong_s, d, wrong)):
                    to[v][w] = g * factor
                    off_by[v][w] = 1.01 * ROUNDED * abs(g * factor) + of_g * abs(factor) + (abs(g) + of_g) * of_factor

        def sums(terms):
            """(E, W): the sum over v of G[v][e] T[v][w] of terms (G, T, how far T is off, sign); how far it is off."""
            value, far = [[0.0] * W for _ in range(E)], [[0.0] * W for _ in range(E)]
            for G, T, of_T, sign in terms:
                for v in range(V):
                    for e in range(E):
                        factor = G[v][e]
                        for w in range(W) if factor else ():
                            value[e][w] += sign * factor * T[v][w]
                            far[e][w] += abs(factor) * (of_T[v][w] + FP32 * abs(T[v][w]))
            return value, far

        def rounded(value, far):
            return value, [[f + 1.01 * ROUNDED * abs(n) for f, n in zip(*both)] for both in zip(far, value)]

        dM1, off_1 = rounded(*sums([(gr, P, wrong_p, 1), (gi, Q, wrong_q, 1)]))
        dM2, off_2 = rounded(*sums([(gr, Q, wrong_q, 1), (gi, P, wrong_p, -1)]))
        D, off_d = sums([(gr, R, wrong_r, 1), (gi, S, wrong_s, 1)])
        x = rows(self.numbers["x"], W)
        for name, dM, wrong in (("d_lr", dM1, off_1), ("d_li", dM2, off_2)):
            expected = [sum(dM[e][i] * x[e][j] for e in range(E)) for i in range(W) for j in range(W)]
            bound = [sum((wrong[e][i] + FP32 * abs(dM[e][i])) * abs(x[e][j]) for e in range(E)) +
                     ROUNDED * abs(expected[i * W + j]) for i in range(W) for j in range(W)]
            if not near(self.found(name, BFLOAT16, 1, W * W), expected, bound):
                return False
        expected, bound = [], []
        for e in range(E):
            for w in range(W):
                value = D[e][w] + sum(dM1[e][k] * lr[k][w] + dM2[e][k] * li[k][w] for k in range(W))
                size = sum((off_1[e][k] + FP32 * abs(dM1[e][k])) * abs(lr[k][w]) +
                           (off_2[e][k] + FP32 * abs(dM2[e][k])) * abs(li[k][w]) for k in range(W))
                expected.append(value)
                bound.append(ROUNDED * abs(value) + off_d[e][w] + size)
        return near(self.found("d_x", BFLOAT16, 1, E * W), expected, bound)


KINDS = [Diffusion, DiffusionBackward, GradientFeatures, GradientFeaturesBackward]
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
SLOW = [(kind, options) for kind in (Diffusion, DiffusionBackward) for options in (
    dict(vertices=700, eigen=32, width=264),
    dict(meshes=2, vertices=130, eigen=256, width=136),
    dict(meshes=200, vertices=9, eigen=16, width=24),
)] + [(kind, options) for kind in (GradientFeatures, GradientFeaturesBackward) for options in (
    dict(vertices=300, eigen=32, width=72),
    dict(vertices=40, eigen=256, width=136),
    dict(vertices=40, eigen=200, width=24),
)]


@for_each(CALLS, SLOW)
def test_result(library, kind, options):
    kind(library, **options).run_twice()


IN_TURN = [
    *((kind, [dict(vertices=70, eigen=136, width=72), dict(vertices=3, eigen=8, width=8),
              dict(meshes=2, vertices=130, width=40)]) for kind in (Diffusion, DiffusionBackward)),
    *((kind, [dict(vertices=70, eigen=136, width=72), dict(vertices=3, eigen=8, width=8), dict(vertices=130, width=40)])
      for kind in (GradientFeatures, GradientFeaturesBackward)),
]


# Every size of tile: of few eigenvectors and of many; narrow ones and wide ones; of few vertices and of many.
ANYWHERE = """
import random
from test_library_meshes import Diffusion, DiffusionBackward, GradientFeatures, GradientFeaturesBackward
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
"""


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_what_runs_on_each_gpu(capability):
    said = run_as_another_gpu(capability, ANYWHERE.format(seed=int(10 * float(capability))))
    assert int(said) == (0 if capability == "9.0" else 18)


def test_there_is_no_bf16_before_compute_capability_8():
    said = run_as_another_gpu("7.5", """
import ctypes
from test_library_meshes import BFLOAT16, Diffusion, GradientFeatures
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
for of_diffusion in (Diffusion, DiffusionBackward):
    WRONG[of_diffusion] = [
        *((dict(meshes=value), BAD_SHAPE) for value in (0, -1, 65536)),
        *((dict(vertices=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
        *((dict(eigen=value), BAD_SHAPE) for value in (0, -8, 20, 264, 1 << 40)),
        *((dict(width=value), BAD_SHAPE) for value in (0, -8, 12, 520)),
        (dict(meshes=1025, vertices=1 << 20), BAD_SHAPE),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, FLOAT16, FLOAT32)),
    ]
for of_tangents in (GradientFeatures, GradientFeaturesBackward):
    WRONG[of_tangents] = [
        *((dict(vertices=value), BAD_SHAPE) for value in (0, -1, (1 << 30) + 1, 1 << 40)),
        *((dict(eigen=value), BAD_SHAPE) for value in (0, -8, 20, 264, 1 << 40)),
        *((dict(width=value), BAD_SHAPE) for value in (0, -8, 12, 32776, 1 << 40)),
        *((dict(type=value), BAD_ARGUMENT) for value in (0, FLOAT16, FLOAT32)),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
