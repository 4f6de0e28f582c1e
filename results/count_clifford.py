"""Counts the arithmetic of lesson 10's product and gradients, and of what SymPy makes of the same.

    results/count_clifford.py [--nvcc FILE] [ALGEBRA ...]        writes results/clifford_operations.json

For each algebra, given as 3,0,0, and for the weighted geometric product and its three gradients:

- `multiply_adds`: what the lesson prints, counted here from tables made another way;
- `sass`: the FFMA, FMUL and FADD that nvcc leaves of the lesson's function templates, in a kernel that
  does nothing else: numbers from memory to registers, one product, numbers back;
- `sympy`: multiplications and additions of the same sums in SymPy, before and after its common
  subexpressions are taken out, and how many instructions they are if each addition takes in a product
  where it has one as an operand. A sign is free: it is part of an instruction's operand;
- `sympy_sass`: the same instructions after nvcc of those expressions, printed as C.

All are compiled in one source, with the lesson's sections of the algebra and of both products. It is
refused if the lesson's tables are not those made here. It needs
SymPy (Debian's python3-sympy), nvcc and objcopy, but no GPU. Nothing else here needs SymPy.
"""
import argparse
from collections import Counter
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

from commit import commit_of
from record import Mistake, ROOT, as_text, saying_mistakes, write_whole

RECORD = ROOT / "results" / "clifford_operations.json"
LESSON = "10_clifford_gp.cu"
# Headings of the lesson: what stands under these is compiled.
SECTIONS = ("The algebra", "The product, for any algebra", "Backward: the gradients of the product")
ALGEBRAS = ("2,0,0", "3,0,0", "3,0,1", "1,3,0", "4,1,0")
ARCHITECTURE = "sm_90a"
OPCODES = {"FFMA": 0x23, "FMUL": 0x20, "FADD": 0x21, "LDG": 0x181, "STG": 0x186}  # since sm_70


class Algebra:
    """Of signature "p,q,r": `blades`, how many; `triples`, the grades (of x, of the result, of y) that
    occur; `terms`, (i, j, k, t, sign) for e_i e_j = sign e_k, part of triple t, unless that is 0."""

    def __init__(self, signature):
        squares = [square for square, count in zip((1, -1, 0), map(int, signature.split(",")))
                   for _ in range(count)]
        masks = sorted(range(1 << len(squares)), key=lambda mask: (mask.bit_count(), mask))

        def sign(a, b):
            result = 1
            for v, square in enumerate(squares):
                if b >> v & 1:
                    result *= (-1) ** (a >> v + 1).bit_count() * (square if a >> v & 1 else 1)
            return result

        self.blades = len(masks)
        self.blades_of_grade = lambda grade: sum(mask.bit_count() == grade for mask in masks)
        products = [(i, j, masks.index(a ^ b), sign(a, b))
                    for i, a in enumerate(masks) for j, b in enumerate(masks) if sign(a, b)]
        grades = [tuple(masks[blade].bit_count() for blade in (i, k, j)) for i, j, k, _ in products]
        self.triples = sorted(set(grades))
        self.terms = [(i, j, k, self.triples.index(grade), sign)
                      for (i, j, k, sign), grade in zip(products, grades)]

    def multiply_adds(self):
        """What the lesson's functions do: a multiply-add per term and one per weight and blade that it
        multiplies, or one per weight that goes into a common factor of several such blades. dw takes
        the sums of dx, without their weights, or else those of dy; if neither has them, its own."""
        X, Y, RESULT = range(3)  # places in a term
        counts = Counter()
        for t in range(len(self.triples)):
            terms = [term[:3] for term in self.terms if term[3] == t]
            blades = [len({term[place] for term in terms}) for place in (X, Y, RESULT)]
            only = [self.blades_of_grade(self.triples[t][n]) == 1 for n in (0, 2, 1)]
            common = [blades[place] > 1 and any(only[other] for other in (X, Y, RESULT) if other != place)
                      for place in (X, Y, RESULT)]
            sums = [len(terms) + (1 if common[place] else blades[place]) for place in (X, Y, RESULT)]
            counts["product"] += sums[RESULT]
            counts["gradients"] += sums[X] + sums[Y]
            if not common[X] or not common[Y]:
                counts["gradients"] += blades[Y if common[X] else X]
            else:
                counts["gradients"] += len(terms) + blades[RESULT]
        return dict(counts)


