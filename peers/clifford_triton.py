"""Lesson 10's layer in Triton. It has no templates to compute the terms of a product when a kernel
is compiled, so Python writes the kernels of an algebra: `source(algebra)` is their text."""
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


# A program takes whole rows, so that it has the sums of the norm; w (triples, features) stays.
@tuned([
    config(16, 1, PROGRAMS=132, STAGES=2),
    config(8, 1, PROGRAMS=264, STAGES=1),
    config(8, 1, PROGRAMS=132, STAGES=2),
    config(4, 1, PROGRAMS=528, STAGES=1),
], key=["batch", "features"])
@triton.jit
def forward_kernel(x, y, w, out, inverse_rms, batch, features, BLOCK: tl.constexpr,
                   PROGRAMS: tl.constexpr, STAGES: tl.constexpr):
    f = tl.arange(0, BLOCK)
    mask = f < features
    plane = batch * features
{load_w}
    for row in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=STAGES):
        at = row * features + f
{load_xy}
        gate_x = gate(x0)
        gate_y = gate(y0)
{gate_xy}
{product}
{normalize}
{store_out}


# sums (batch, grades) = the sums of d_out * out over features and the blades of a grade.
@triton.jit
def dots_kernel(d_out, out, sums, batch, features, BLOCK: tl.constexpr):
    f = tl.arange(0, BLOCK)
    mask = f < features
    plane = batch * features
    row = tl.program_id(0)
    at = row * features + f
{dots}


