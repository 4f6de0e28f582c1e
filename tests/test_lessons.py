"""Every lesson computes what it says, at sizes that fit its tiles and at others."""

import random
import re

from conftest import LESSONS, execute, program
import pytest

CLIFFORD = "10_clifford_gp"
MATMULS = [lesson for lesson in LESSONS if "gating" not in lesson and lesson != CLIFFORD]
GATINGS = [lesson for lesson in LESSONS if "gating" in lesson]
SIZES = [1, 2, 31, 32, 33, 64, 100, 257]
# Sums in an order that differs from run to run.
UNORDERED = ["bonus_matmul_A_stationary"]

_random = random.Random(20)
RANDOM_SIZES = sorted(_random.sample(range(3, 300), 4))
RANDOM_LAYERS = [(_random.randint(1, 160), _random.randint(1, 100)) for _ in range(3)]

CHANNELS = [1, 7, 100, 129, 200]
HIDDEN = [1, 3, 65, 96]
# Each number of channels, and each of hidden, at least once; both odd tiles and 16-byte rows.
LAYERS = [(1, 1), (7, 3), (100, 65), (129, 96), (200, 1), (1, 96), (200, 96), (128, 64)]

# The N x N x N table of these lessons at all sizes. Their other table has 1024 N rows: it is kept
# narrow, and at large N its slowest kernel, which the square one does not have, is left out.
NARROW = ("--channels", "3", "--hidden", "1")
SQUARES = [(n, NARROW) for n in (2, 3, 31, 32, 33)] + [
    (n, (*NARROW, "--kernel", "^(?!resident)")) for n in (64, 100, 257)
]


# Signature, grade triples, multiply-adds of the product: one for each pair of blades whose product
# is not 0, and one for each triple and blade that it contributes to.
ALGEBRAS = [
    ("2,0,0", 10, 30), ("3,0,0", 20, 108), ("3,0,1", 34, 300), ("1,3,0", 35, 384),
    ("4,1,0", 56, 1376),
]
# Batch and features: packs of 4 and single floats; one row and several in a block; more rows than
# blocks; rows that fill no warp, one and several.
CLIFFORD_SIZES = [(1, 1), (3, 1), (1, 3), (31, 3), (3, 31), (2, 33), (33, 4), (5, 130), (130, 8)]


def listed(lesson, backend, *arguments):
    """(problem, kernel) of every line that --list prints: which there are depends on the shape."""
    result = execute([program(lesson, backend), *arguments, "--list", "--device", backend])
    assert result.rc == 0, result.stderr
    return [tuple(line.split(": ", 1)) for line in result.stdout.splitlines()]


def table_rows(stdout):
    """(problem, dims as printed, first words of the row) of every row of the tables."""
    rows = []
    problem = dims = None
    for line in stdout.splitlines():
        if header := re.match(r"(\S.*?): (\w+ = \d+,(?: \w+ = \d+,)*) \S+; .*FLOP, at least", line):
            problem, dims = header.groups()
        elif row := re.match(r"(\S.*?) +[\d.]+(?: +\S+){4,6} (?:ok|FAILED)", line):
            rows.append((problem, dims, row[1]))
        elif row := re.match(r"(\S.*?) +needs a GPU of compute capability", line):
            rows.append((problem, dims, row[1]))
    return rows


def assert_verified(result, expected, samples):
    """Exit code 0, every one of the `expected` (problem, kernel) is a row and right."""
    assert result.rc == 0, result.stdout + result.stderr
    assert result.stderr == ""
    rows = table_rows(result.stdout)
    assert [(problem, kernel) for problem, _, kernel in rows] == expected
    # A kernel that this GPU cannot run has a row that says so, and no entry in the record.
    unable = re.findall(r"^(\S.*?) +needs a GPU of compute", result.stdout, re.MULTILINE)
    recorded = [(problem["name"], kernel["name"]) for problem, kernel in result.kernels]
    assert recorded == [row for row in expected if row[1] not in unable]
    assert f"All {len(recorded)} kernels verified against fp64." in result.stdout
    for problem, kernel in result.kernels:
        assert kernel["ok"], kernel
        assert kernel["ms"]["samples"] == samples
        dims = ", ".join(f"{name} = {extent}" for name, extent in problem["dims"].items()) + ","
        assert (problem["name"], dims, kernel["name"]) in rows