# ---- SymPy --------------------------------------------------------------------------------------


def expressions(algebra):
    """The sums that the lesson's comments give, as (the element of an array, its expression)."""
    from sympy import Add, Mul, Symbol

    X, Y, RESULT, TRIPLE, SIGN = range(5)  # places in a term
    names = {X: "x", Y: "y", RESULT: "dz", TRIPLE: "w"}

    def operand(place, term):
        return Symbol(f"{names[place]}[{term[place]}]")

    def sums(name, of, outer, left, right):
        """For each `of`: the sum over `outer` of it times (the sum of sign left right)."""
        inner = {}
        for term in algebra.terms:
            factors = inner.setdefault(term[of], {}).setdefault(operand(outer, term), [])
            factors.append(Mul(term[SIGN], operand(left, term), operand(right, term)))
        return [(f"{name}[{n}]", Add(*(Mul(factor, Add(*parts)) for factor, parts in groups.items())))
                for n, groups in sorted(inner.items())]

    return {
        "product": sums("z", RESULT, TRIPLE, X, Y),
        "gradients": sums("dx", X, TRIPLE, RESULT, Y) + sums("dw", TRIPLE, X, RESULT, Y)
        + sums("dy", Y, TRIPLE, RESULT, X),
    }


def eliminated(sums):
    """The same with SymPy's common subexpressions before them, each in a variable of its own."""
    from sympy import cse, numbered_symbols

    names, values = zip(*sums)
    common, values = cse(values, symbols=numbered_symbols("common"), optimizations="basic")
    return [(str(name), value) for name, value in common] + list(zip(names, values))


def operations(sums):
    """How many multiplications and additions, and how many instructions if these are fused."""
    from sympy import preorder_traversal

    def factors(node):
        return sum(abs(factor) != 1 if factor.is_Number else 1 for factor in node.args)

    multiplications = additions = fused = 0
    for _, value in sums:
        for node in preorder_traversal(value):
            assert node.is_Atom or node.is_Add or node.is_Mul, node
            if node.is_Mul:
                multiplications += factors(node) - 1
            if node.is_Add:
                products = sum(part.is_Mul and factors(part) > 1 for part in node.args)
                additions += len(node.args) - 1
                fused += min(products, len(node.args) - 1)
    return {"multiplications": multiplications, "additions": additions,
            "instructions": multiplications + additions - fused}


# ---- The kernels --------------------------------------------------------------------------------

def lesson_sections():
    """The text of the lesson's SECTIONS."""
    parts = re.split(r"^// ---- (.*?) -+$", (ROOT / LESSON).read_text(), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2]))
    missing = [name for name in SECTIONS if name not in found]
    if missing:
        raise Mistake(f"{LESSON} has no section '{missing[0]}'")
    return "".join(found[name] for name in SECTIONS)


