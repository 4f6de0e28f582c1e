"""`python3 -m fused_kernels` says which library and which device there is, and calls each function of the library once
at a small shape, with results of NaN before the call. It compares them with a reference in fp64. The reference of a
gradient is a difference of two values of the function, so it is no formula that the library could share. Only Python's
own modules are needed."""

import collections
import ctypes
import itertools
import math
import operator
import os
import random
import struct
import sys
import time

import fused_kernels as fk
from fused_kernels import (FK_BFLOAT16 as BF16, FK_FLOAT16 as FP16, FK_FLOAT32 as FP32, FK_TF32 as TF32,
                           FK_TF32X3 as TF32X3)

# A result's relative error, in the Frobenius norm, is at most 8 times this: the unit roundoff of the type in which
# operands and results are stored, or a bound on the error of the products (the header, at fk_product_forward()). What
# is FK_FLOAT32 may be multiplied by three products in TF32. A result is rounded a few times on its way; a wrong one is
# off by far more.
ROUNDING = {FP16: 2.0**-11, BF16: 2.0**-8, FP32: 2.0**-18, TF32: 2.0**-10, TF32X3: 2.0**-18}
TYPES = {FP16: "fp16", BF16: "bf16", FP32: "fp32", TF32: "tf32", TF32X3: "tf32x3"}
STEP = 1e-5  # in fp64 a difference over twice this has some ten digits

# ---- Formulas in fp64: operands are lists of numbers, row by row, and results {name: list} ------------------------


def multiply(a, b, depth):
    """a b, where a has `depth` columns and b so many rows."""
    cols = len(b) // depth
    columns = [b[col::cols] for col in range(cols)]
    return [sum(map(operator.mul, a[at:at + depth], column)) for at in range(0, len(a), depth) for column in columns]


def transposed(a, cols):
    return [value for col in range(cols) for value in a[col::cols]]


def log_sum_of(logits):
    return math.log(sum(map(math.exp, logits)))


def gating(x, w1, w2, b1, b2):
    s, v = multiply(x, w1, 16), multiply(x, w2, 16)
    return dict(out=[(b + d) / (1 + math.exp(-a - c)) for a, b, c, d in zip(s, v, b1 * 8, b2 * 8)])


def gating_two(x, y, w1, w2, b1, b2):
    """silu(x w1 + b1) * silu(y w2 + b2)."""
    s, v = ([a + b for a, b in zip(multiply(*each), bias * 8)] for each, bias in (((x, w1, 16), b1), ((y, w2, 8), b2)))
    return dict(out=[a * b / ((1 + math.exp(-a)) * (1 + math.exp(-b))) for a, b in zip(s, v)])


def gating_two_kept(x, y, w1, w2, b1, b2):
    """The same, and d s and d v of the sum of the results."""
    s, v = ([a + b for a, b in zip(multiply(*each), bias * 8)] for each, bias in (((x, w1, 16), b1), ((y, w2, 8), b2)))
    (gates, slopes), (values, of_values) = ([*zip(*[(a / (1 + math.exp(-a)), (1 + a / (1 + math.exp(a)))
                                                     / (1 + math.exp(-a))) for a in each])] for each in (s, v))
    return dict(out=[*map(operator.mul, gates, values)], s_slopes=[*map(operator.mul, slopes, values)],
                v_slopes=[*map(operator.mul, gates, of_values)])


def attention(q, k, v):
    """5 queries of 2 heads, which see 3 to 7 keys."""
    out, log_sums = [], []
    for query, head in itertools.product(range(5), range(2)):
        row, seen = q[(query * 2 + head) * 8:][:8], query + 3
        logits = [0.5 * each for each in multiply(row, transposed(k[:8 * seen], 8), 8)]
        log_sums.append(log_sum_of(logits))
        out += multiply([math.exp(each - log_sums[-1]) for each in logits], v[:8 * seen], seen)
    return dict(out=out, log_sums=transposed(log_sums, 2))


def product_bias(a, b, bias):
    """Two products, of b that lies transposed."""
    c = [multiply(a[24 * i:24 * i + 24], transposed(b[32 * i:32 * i + 32], 8), 8) for i in range(2)]
    return dict(c=[value + bias[at % 4] for at, value in enumerate(sum(c, []))])