# A program takes a strip of features and every so manieth row, and keeps its part of d_w.
@tuned([
    config(4, 1, BLOCK=128, ROWS=64, STAGES=1),
    config(4, 1, BLOCK=128, ROWS=64, STAGES=2),
    config(4, 1, BLOCK=128, ROWS=128, STAGES=1),
    config(8, 1, BLOCK=256, ROWS=64, STAGES=1),
], key=["batch", "features"], reset_to_zero=["d_w"])
@triton.jit
def backward_kernel(x, y, w, d_out, out, inverse_rms, dots, d_x, d_y, d_w, batch, features,
                    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < features
    plane = batch * features
{load_w}
{zero_d_w}
    for row in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=STAGES):
        at = row * features + f
{load_xy}
        gate_x = gate(x0)
        gate_y = gate(y0)
        gated_slope_x = gate_slope(x0)
        gated_slope_y = gate_slope(y0)
{load_d_z}
{d_left}
{d_right}
{d_gates}
{store_d_xy}
{d_weights}
{store_d_w}
'''


def lines(indent, texts):
    return "\n".join(" " * indent + text for text in texts)


def product_sum(terms):
    """terms: (triple, sign, left, right), names but for the sign. Their sum, as the text of an
    expression in which each triple's weight multiplies once."""
    by_triple = {}
    for triple, sign, left, right in terms:
        by_triple.setdefault(triple, []).append(f"{'-' if sign < 0 else '+'} {left} * {right}")
    return " + ".join(f"{triple} * ({' '.join(parts).removeprefix('+ ')})"
                      for triple, parts in by_triple.items())


def source(algebra):
    """The text of the module with forward_kernel, dots_kernel and backward_kernel."""
    blades, triples = range(len(algebra.blades)), range(len(algebra.triples))
    grades = sorted(set(algebra.grades))
    count = len(grades)

    def sums_of(position, left, right):
        """One sum for each blade at `position` of a term."""
        for blade in blades:
            yield product_sum([(f"w{term[3]}", term[4], left.format(*term), right.format(*term))
                               for term in algebra.terms if term[position] == blade])

    def squares(grade):
        return " + ".join(f"z{k} * z{k}" for k in algebra.of_grade(grade))

    def dots(grade):
        return [f"dot += tl.load(d_out + {k} * plane + at, mask=mask, other=0.0) * "
                f"tl.load(out + {k} * plane + at, mask=mask, other=0.0)"
                for k in algebra.of_grade(grade)]

    load = "tl.load({} + {} * plane + at, mask=mask, other=0.0)"
    scales = [f"inverse{c} = tl.load(inverse_rms + row * {count} + {c})" for c in grades]
    scales += [f"mean{c} = tl.load(dots + row * {count} + {c}) / features" for c in grades]
    d_z = [f"d_z{k} = inverse{c} * ({load.format('d_out', k)} - {load.format('out', k)} * mean{c})"
           for k, c in zip(blades, algebra.grades)]
    d_weights = [f"d_w{t} += " + " ".join(
        f"{'-' if sign < 0 else '+'} d_z{k} * left{i} * right{j}"
        for i, j, k, triple, sign in algebra.terms if triple == t).removeprefix("+ ")
        for t in triples]
    return TEMPLATE.format(
        load_w=lines(4, [f"w{t} = tl.load(w + {t} * features + f, mask=mask, other=0.0)"
                         for t in triples]),
        load_xy=lines(8, [f"{name}{i} = {load.format(name, i)}" for name in "xy" for i in blades]),
        gate_xy=lines(8, [f"{side}{i} = {name}{i} * gate_{name}"
                          for side, name in (("left", "x"), ("right", "y")) for i in blades]),
        product=lines(8, [f"z{k} = {text}"
                          for k, text in enumerate(sums_of(2, "left{0}", "right{1}"))]),
        normalize=lines(8, [text for c in grades for text in (
            f"inverse{c} = 1 / tl.sqrt(tl.sum({squares(c)}, axis=0) / features + 1e-6)",
            f"tl.store(inverse_rms + row * {count} + {c}, inverse{c})")]),
        store_out=lines(8, [f"tl.store(out + {k} * plane + at, z{k} * inverse{c}, mask=mask)"
                            for k, c in zip(blades, algebra.grades)]),
        dots=lines(4, [text for c in grades for text in (
            "dot = tl.zeros((BLOCK,), dtype=tl.float32)", *dots(c),
            f"tl.store(sums + row * {count} + {c}, tl.sum(dot, axis=0))")]),
        zero_d_w=lines(4, [f"d_w{t} = tl.zeros((BLOCK,), dtype=tl.float32)" for t in triples]),
        load_d_z=lines(8, scales + d_z + [
            f"{side}{i} = {name}{i} * gate_{name}"
            for side, name in (("left", "x"), ("right", "y")) for i in blades]),
        d_left=lines(8, [f"d_left{i} = {text}"
                         for i, text in enumerate(sums_of(0, "d_z{2}", "right{1}"))]),
        d_right=lines(8, [f"d_right{j} = {text}"
                          for j, text in enumerate(sums_of(1, "d_z{2}", "left{0}"))]),
        d_gates=lines(8, [
            f"d_gate_{name} = " + " + ".join(f"d_{side}{i} * {name}{i}" for i in blades)
            for side, name in (("left", "x"), ("right", "y"))]),
        store_d_xy=lines(8, [
            f"tl.store(d_{name} + {i} * plane + at, d_{side}{i} * gate_{name}"
            + (f" + d_gate_{name} * gated_slope_{name}" if i == 0 else "") + ", mask=mask)"
            for side, name in (("left", "x"), ("right", "y")) for i in blades]),
        d_weights=lines(8, d_weights),
        store_d_w=lines(4, [
            f"tl.store(d_w + (tl.program_id(0) * {len(triples)} + {t}) * features + f, d_w{t}, "
            "mask=mask)" for t in triples]),
    )


class Layer:
    """The kernels of an algebra, as functions of tensors."""

    def __init__(self, algebra):
        self.algebra = algebra
        with tempfile.TemporaryDirectory() as folder:  # Triton wants a kernel's source in a file
            path = Path(folder) / f"clifford_{len(algebra.blades)}_blades.py"
            path.write_text(source(algebra))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            self.kernels = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.kernels)

    def forward(self, x, y, w):
        """out, and 1 / rms of each row and grade (batch, grades), which backward wants."""
        _, batch, features = x.shape
        out = torch.empty_like(x)
        inverse_rms = x.new_empty((batch, max(self.algebra.grades) + 1))

        def grid(sizes):
            return (min(batch, sizes["PROGRAMS"]),)

        self.kernels.forward_kernel[grid](x, y, w.t().contiguous(), out, inverse_rms, batch,
                                          features, BLOCK=triton.next_power_of_2(features))
        return out, inverse_rms

    def backward(self, x, y, w, out, inverse_rms, d_out):
        _, batch, features = x.shape
        d_x, d_y, dots = torch.empty_like(x), torch.empty_like(y), torch.empty_like(inverse_rms)
        self.kernels.dots_kernel[(batch,)](d_out, out, dots, batch, features,
                                           BLOCK=triton.next_power_of_2(features))
        most = min(batch, 128)
        parts = x.new_zeros((most, len(self.algebra.triples), features))

        def grid(sizes):
            return (min(most, sizes["ROWS"]), triton.cdiv(features, sizes["BLOCK"]))

        self.kernels.backward_kernel[grid](x, y, w.t().contiguous(), d_out, out, inverse_rms, dots,
                                           d_x, d_y, parts, batch, features)
        return d_x, d_y, parts.sum(dim=0).t().contiguous()


@functools.lru_cache(maxsize=None)
def layer(algebra):
    return Layer(algebra)
