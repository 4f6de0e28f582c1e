"""results/count_clifford.py, whose tables are made another way than the lesson's, and its record."""

import json
import re

from conftest import ROOT, execute, program
import pytest

LESSON = "10_clifford_gp"
RECORD = json.loads((ROOT / "results" / "clifford_operations.json").read_text())
ALGEBRAS = {part["algebra"]: part for part in RECORD["algebras"]}


@pytest.fixture
def count_clifford(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results")
    import count_clifford

    return count_clifford


def test_every_algebra_is_recorded(count_clifford):
    help_text = execute([program(LESSON), "--help"]).stdout
    offered = set(re.findall(r"\b\d,\d,\d\b", help_text))
    assert {"2,0,0", "3,0,0"} <= offered <= set(count_clifford.ALGEBRAS) == set(ALGEBRAS)  # scons algebra=all
    assert not RECORD["commit"].endswith("-dirty")


@pytest.mark.parametrize("signature", [
    pytest.param(each, marks=[pytest.mark.extensive] if each not in ("2,0,0", "3,0,0") else []) for each in ALGEBRAS])
def test_lesson_counts_the_same(count_clifford, signature):
    algebra = count_clifford.Algebra(signature)
    triples, terms = len(algebra.triples), len(algebra.terms)
    counts = algebra.multiply_adds()
    command = [program(LESSON), 1, "--features", 1, "--algebra", signature, "--device", "cpu"]
    output = " ".join(execute([*command, "--samples", 1]).stdout.split())  # lines are wrapped
    assert (
        f"Cl({signature}): {triples} grade triples; the product takes {counts['product']} multiply-adds "
        f"({2 * terms} written out term by term), its gradients {counts['gradients']}."
    ) in output
    part = ALGEBRAS[signature]
    assert (part["triples"], part["terms"]) == (triples, terms)
    assert {what: part[what]["multiply_adds"] for what in counts} == counts


@pytest.mark.parametrize("signature", ALGEBRAS)
def test_signs(count_clifford, signature):
    """e1 e2 = e12 = -e2 e1, vectors square to what the signature says, and products associate."""
    algebra = count_clifford.Algebra(signature)
    product = {(i, j): (k, sign) for i, j, k, _, sign in algebra.terms}
    p, q, r = map(int, signature.split(","))
    squares = [product.get((v, v), (0, 0)) for v in range(1, p + q + r + 1)]
    assert squares == [(0, 1)] * p + [(0, -1)] * q + [(0, 0)] * r
    e12 = 1 + p + q + r
    assert (product[1, 2], product[2, 1]) == ((e12, 1), (e12, -1))

    def times(left, right):
        blade, sign = product.get((left[0], right[0]), (0, 0))
        sign *= left[1] * right[1]
        return (blade, sign) if sign else (0, 0)

    blades = [(blade, 1) for blade in range(algebra.blades)]
    assert all(times(times(a, b), c) == times(a, times(b, c))
               for a in blades for b in blades for c in blades)


def test_gradients_are_derivatives(count_clifford):
    sympy = pytest.importorskip("sympy")
    sums = count_clifford.expressions(count_clifford.Algebra("2,0,0"))
    loss = sum(sympy.Symbol(f"d{name}") * value for name, value in sums["product"])
    assert len(sums["gradients"]) == 4 + 10 + 4
    for name, value in sums["gradients"]:
        derivative = sympy.diff(loss, sympy.Symbol(name.removeprefix("d")))
        assert sympy.expand(value - derivative) == 0 != sympy.expand(value), name


@pytest.mark.parametrize("what", ["product", "gradients"])
@pytest.mark.parametrize("signature", ["2,0,0", "3,0,0"])
def test_sympy_finds_as_many_again(count_clifford, signature, what):
    sympy = pytest.importorskip("sympy")
    if sympy.__version__ != RECORD["sympy"]:
        pytest.skip(f"recorded with SymPy {RECORD['sympy']}, this is {sympy.__version__}")
    written = count_clifford.expressions(count_clifford.Algebra(signature))[what]
    recorded = ALGEBRAS[signature][what]["sympy"]
    assert count_clifford.operations(written) == recorded["written"]
    assert count_clifford.operations(count_clifford.eliminated(written)) == recorded["eliminated"]


def test_operations_are_counted_as_instructions(count_clifford):
    """-a b + c d + e: two products, two additions, and each takes in one product; -a: nothing."""
    sympy = pytest.importorskip("sympy")
    a, b, c, d, e = sympy.symbols("a:e")
    counted = count_clifford.operations([("z", -a * b + c * d + e), ("y", -a), ("x", a * b + c * d)])
    assert counted == {"multiplications": 4, "additions": 3, "instructions": 4}
    assert count_clifford.operations([("z", 2 * a + b)])["instructions"] == 1
    assert count_clifford.operations([("z", a - b)])["instructions"] == 1