def diffusion(x, basis, mass, evalues, times):
    damping = [math.exp(-of_row * of_col) for of_row in evalues for of_col in times]
    sums = multiply(transposed(basis, 8), [mass[at // 8] * value for at, value in enumerate(x)], len(mass))
    spectral = list(map(operator.mul, damping, sums))
    return dict(spectral=spectral, out=multiply(basis, spectral, 8))


def ragged_diffusion(x, basis, mass, evalues, times, offsets):
    return of_both_meshes(diffusion, dict(x=8, basis=8, mass=1, evalues=-1))(
        offsets, x=x, basis=basis, mass=mass, evalues=evalues, times=times)


def mesh_of(values, row, mesh):
    """What a mesh has of a tensor whose rows are vertices, or, if `row` is negative, of one with a part for each."""
    count = len(values) // 2
    return values[OFFSETS[mesh] * row:OFFSETS[mesh + 1] * row] if row > 0 else values[mesh * count:][:count]


def of_both_meshes(formula, rows):
    """A formula of several meshes. rows: of operands that each mesh has for itself, the elements of a vertex; or -1."""
    def both(offsets, **operands):
        found = [formula(**{name: mesh_of(values, rows[name], mesh) if name in rows else values
                            for name, values in operands.items()}) for mesh in range(2)]
        return {name: found[0][name] + found[1][name] for name in found[0]}
    return both


def rows_of_logits(x, w):
    logits = multiply(x, w, 8)
    return [logits[at:at + 12] for at in range(0, 60, 12)]


def softmax(x, w):
    return dict(probs=[math.exp(each - log_sum_of(row)) for row in rows_of_logits(x, w) for each in row])


def cross_entropy(x, w, labels):
    rows = rows_of_logits(x, w)
    log_sums = list(map(log_sum_of, rows))
    losses = [log_sum - row[label] if label >= 0 else 0.0 for row, log_sum, label in zip(rows, log_sums, labels)]
    return dict(losses=losses, logits=sum(rows, []), log_sums=log_sums)


def gradient_features(x, gr, gi, lr, li):
    xr, xi = (multiply(each, x, 8) for each in (gr, gi))
    rr, ri, ir, ii = (multiply(each, transposed(by, 8), 8) for each in (xr, xi) for by in (lr, li))
    return dict(out=[math.tanh(r * (a - d) + i * (c + b)) for r, i, a, b, c, d in zip(xr, xi, rr, ri, ir, ii)])


def ragged_features(x, gr, gi, lr, li, offsets):
    return of_both_meshes(gradient_features, dict(x=-1, gr=8, gi=8))(offsets, x=x, gr=gr, gi=gi, lr=lr, li=li)


def clifford(x, y, w):
    """2 rows of 4 features in (3, 0, 0). A blade is a set of basis vectors, as the bits of a number. w: of each feature
    20 weights, or 20 matrices of 4 x 4."""
    blades = sorted(range(8), key=lambda blade: (bin(blade).count("1"), blade))
    grade = [bin(blade).count("1") for blade in blades]
    x, y = ([[(1 + math.erf(scalar / math.sqrt(2))) / 2 * value for scalar, value in zip(values, values[at:at + 8])]
             for at in range(0, 64, 8)] for values in (x, y))
    planes = collections.defaultdict(lambda: [0.0] * 8)  # of a triple of grades and a blade
    for i, j in itertools.product(range(8), repeat=2):
        swaps = sum(bin(blades[i] >> v + 1).count("1") for v in range(3) if blades[j] >> v & 1)
        k = blades.index(blades[i] ^ blades[j])
        of = grade[i], grade[k], grade[j], k
        planes[of] = [so_far + (-1)**swaps * a * b for so_far, a, b in zip(planes[of], x[i], y[j])]
    triples = sorted({of[:3] for of in planes})
    z = [[0.0] * 8 for _ in blades]
    for of, plane in planes.items():
        t = triples.index(of[:3])
        z[of[3]] = list(map(operator.add, z[of[3]], multiply(plane, w[t * 16:t * 16 + 16], 4) if len(w) == 320 else
                            [w[at % 4 * 20 + t] * value for at, value in enumerate(plane)]))
    squares = [sum(z[i][at]**2 for i in range(8) if grade[i] == c for at in range(row, row + 4))
               for c in range(4) for row in (0, 4)]
    inverses = [1 / math.sqrt(each / 4 + 1e-6) for each in squares]
    out = [value * inverses[2 * grade[k] + at // 4] for k in range(8) for at, value in enumerate(z[k])]
    return dict(out=out, inverse_norms=inverses)


def clifford_alone(x, y, w):
    return dict(out=clifford(x, y, w)["out"])


def clifford_layer(x, mix, bias, w):
    """With a matrix of 4 x 4 for each of 4 grades."""
    of = [0, 1, 1, 1, 2, 2, 2, 3]
    y = sum((multiply(x[8 * k:8 * k + 8], transposed(mix[16 * c:16 * c + 16], 4), 4) for k, c in enumerate(of)), [])
    y[:8] = [value + bias[at % 4] for at, value in enumerate(y[:8])]
    return dict(y=y) | clifford_alone(x, y, w)


# A function at a shape. inputs: how many numbers each has, in the function's order. backward: what the gradients'
# function reads, what it writes, and its description, if it has one of its own.
Case = collections.namedtuple("Case", "name type description inputs formula backward", defaults=[None])
SEQUENCES = dict(causal=1, batch=1, queries=5, keys=7, heads=2, kv_heads=1, width=8, scale=0.5)
MULTIVECTORS = dict(type=FP32, p=3, q=0, r=0, normed=1, batch=2, features=4)
LABELS = [3, 0, -100, 11, 7]  # the third is no class
OFFSETS = [0, 4, 9]  # of two meshes' vertices
INDICES = dict(labels=LABELS, offsets=OFFSETS)
CASES = [
    *(Case("product", each, fk.fk_product(type=each, rows=16, cols=24, depth=32), dict(a=512, b=768),
           lambda a, b: dict(c=multiply(a, b, 32))) for each in TYPES),
    Case("product_bias", FP32,
         fk.fk_product(type=FP32, rows=3, cols=4, depth=8, transpose_b=1, batch=2, a_batch_stride=24, b_batch_stride=32,
                       c_batch_stride=12),
         dict(a=48, b=64, bias=4), product_bias, ("d_c a b", "d_a d_b d_bias")),
    Case("gating", FP16, fk.fk_gating(type=FP16, rows=8, inputs=16, hidden=8),
         dict(x=128, w1=128, w2=128, b1=8, b2=8), gating, ("d_out x w1 w2 b1 b2", "d_x d_w1 d_w2 d_b1 d_b2")),
    Case("gating_two", BF16,
         fk.fk_gating(type=BF16, rows=8, inputs=16, hidden=8, gate=fk.FK_GATE_SILU, value_inputs=8, gated_values=1),
         dict(x=128, y=64, w1=128, w2=64, b1=8, b2=8), gating_two,
         ("d_out x y w1 w2 b1 b2", "d_x d_y d_w1 d_w2 d_b1 d_b2")),
    Case("gating_two_kept", FP16,
         fk.fk_gating(type=FP16, rows=8, inputs=16, hidden=8, gate=fk.FK_GATE_SILU, value_inputs=8, gated_values=1),
         dict(x=128, y=64, w1=128, w2=64, b1=8, b2=8), gating_two_kept,
         ("d_out x y w1 w2 b1 b2 s_slopes v_slopes", "d_x d_y d_w1 d_w2 d_b1 d_b2")),
    *(Case("attention", each, fk.fk_attention(type=each, **SEQUENCES), dict(q=80, k=56, v=56), attention,
           ("d_out q k v out log_sums", "d_q d_k d_v", fk.fk_attention_gradients(type=each, **SEQUENCES)))
      for each in (FP16, BF16)),
    Case("diffusion", BF16, fk.fk_diffusion(type=BF16, meshes=1, vertices=9, eigen=8, width=8),
         dict(x=72, basis=72, mass=9, evalues=8, times=8), diffusion,
         ("d_out d_spectral basis mass evalues times spectral", "d_x d_times")),
    Case("diffusion_ragged", FP32, fk.fk_diffusion(type=FP32, meshes=2, vertices=9, eigen=8, width=8),
         dict(x=72, basis=72, mass=9, evalues=16, times=8, offsets=3), ragged_diffusion,
         ("d_out d_spectral basis mass evalues times spectral offsets", "d_x d_times")),
    Case("softmax", FP32, fk.fk_softmax(type=FP32, rows=5, inputs=8, classes=12), dict(x=40, w=96), softmax,
         ("d_probs x w probs", "d_x d_w")),
    Case("cross_entropy", FP32, fk.fk_softmax(type=FP32, rows=5, inputs=8, classes=12), dict(x=40, w=96, labels=5),
         cross_entropy, ("d_losses x w labels logits log_sums", "d_x d_w")),
    Case("gradients", BF16, fk.fk_gradients(type=BF16, vertices=9, eigen=8, width=8),
         dict(x=64, gr=72, gi=72, lr=64, li=64), gradient_features, ("d_out x gr gi lr li", "d_x d_lr d_li")),
    Case("gradients_ragged", FP32, fk.fk_gradients(type=FP32, vertices=9, eigen=8, width=8, meshes=2),
         dict(x=128, gr=72, gi=72, lr=64, li=64, offsets=3), ragged_features,
         ("d_out x gr gi lr li offsets", "d_x d_lr d_li")),
    Case("clifford", FP32, fk.fk_clifford(**MULTIVECTORS), dict(x=64, y=64, w=80), clifford_alone,
         ("d_out x y w", "d_x d_y d_w")),
    Case("clifford_connected", TF32, fk.fk_clifford(**MULTIVECTORS), dict(x=64, y=64, w=320), clifford_alone,
         ("d_out x y w", "d_x d_y d_w")),
    Case("clifford_connected_kept", TF32, fk.fk_clifford(**MULTIVECTORS), dict(x=64, y=64, w=320), clifford,
         ("d_out x y w out inverse_norms", "d_x d_y d_w")),
    Case("clifford_layer", TF32, fk.fk_clifford(**MULTIVECTORS), dict(x=64, mix=64, bias=4, w=80), clifford_layer,
         ("d_out x y mix bias w", "d_x d_mix d_bias d_w")),
]

# ---- Calls --------------------------------------------------------------------------------------------------------


def check(code):
    if code:
        raise RuntimeError(f"CUDA returned the error {code}")


class Memory:
    """Memory of the device, from the driver or from the CPU's library. It is freed when the process ends."""

    def __init__(self, loaded):
        if fk.is_for_cpu(loaded):
            self.allocate = loaded.cudaMalloc
            self.to_device, self.to_host = (lambda to, data, size, way=way: loaded.cudaMemcpy(to, data, size, way)
                                            for way in (1, 2))
        elif not fk.is_usable(fk.gpu()):
            raise RuntimeError(f"{fk.library_path()} needs a GPU of compute capability {fk.LEAST_CAPABILITY} or newer, "
                               "and there is none")
        else:
            driver, context = fk.gpu()[0], ctypes.c_void_p()
            check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
            check(driver.cuCtxSetCurrent(context))
            self.allocate, self.to_device, self.to_host = (
                driver.cuMemAlloc_v2, driver.cuMemcpyHtoD_v2, driver.cuMemcpyDtoH_v2)

    def put(self, data):
        """The address of a copy of these bytes."""
        at = ctypes.c_void_p()
        check(self.allocate(ctypes.byref(at), ctypes.c_size_t(len(data))))
        check(self.to_device(at, data, ctypes.c_size_t(len(data))))
        return at

    def get(self, at, size):
        data = ctypes.create_string_buffer(size)
        check(self.to_host(data, at, ctypes.c_size_t(size)))
        return data.raw


def packed(values, type):
    """The bytes of numbers, rounded to the type; whole numbers are labels, or offsets."""
    if isinstance(values[0], int):
        return struct.pack(f"{len(values)}{'i' if values is OFFSETS else 'q'}", *values)
    if type == BF16:
        return b"".join(struct.pack("f", value)[2:] for value in values)
    return struct.pack(f"{len(values)}{'e' if type == FP16 else 'f'}", *values)


def unpacked(data, type):
    if type == BF16:
        data = b"".join(b"\0\0" + data[at:at + 2] for at in range(0, len(data), 2))
    return [value for value, in struct.iter_unpack("e" if type == FP16 else "f", data)]


def call(loaded, memory, name, description, arguments):
    """Returns a sentence if this device cannot run the function, and else ""."""
    description.size, needed = ctypes.sizeof(description), ctypes.c_size_t()
    query = getattr(loaded, f"{name.removesuffix('_forward')}_workspace")
    code = query(ctypes.byref(description), ctypes.byref(needed))
    if not code:
        workspace = memory.put(b"\xff" * max(needed.value, 1))  # of NaN
        code = getattr(loaded, name)(ctypes.byref(description), *arguments, workspace, needed, None)
    if code not in (fk.FK_OK, fk.FK_BAD_DEVICE):
        raise RuntimeError(loaded.fk_last_error().decode())
    return loaded.fk_last_error().decode() if code else ""


def gradients(formula, values, incoming, names):
    """Of each of these inputs the gradient of the sum of incoming * result, as {"d_" + name: numbers}."""
    found = {f"d_{name}": [] for name in names}
    for name in names:
        for at, value in enumerate(values[name]):
            sums = []
            for values[name][at] in (value - STEP, value + STEP):
                results = formula(**values)
                sums.append(sum(sum(map(operator.mul, d, results[each])) for each, d in incoming.items()))
            values[name][at] = value
            found[f"d_{name}"].append((sums[1] - sums[0]) / (2 * STEP))
    return found


def test(loaded, memory, case):
    """Yields of each function of a case its name, "forward" or "backward", the errors, and what call() returns."""
    draw = random.Random(case.name)

    def numbers(count, least=-1):
        return unpacked(packed([draw.uniform(least, 1) for _ in range(count)], case.type), case.type)

    values = {name: INDICES[name] if name in INDICES else numbers(size, 0 if name in ("mass", "evalues", "times") else -1)
              for name, size in case.inputs.items()}
    results = case.formula(**values)
    steps, incoming = [("forward", " ".join(case.inputs), results, case.description)], {}
    if case.backward:
        read, written, *other = case.backward
        incoming = {name: numbers(len(each)) for name, each in results.items() if f"d_{name}" in read.split()}
        steps.append(("backward", read, gradients(case.formula, values, incoming,
                                                  [name.removeprefix("d_") for name in written.split()]),
                      *(other or [case.description])))
    operands = values | {f"d_{name}": d for name, d in incoming.items()}
    at = {name: memory.put(packed(each, case.type)) for name, each in operands.items()}
    for step, read, expected, description in steps:
        # Attention's sums are fp32, whatever the type of its operands.
        types = {name: FP32 if name == "log_sums" else case.type for name in expected}
        sizes = {name: len(packed([0.0] * len(each), types[name])) for name, each in expected.items()}
        at |= {name: memory.put(b"\xff" * size) for name, size in sizes.items()}  # of NaN
        arguments = [at[name] for name in (*read.split(), *expected)]
        name = case.name if step == "forward" else case.name.removesuffix("_bias")
        if refused := call(loaded, memory, f"fk_{name}_{step}", description, arguments):
            yield name, step, [], refused
            return
        found = {name: unpacked(memory.get(at[name], size), types[name]) for name, size in sizes.items()}
        yield name, step, [math.dist(found[name], each) / math.hypot(*each) for name, each in expected.items()], ""


def main():
    start, verdicts = time.monotonic(), collections.Counter()
    try:
        path, loaded = fk.library_path(), fk.library()
        print(f"fused_kernels {loaded.fk_version()}, {path}")
        on_cpu, found = fk.is_for_cpu(loaded), fk.gpu()
        if found:
            print(f"GPU: {found[1]}, compute capability {found[2]}" + (", which has no library here" if on_cpu else ""))
        if on_cpu:
            print("CPU backend, which runs the kernels of compute capability "
                  + os.environ.get("CUDA_CPU_COMPUTE_CAPABILITY", "9.0"))
        memory = Memory(loaded)
        for case in CASES:
            limit = 8 * ROUNDING[case.type]
            for name, step, errors, refused in test(loaded, memory, case):
                is_right = all(error <= limit for error in errors)  # NaN is not
                verdict = "--" if refused else "ok" if is_right else "WRONG"
                verdicts[verdict] += 1
                worst = max(errors, key=lambda error: (error != error, error), default=0)
                print(f"{name:23} {step:8} {TYPES[case.type]:6} {verdict:5} "
                      + (refused or f"{worst:7.1e} of {limit:.1e}  {loaded.fk_last_way().decode()}"))
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{verdicts['ok']} right, {verdicts['WRONG']} wrong, {verdicts['--']} not for this device; "
          f"{time.monotonic() - start:.1f} s")
    return 0 if verdicts["ok"] and not verdicts["WRONG"] else 1


if __name__ == "__main__":
    sys.exit(main())
