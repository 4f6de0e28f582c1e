"""The library's operators on meshes, called as in test_library.py."""

import ctypes
import math

import pytest

from test_library import (BAD_ARGUMENT, BAD_SHAPE, BFLOAT16, FLOAT16, FLOAT32, ROUNDING, Call, call_at_the_same_time,
                          fused_kernels, library, name_of, near, numbers, packed, refuse_a_damaged_workspace,
                          refuse_what_is_damaged)

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


KINDS = [Diffusion, DiffusionBackward]
CALLS = [(kind, options) for kind in (Diffusion, DiffusionBackward) for options in (
    {},
    dict(vertices=1, eigen=8, width=8),
    dict(vertices=201, eigen=136, width=8),
    dict(meshes=3, vertices=21, eigen=40, width=72),
)]
SLOW = [(kind, options) for kind in (Diffusion, DiffusionBackward) for options in (
    dict(vertices=700, eigen=32, width=264),
    dict(meshes=2, vertices=130, eigen=256, width=136),
    dict(meshes=200, vertices=9, eigen=16, width=24),
)]


@pytest.mark.parametrize("kind, options", [
    *(pytest.param(*each, id=name_of(*each)) for each in CALLS),
    *(pytest.param(*each, id=name_of(*each), marks=pytest.mark.extensive) for each in SLOW),
])
def test_result(library, kind, options):
    kind(library, **options).run_twice()


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


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused(library, kind):
    refuse_what_is_damaged(library, kind, WRONG[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_workspace_is_refused(library, kind):
    refuse_a_damaged_workspace(kind(library))