def dims_of(result):
    return {problem["name"]: problem["dims"] for problem in result.record["problems"]}


@pytest.mark.parametrize("n", SIZES + RANDOM_SIZES)
@pytest.mark.parametrize("lesson", MATMULS)
def test_matmul(run, backend, lesson, n):
    result = run(lesson, n, "--samples", 2)
    assert_verified(result, listed(lesson, backend, n), 2)


@pytest.mark.parametrize("lesson", ["1_matmul_basic", "2_matmul_sharedmem", "4_matmul_cublas"])
def test_matmul_dims(run, lesson):
    result = run(lesson, 37, "--samples", 1)
    for problem in result.record["problems"]:
        assert problem["dims"] == {"N": 37}
        assert problem["flops"] == 2 * 37**3


@pytest.mark.parametrize("channels, hidden", LAYERS + RANDOM_LAYERS)
@pytest.mark.parametrize("lesson", GATINGS)
def test_layer(run, backend, lesson, channels, hidden):
    shape = ("--channels", channels, "--hidden", hidden)
    result = run(lesson, 1, *shape, "--samples", 1)
    assert_verified(result, listed(lesson, backend, 1, *shape), 1)
    assert dims_of(result)["layer"] == {"M": 1024, "K": channels, "H": hidden}
    assert dims_of(result)["square"] == {"M": 1, "K": 1, "H": 1}


@pytest.mark.parametrize("n, arguments", SQUARES, ids=[f"{n}" for n, _ in SQUARES])
@pytest.mark.parametrize("lesson", GATINGS)
def test_square(run, backend, lesson, n, arguments):
    result = run(lesson, n, *arguments, "--samples", 1)
    kernels = listed(lesson, backend, n, *arguments)
    if "--kernel" in arguments:
        kernels = [row for row in kernels if not row[1].startswith("resident")]
    assert_verified(result, kernels, 1)
    assert dims_of(result)["square"] == {"M": n, "K": n, "H": n}


@pytest.mark.parametrize("channels, hidden", [(8, 16), (72, 8)])
@pytest.mark.parametrize("lesson", GATINGS)
def test_layer_in_16_byte_rows(run, backend, lesson, channels, hidden):
    shape = ("--channels", channels, "--hidden", hidden)
    result = run(lesson, 8, *shape, "--samples", 1)
    assert_verified(result, listed(lesson, backend, 8, *shape), 1)


def test_layers_have_every_extent():
    assert {channels for channels, _ in LAYERS} >= set(CHANNELS)
    assert {hidden for _, hidden in LAYERS} >= set(HIDDEN)


@pytest.mark.parametrize("batch, features", CLIFFORD_SIZES)
@pytest.mark.parametrize("algebra, triples, multiply_adds", ALGEBRAS)
def test_clifford(run, backend, algebra, triples, multiply_adds, batch, features):
    arguments = (batch, "--features", features, "--algebra", algebra)
    result = run(CLIFFORD, *arguments, "--samples", 1)
    assert_verified(result, listed(CLIFFORD, backend, *arguments), 1)
    blades = 2 ** sum(map(int, algebra.split(",")))
    for dims in dims_of(result).values():
        assert dims == {"batch": batch, "features": features, "blades": blades}
    note = f"Cl({algebra}): {triples} grade triples; the product takes {multiply_adds} multiply-adds"
    assert note in result.stdout


@pytest.mark.parametrize("algebra", ["3,0,0", "3,0,1"])
@pytest.mark.parametrize("batch, features", [(1, 1), (5, 130)])
def test_clifford_without_norm(run, backend, algebra, batch, features):
    arguments = (batch, "--features", features, "--algebra", algebra, "--no-norm")
    result = run(CLIFFORD, *arguments, "--samples", 1)
    assert_verified(result, listed(CLIFFORD, backend, *arguments), 1)


def test_clifford_rows_too_long_for_the_chip(run):
    result = run(CLIFFORD, 2, "--features", 2052, "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    assert {kernel["name"] for _, kernel in result.kernels} == {
        "unfused", "fused product", "one launch", "one launch each",
    }
    assert "A row that does not fit on the chip" in result.stdout