INCLUDES = """
#include <cuda_runtime.h>

#include <bit>
#include <utility>
"""
HEADER = f"""
template <typename A>
constexpr bool agrees(const int (*terms)[5], int count) {{
  int all = 0;
  for (int t = 0; t < A::kTriples; ++t) {{
    for (int i = 0; i < A::kBlades; ++i) {{
      for (int j = 0; j < A::kBlades; ++j) all += A::sign(t, i, j) != 0;
    }}
  }}
  for (int n = 0; n < count; ++n) {{
    const auto [i, j, k, t, sign] = terms[n];
    if (A::product(i, j) != k || A::sign(t, i, j) != sign) return false;
  }}
  return all == count;
}}

// Element n of this thread.
__device__ float& at(float* data, int n) {{ return data[n * 32 + threadIdx.x]; }}
template <int kCount>
__device__ void load(float (&to)[kCount], float* from) {{
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n] = at(from, n);
}}
template <typename A>
__device__ Multivectors<A, 1> load(float* from) {{
  Multivectors<A, 1> to;
  unroll<0, A::kBlades>([&](auto k) {{ to.blade[k].v[0] = at(from, k); }});
  return to;
}}

template <typename A>
__device__ void product(float* x_in, float* y_in, float* w_in, float* z_out) {{
  const auto x = load<A>(x_in), y = load<A>(y_in);
  float w[A::kTriples];
  load(w, w_in);
  const auto z = weighted_product(x, y, [&](auto t) {{ return Pack<1>{{{{w[t]}}}}; }});
  unroll<0, A::kBlades>([&](auto k) {{ at(z_out, k) = z.blade[k].v[0]; }});
}}

template <typename A>
__device__ void gradients(float* x_in, float* y_in, float* w_in, float* dz_in, float* dx_out,
                          float* dy_out, float* dw_out) {{
  const auto x = load<A>(x_in), y = load<A>(y_in), dz = load<A>(dz_in);
  float w[A::kTriples];
  load(w, w_in);
  const auto weight = [&](auto t) {{ return Pack<1>{{{{w[t]}}}}; }};
  Pack<1> dw[A::kTriples] = {{}};
  const auto store = [](float* to, auto grade, const auto& gradient) {{
    over_grade<A, grade>([&](auto i) {{
      constexpr int number = i - A::first(grade);
      at(to, i) = gradient.blade[number].v[0];
    }});
  }};
  unroll<0, A::kGrades>([&](auto grade) {{
    store(dx_out, grade, gradient_of_x<grade>(x, y, dz, weight, dw));
  }});
  unroll<0, A::kGrades>([&](auto grade) {{
    store(dy_out, grade, gradient_of_y<grade>(x, y, dz, weight, dw));
  }});
  unroll<0, A::kTriples>([&](auto t) {{ at(dw_out, t) = dw[t].v[0]; }});
}}
"""
ARRAYS = {"product": (("x", "y", "w"), ("z",)), "gradients": (("x", "y", "w", "dz"), ("dx", "dy", "dw"))}


def source_of(signature, algebra, sums):
    """The kernels lesson_product, sympy_product, lesson_gradients, sympy_gradients, from the lesson and
    from `sums` (as `eliminated` returns them, by product and gradients)."""
    from sympy import ccode

    terms = ", ".join("{%d, %d, %d, %d, %d}" % term for term in algebra.terms)
    text = [INCLUDES, lesson_sections(), HEADER, f"using A = Cl<{signature}>;",
            f"constexpr int kTerms[][5] = {{{terms}}};"]
    text.append(f"static_assert(agrees<A>(kTerms, {len(algebra.terms)}));")
    for what, (inputs, outputs) in ARRAYS.items():
        parameters = ", ".join(f"float* {name}_{way}" for way, names in (("in", inputs), ("out", outputs))
                               for name in names)
        arguments = ", ".join(re.findall(r"\w+_(?:in|out)", parameters))
        text.append(f'extern "C" __global__ void lesson_{what}({parameters}) {{')
        text.append(f"  {what}<A>({arguments});\n}}")
        text.append(f'extern "C" __global__ void sympy_{what}({parameters}) {{')
        for name in inputs:
            size = len(algebra.triples) if name == "w" else algebra.blades
            text.append(f"  float {name}[{size}];\n  load({name}, {name}_in);")
        for name, value in sums[what]:
            array, bracket, index = name.rstrip("]").partition("[")
            place = f"at({array}_out, {index})" if bracket else f"const float {name}"
            text.append(f"  {place} = {ccode(value)};")
        text.append("}")
    return "\n".join(text) + "\n"


