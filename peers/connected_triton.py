"""The fully connected layer in Triton: forward makes the planes on the way into its products, a kernel
for each grade of the result; backward writes planes, multiplies with PyTorch's products, and adds the
planes' gradients up in one kernel. Python writes the text of an algebra's kernels."""
import functools
import importlib.util
from pathlib import Path
import tempfile

import torch
import triton

TEMPLATE = '''
import triton
import triton.language as tl

from tuning import config, tuned


@triton.jit
def gate(s):
    return 0.5 * (1 + tl.erf(s * 0.7071067811865476))


@triton.jit
def gate_slope(s):
    return 0.3989422804014327 * tl.exp(-0.5 * s * s)

{forward_kernels}

# out = z / rms for each grade, in place; a program a row.
@triton.jit
def normalize_kernel(out, inverse_rms, batch, features, BLOCK: tl.constexpr):
    f = tl.arange(0, BLOCK)
    mask = f < features
    plane = batch * features
    row = tl.program_id(0)
    at = row * features + f
{normalize}


# d_z from out and d_out; a program a row.
@triton.jit
def d_z_kernel(d_out, out, inverse_rms, d_z, batch, features, BLOCK: tl.constexpr):
    f = tl.arange(0, BLOCK)
    mask = f < features
    plane = batch * features
    row = tl.program_id(0)
    at = row * features + f
{d_z}


@triton.jit
def planes_kernel(x, y, planes, plane, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < plane
{load_flat}
{store_planes}


# From the planes' gradients those of x and y.
@triton.jit
def gradients_kernel(x, y, planes, d_x, d_y, plane, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < plane
{load_flat}
{add_gradients}
'''

FORWARD = '''
@tuned([
    config(4, 2, BM=64, BN=64, BK=16),
    config(8, 2, BM=64, BN=128, BK=16),
    config(4, 2, BM=32, BN=128, BK=16),
    config(8, 2, BM=128, BN=64, BK=16),
    config(4, 2, BM=32, BN=64, BK=32),
    config(8, 2, BM=64, BN=64, BK=32),
], key=["batch", "features"])
@triton.jit
def forward_{grade}(x, y, w, z, batch, features, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    plane = batch * features
    square = features * features
{zero}
    for k in range(0, features, BK):
        f = k + tl.arange(0, BK)
        at = rows[:, None] * features + f[None, :]
        mask = (rows[:, None] < batch) & (f[None, :] < features)
        at_w = f[:, None] * features + cols[None, :]
        mask_w = (f[:, None] < features) & (cols[None, :] < features)
{load}
{multiply}
    at = rows[:, None] * features + cols[None, :]
    mask = (rows[:, None] < batch) & (cols[None, :] < features)
{store}
'''


def lines(indent, texts):
    return "\n".join(" " * indent + text for text in texts)


def signed_sum(terms):
    """terms: (sign, left, right)."""
    return " ".join(f"{'-' if sign < 0 else '+'} {left} * {right}"
                    for sign, left, right in terms).removeprefix("+ ")


LOAD = "tl.load({} + {} * plane + at, mask=mask, other=0.0)"


def load_gated(blades):
    """x, y and their gates; left0, right0, ... are x' and y'."""
    texts = [f"{name}{i} = {LOAD.format(name, i)}" for name in "xy" for i in blades]
    texts += [f"gate_{name} = gate({name}0)" for name in "xy"]
    return texts + [f"{side}{i} = {name}{i} * gate_{name}"
                    for side, name in (("left", "x"), ("right", "y")) for i in blades]


def planes_of(algebra, grade=None):
    """(triple, blade) of each plane, in the order of memory."""
    return [(t, k) for t, (_, result, _) in enumerate(algebra.triples) if grade in (None, result)
            for k in algebra.of_grade(result)]


def plane_sum(algebra, t, blade):
    return signed_sum([(sign, f"left{i}", f"right{j}")
                       for i, j, k, triple, sign in algebra.terms if (triple, k) == (t, blade)])


def forward_source(algebra, grade):
    blades = algebra.of_grade(grade)
    multiply, last = [], None
    for t, k in planes_of(algebra, grade):
        if t != last:
            multiply.append(f"w{t} = tl.load(w + {t} * square + at_w, mask=mask_w, other=0.0)")
            last = t
        multiply.append(f"z{k} = tl.dot({plane_sum(algebra, t, k)}, w{t}, z{k})")
    return FORWARD.format(
        grade=grade, zero=lines(4, [f"z{k} = tl.zeros((BM, BN), dtype=tl.float32)" for k in blades]),
        load=lines(8, load_gated(range(len(algebra.blades)))), multiply=lines(8, multiply),
        store=lines(4, [f"tl.store(z + {k} * plane + at, z{k}, mask=mask)" for k in blades]))