def test_clifford_without_norm_is_another_function(run):
    """Both are right, so they had better differ: they share inputs, not errors."""
    with_norm, without = (
        run(CLIFFORD, 3, "--features", 8, "--samples", 1, *flag) for flag in ((), ("--no-norm",))
    )
    assert with_norm.errors != pytest.approx(without.errors, rel=1e-9)


# Turning the inputs turns the result: by rotations in 2-D and 3-D, with the norm, too; by boosts in
# spacetime; by translations, conformal maps. Those do not leave a sum of squares alone.
@pytest.mark.parametrize("batch, features", [(3, 20), (2, 33)])
@pytest.mark.parametrize(
    "algebra, flags",
    [("2,0,0", ()), ("3,0,0", ()), ("3,0,0", ("--no-norm",)), ("1,3,0", ("--no-norm",)),
     ("3,0,1", ("--no-norm",)), ("4,1,0", ("--no-norm",))],
)
def test_clifford_is_equivariant(run, backend, algebra, flags, batch, features):
    arguments = (batch, "--features", features, "--algebra", algebra, "--turned", *flags)
    result = run(CLIFFORD, *arguments, "--samples", 1)
    assert_verified(result, listed(CLIFFORD, backend, *arguments), 1)
    assert dims_of(result).keys() == {"turned"}


@pytest.mark.parametrize("algebra", ["1,3,0", "3,0,1", "4,1,0"])
def test_clifford_norm_is_not_invariant_under_boosts(run, algebra):
    arguments = (3, "--features", 20, "--algebra", algebra, "--turned")
    result = run(CLIFFORD, *arguments, "--samples", 1)
    assert result.rc == 1
    assert len(result.kernels) >= 3 and not any(kernel["ok"] for _, kernel in result.kernels)


def test_clifford_sweep(run, backend):
    result = run(CLIFFORD, "--sweep", "--algebra", "2,0,0", "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    for name in ("forward", "forward + backward"):
        sizes = {
            (problem["dims"]["batch"], problem["dims"]["features"])
            for problem in result.record["problems"] if problem["name"] == name
        }
        assert len(sizes) == 16
        assert backend == "cpu" or {(1024, 128), (8192, 1024)} <= sizes
    for _, kernel in result.kernels:
        assert kernel["memory_bytes"] > 0


@pytest.mark.parametrize("lesson", LESSONS)
def test_seed_decides_inputs(run, lesson):
    size = (1, "--channels", 9, "--hidden", 5) if lesson in GATINGS else (33,)
    if lesson == CLIFFORD:
        size = (3, "--features", 9)
    first, again, other = (
        run(lesson, *size, "--samples", 1, "--seed", seed) for seed in (7, 7, 8)
    )
    assert first.record["seed"] == 7
    # The error is itself a sum, of fp64 squares, whose last digit depends on the order.
    digits = 0.5 if lesson in UNORDERED else 1e-12
    assert again.errors == pytest.approx(first.errors, rel=digits)
    # The N = 1 table of a gated layer may have an error of exactly 0 for both seeds.
    pairs = [(a, b) for a, b in zip(first.errors, other.errors) if a or b]
    assert pairs and all(a != pytest.approx(b, rel=1e-9) for a, b in pairs)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_samples(run, samples):
    result = run("1_matmul_basic", 16, "--samples", samples)
    assert [kernel["ms"]["samples"] for _, kernel in result.kernels] == [samples, samples]


def test_hot(run, backend):
    cold, hot = (run("1_matmul_basic", 64, "--samples", 3, *flag) for flag in ((), ("--hot",)))
    # The CPU backend has no cache to flush, so nothing there is ever cold.
    assert {k["ms"]["mode"] for _, k in cold.kernels} == {"cold" if backend == "cuda" else "hot"}
    assert {k["ms"]["mode"] for _, k in hot.kernels} == {"hot"}


def test_kernel_filter(run):
    result = run("6_gating_fused", 1, "--kernel", "^(async|tensor)", "--samples", 1)
    assert [(problem["name"], kernel["name"]) for problem, kernel in result.kernels] == [
        ("layer", "tensor cores"), ("layer", "async tiles"),
        ("square", "tensor cores"), ("square", "async tiles"),
    ]
    assert "one thread per element" not in result.stdout