def count_sass(nvcc, source):
    """{kernel: {instruction: how many}} of the kernels in a source. Needs no disassembler: the low nine
    bits of an instruction's 16 bytes say what it is, and loads and stores show that they are read right.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "probe.cu"
        path.write_text(source)
        cubin, code = path.with_suffix(".cubin"), path.with_suffix(".bin")
        flags = ["-std=c++20", "-O3", f"-arch={ARCHITECTURE}", f"-I{ROOT}"]
        subprocess.run([nvcc, *flags, "-cubin", "-o", cubin, path], check=True)
        counts = {}
        for kernel in (f"{by}_{what}" for by in ("lesson", "sympy") for what in ARRAYS):
            section = ["-j", f".text.{kernel}", cubin, code]
            subprocess.run(["objcopy", "-I", "elf64-little", "-O", "binary", *section], check=True)
            found = Counter(low & 0x1FF for low, _ in struct.iter_unpack("<QQ", code.read_bytes()))
            counts[kernel] = {name: found[opcode] for name, opcode in OPCODES.items()}
    return counts


def count(nvcc, signature):
    """An algebra's part of the record."""
    algebra = Algebra(signature)
    written = expressions(algebra)
    sums = {what: eliminated(values) for what, values in written.items()}
    sass = count_sass(nvcc, source_of(signature, algebra, sums))
    for kernel, found in sass.items():
        inputs, outputs = ARRAYS[kernel.split("_")[1]]
        moved = [sum(len(algebra.triples) if name.endswith("w") else algebra.blades for name in names)
                 for names in (inputs, outputs)]
        if [found.pop("LDG"), found.pop("STG")] != moved:
            raise Mistake(f"{kernel} of {signature}: these are not the instructions of a kernel that "
                          f"loads {moved[0]} and stores {moved[1]} numbers")
    part = {"algebra": signature, "blades": algebra.blades, "triples": len(algebra.triples),
            "terms": len(algebra.terms)}
    for what, multiply_adds in algebra.multiply_adds().items():
        part[what] = {
            "multiply_adds": multiply_adds,
            "sass": sass[f"lesson_{what}"],
            "sympy": {"written": operations(written[what]), "eliminated": operations(sums[what])},
            "sympy_sass": sass[f"sympy_{what}"],
        }
    return part


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    parser.add_argument("algebras", nargs="*", default=ALGEBRAS, metavar="ALGEBRA")
    arguments = parser.parse_args()
    for word in arguments.algebras:
        if not (re.fullmatch(r"\d,\d,\d", word) and 2 <= sum(map(int, word.split(","))) <= 5):
            parser.error(f"{word}: choose three numbers of basis vectors, 2 to 5 in all, as 2,1,0")
    try:
        import sympy
    except ImportError:
        raise Mistake("this needs SymPy (Debian's package python3-sympy)") from None
    nvcc = pathlib.Path(arguments.nvcc).resolve()
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"V([\d.]+)", said)[1]
    except (OSError, TypeError):
        raise Mistake(f"{nvcc} is no nvcc that runs: say where one is, --nvcc") from None
    if not shutil.which("objcopy"):
        raise Mistake("there is no objcopy (Debian's package binutils)")
    try:
        algebras = [count(nvcc, signature) for signature in arguments.algebras]
    except subprocess.CalledProcessError as error:
        raise Mistake(f"{pathlib.Path(error.cmd[0]).name} failed; what it said stands above") from None
    record = {
        "commit": commit_of(LESSON, "results/*.py"),
        "nvcc": version,
        "architecture": ARCHITECTURE,
        "sympy": sympy.__version__,
        "algebras": algebras,
    }
    write_whole(RECORD, as_text(record))
    return 0


if __name__ == "__main__":
    sys.exit(saying_mistakes(main))