def source(algebra):
    blades, grades = range(len(algebra.blades)), sorted(set(algebra.grades))
    planes, count = planes_of(algebra), len(grades)

    def normalize(c):
        own = algebra.of_grade(c)
        squares = " + ".join(f"z{k} * z{k}" for k in own)
        return [*(f"z{k} = {LOAD.format('out', k)}" for k in own),
                f"r = 1 / tl.sqrt(tl.sum({squares}, axis=0) / features + 1e-6)",
                f"tl.store(inverse_rms + row * {count} + {c}, r)",
                *(f"tl.store(out + {k} * plane + at, z{k} * r, mask=mask)" for k in own)]

    def d_z(c):
        own = algebra.of_grade(c)
        dots = " + ".join(f"out{k} * d{k}" for k in own)
        return [*(f"out{k} = {LOAD.format('out', k)}" for k in own),
                *(f"d{k} = {LOAD.format('d_out', k)}" for k in own),
                f"r = tl.load(inverse_rms + row * {count} + {c})",
                f"mean = tl.sum({dots}, axis=0) / features",
                *(f"tl.store(d_z + {k} * plane + at, r * (d{k} - out{k} * mean), mask=mask)"
                  for k in own)]

    numbers = {plane: n for n, plane in enumerate(planes)}
    gradients = [f"p{n} = {LOAD.format('planes', n)}" for n in range(len(planes))]
    for side, name, own, other, other_side in (("left", "x", 0, 1, "right"), ("right", "y", 1, 0, "left")):
        for i in blades:
            text = signed_sum([(term[4], f"p{numbers[term[3], term[2]]}", f"{other_side}{term[other]}")
                               for term in algebra.terms if term[own] == i])
            gradients.append(f"d_{side}{i} = {text}")
        gradients.append(f"d_gate_{name} = " + " + ".join(f"d_{side}{i} * {name}{i}" for i in blades))
        gradients += [
            f"tl.store(d_{name} + {i} * plane + at, d_{side}{i} * gate_{name}"
            + (f" + d_gate_{name} * gate_slope({name}0)" if i == 0 else "") + ", mask=mask)"
            for i in blades]
    return TEMPLATE.format(
        forward_kernels="\n".join(forward_source(algebra, c) for c in grades),
        normalize=lines(4, [text for c in grades for text in normalize(c)]),
        d_z=lines(4, [text for c in grades for text in d_z(c)]),
        load_flat=lines(4, load_gated(blades)),
        store_planes=lines(4, [
            f"tl.store(planes + {n} * plane + at, {plane_sum(algebra, t, k)}, mask=mask)"
            for n, (t, k) in enumerate(planes)]),
        add_gradients=lines(4, gradients))


class Layer:
    """The kernels of an algebra, as functions of tensors."""

    def __init__(self, algebra):
        self.algebra = algebra
        self.grades = sorted(set(algebra.grades))
        with tempfile.TemporaryDirectory() as folder:  # Triton wants a kernel's source in a file
            path = Path(folder) / f"connected_{len(algebra.blades)}_blades.py"
            path.write_text(source(algebra))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            self.kernels = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.kernels)

    def forward(self, x, y, w):
        """out, and 1 / rms of each row and grade (batch, grades), which backward wants."""
        _, batch, features = x.shape
        out = torch.empty_like(x)
        inverse_rms = x.new_empty((batch, len(self.grades)))

        def grid(sizes):
            return (triton.cdiv(batch, sizes["BM"]), triton.cdiv(features, sizes["BN"]))

        for grade in self.grades:
            getattr(self.kernels, f"forward_{grade}")[grid](x, y, w, out, batch, features)
        self.kernels.normalize_kernel[(batch,)](out, inverse_rms, batch, features,
                                                BLOCK=triton.next_power_of_2(features))
        return out, inverse_rms

    def backward(self, x, y, w, out, inverse_rms, d_out):
        _, batch, features = x.shape
        d_z, d_x, d_y = torch.empty_like(x), torch.empty_like(x), torch.empty_like(y)
        self.kernels.d_z_kernel[(batch,)](d_out, out, inverse_rms, d_z, batch, features,
                                          BLOCK=triton.next_power_of_2(features))
        plane = batch * features
        planes = x.new_empty((len(planes_of(self.algebra)), batch, features))
        grid = (triton.cdiv(plane, 256),)
        self.kernels.planes_kernel[grid](x, y, planes, plane, BLOCK=256)
        d_w = torch.empty_like(w)
        start = 0
        for t, (_, grade, _) in enumerate(self.algebra.triples):
            own = self.algebra.of_grade(grade)
            rows = d_z[own[0]:own[-1] + 1].view(-1, features)
            part = planes[start:start + len(own)].view(-1, features)
            torch.mm(part.t(), rows, out=d_w[t])
            torch.mm(rows, w[t].t(), out=part)
            start += len(own)
        self.kernels.gradients_kernel[grid](x, y, planes, d_x, d_y, plane, BLOCK=256)
        return d_x, d_y, d_w


@functools.lru_cache(maxsize=None)
def layer(algebra):
    return Layer(algebra)
