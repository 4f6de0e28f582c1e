"""Every lesson computes what it says, at sizes that fit its tiles and at others."""

import json
import random
import re

from conftest import LESSONS, OPERATORS, PROGRAMS, execute, program, words
import hopper_mutants
import pytest

MATMULS = [lesson for lesson in LESSONS if re.match(r"[1-4]_|bonus_matmul", lesson)]
SOFTMAX = "9_matmul_softmax"
TRAINING = "9_softmax_training"
CLIFFORD = "10_clifford_gp"
CONNECTED, MEMORY = "bonus_clifford_fully_connected", "bonus_memory"
ATTENTION, BACKWARD = "bonus_attention", "bonus_attention_backward"
GATINGS = [lesson for lesson in LESSONS if "gating" in lesson]
DIFFUSION = "7_diffusion_fused"
SPATIAL = "8_spatial_gradients"
SIZES = [1, 2, 31, 32, 33, 64, 100, 257]
# Sums in an order that differs from run to run.
UNORDERED = ["bonus_matmul_A_stationary", BACKWARD]

_random = random.Random(20)
RANDOM_SIZES = sorted(_random.sample(range(3, 300), 4))
RANDOM_LAYERS = [(_random.randint(1, 160), _random.randint(1, 100)) for _ in range(3)]

CHANNELS = [1, 7, 100, 129, 200]
HIDDEN = [1, 3, 65, 96]
# Each number of channels, and each of hidden, at least once; both odd tiles and 16-byte rows.
LAYERS = [(1, 1), (7, 3), (100, 65), (129, 96), (200, 1), (1, 96), (200, 96), (128, 64),
          (96, 200), (51, 301), (128, 254), (200, 200)]

# The N x N x N table of these lessons at all sizes. Their other table has 1024 N rows: it is kept
# narrow, and at large N its slowest kernel, which the square one does not have, is left out.
NARROW = ("--channels", "3", "--hidden", "1")
SQUARES = [(n, NARROW) for n in (2, 3, 31, 32, 33)] + [
    (n, (*NARROW, "--kernel", "^[^r]")) for n in (64, 100, 257)
]
# What takes minutes on the CPU and shows nothing that smaller shapes do not.
LONG = (pytest.mark.extensive, pytest.mark.slow)

# B, D, C: what fits tiles and what does not, rows of 16, 8 and 4 bytes; few rows and a long D, which
# several blocks share; columns in one block, in several, in more than run at a time, and too many for a softmax in
# registers; a strip of rows and two.
SOFTMAX_SHAPES = [
    (1, 1, 1), (2, 3, 1), (8, 16, 10), (16, 128, 16), (17, 31, 17), (33, 68, 50), (32, 64, 104), (41, 300, 98),
    (31, 129, 105), (5, 400, 16), (3, 900, 34), (2, 257, 256), (130, 7, 257), (3, 36, 1000), (259, 36, 260),
    (1, 4, 8196), (1, 3, 8193), (2, 4, 17000), *(pytest.param(shape, marks=pytest.mark.extensive) for shape in [(33, 2001, 201), (300, 40, 301)]),
] + [(_random.randint(1, 40), _random.randint(1, 150), _random.randint(1, 400)) for _ in range(3)]


# V, E, W: less than a tile, more than one, neither; E too large for the wide tiles.
DIFFUSIONS = [
    (1, 128, 256), (31, 16, 16), (33, 48, 144), (64, 64, 64), (130, 144, 80), (1000, 16, 48),
    (70, 336, 32), (1, 16, 16), (129, 128, 128), (5, 80, 272), (257, 128, 256), (1, 8, 8),
    (40, 136, 328), (130, 256, 264), pytest.param(260, 256, 520, marks=LONG),
]
# V, E, W: the same; E too large for the wide tiles, for backward's sums, for any tiles; W too large
# for one kernel's rows.
SPATIALS = [
    (1, 128, 256), (1, 16, 16), (31, 16, 16), (33, 48, 80), (64, 64, 64), (129, 128, 144),
    (1000, 16, 48), (257, 112, 64), (5, 80, 272), (70, 464, 32), (7, 976, 16),
    pytest.param(3, 16, 720, marks=LONG),
    (1, 8, 8), (40, 72, 136), (130, 24, 40), (66, 136, 264), (65, 200, 40),
    # Clusters of two blocks: each consumer has more than three tiles (as in STAYING); two clusters have the columns.
    pytest.param(1570, 40, 136, marks=pytest.mark.extensive), (200, 120, 328),
]


# Signature, grade triples, multiply-adds of the product: one for each pair of blades whose product
# is not 0, and one for each triple and blade that it contributes to, or one for the triple if its
# weight goes into a common factor.
ALGEBRAS = [
    ("2,0,0", 10, 26), ("3,0,0", 20, 92),
    *(pytest.param(*each, marks=pytest.mark.extensive)  # `scons` does not build these
      for each in (("3,0,1", 34, 270), ("1,3,0", 35, 340), ("4,1,0", 56, 1272))),
]
# Batch and features: packs of 4 and single floats; one row and several in a block; more rows than
# blocks; rows that fill no warp, one, several, and a number of warps that is no power of two.
CLIFFORD_SIZES = [(1, 1), (3, 1), (1, 4), (31, 3), (3, 32), (2, 33), (33, 4), (5, 132), (130, 8), (2, 260)]

# The same where features are mixed: less than a tile and more, in rows, columns and steps; features that only the
# library takes.
CONNECTED_SIZES = [(1, 4), (65, 8), (70, 36), pytest.param(3, 200, marks=pytest.mark.extensive)] + [
    pytest.param(*size, marks=LONG) for size in [(3, 2), (8, 48), (5, 72), (130, 136), (5, 332)]]

# S, T, heads, heads of keys, d, both without a mask and with it: less than a tile, and more, of each extent; more
# queries than keys, of which some see none; several heads of keys that heads share; widths that only the operator has.
ATTENTIONS = [(1, 1, 1, 1, 64), (70, 33, 2, 1, 64), (5, 70, 4, 2, 64), (20, 150, 1, 1, 128), (33, 70, 3, 3, 36),
              (5, 300, 4, 1, 72)] + [
    pytest.param(shape, marks=pytest.mark.extensive)
    for shape in [(129, 257, 2, 2, 64), (130, 131, 2, 1, 256), (200, 129, 1, 1, 128), (65, 65, 2, 2, 1)]]

# V, E, W: blocks that stay have several tiles, and load some again. Takes a GPU.
LARGE = [(32768, 128, 256), (32769, 112, 144), (200001, 128, 256), (100001, 112, 208)]


def only_on_a_gpu(backend, n):
    if backend == "cpu" and n > 10000:
        pytest.skip("takes a GPU")


def listed(lesson, backend, *arguments):
    """(problem, kernel) of every line that --list prints: which there are depends on the shape."""
    result = execute([program(lesson, backend), *arguments, "--list", "--device", backend])
    assert result.rc == 0, result.stderr
    return [tuple(line.split(": ", 1)) for line in result.stdout.splitlines()]


def table_rows(stdout):
    """(problem, dims as printed, first words of the row) of every row of the tables."""
    rows = []
    problem = dims = None
    for line in re.sub(r"\n  (?=\S)", " ", stdout).splitlines():  # a long line has two
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
        assert problem["flops"] == (0 if problem["name"] == "copies" else 2 * 37**3)


# N, multiprocessors: for the product in fp32 tiles of each size, whole and shared by several
# blocks, also where rows are not aligned and where those of B are copied.
TILES = [(66, 132), (96, 132), (201, 132), (260, 132), (257, 16), (300, 8), (260, 2), (150, 8),
         (193, 5), (132, 4), pytest.param(401, 8, marks=LONG), pytest.param(400, 8, marks=LONG),
         pytest.param(385, 132, marks=LONG)]


@pytest.mark.parametrize("n, multiprocessors", TILES)
def test_tiles_of_any_shape(n, multiprocessors):
    """On the CPU's device: the choice depends on how many multiprocessors there are."""
    result = execute([program("operators_product", "cpu"), n, "--device", "cpu", "--samples", 2,
                      "--type", "fp32", "--kernel", "^operator$"],
                     env={"CUDA_CPU_MULTIPROCESSORS": str(multiprocessors)})
    assert result.rc == 0, result.stdout + result.stderr


# N, multiprocessors: whole tiles and a line of two rounds; a line alone, whose parts are shorter than a tile, as
# long, and longer; some blocks without a part.
STREAMS = [(700, 2), (300, 8), (257, 3), (257, 132), (390, 5), (33, 4)]


@pytest.mark.parametrize("n, multiprocessors", STREAMS)
def test_steps_are_dealt_out(n, multiprocessors):
    result = execute([program("2_matmul_sharedmem", "cpu"), n, "--device", "cpu", "--samples", 2,
                      "--kernel", "^stream-K$"],
                     env={"CUDA_CPU_MULTIPROCESSORS": str(multiprocessors)})
    assert result.rc == 0, result.stdout + result.stderr


# Lesson, arguments, multiprocessors: so few that a block that stays has three tiles or more, and stages come around
# again. Without arguments each has one or two, or as many tiles as stages. (In other sizes of these planted mistakes
# show: hopper_mutants.py.)
STAYING = [
    ("3_matmul_tensorcore", ("--kernel", "^(tile scheduler|clusters|rasterization)$"), 2),
    ("6_gating_fused", ("--kernel", "^(resident weights|warp specialization)$"), 2),
    ("7_diffusion_fused", ("--kernel", "^(one launch|clusters)$"), 2),
    ("8_spatial_gradients", ("--kernel", "^(warp specialization|cluster)$"), 2),
    ("9_matmul_softmax", ("300", "--inputs", "72", "--classes", "388", "--kernel", "^exchange tiles$"), 4),
    ("bonus_diffusion_gpus", (), 3),
    *(pytest.param(lesson, arguments, multiprocessors, marks=[pytest.mark.extensive] * ("3,0,1" in arguments))
      for lesson in hopper_mutants.LESSONS for arguments, multiprocessors in hopper_mutants.RUNS[lesson]),
]


@pytest.mark.parametrize("lesson, arguments, multiprocessors", STAYING, ids=words)
def test_blocks_that_stay_have_many_tiles(lesson, arguments, multiprocessors):
    """On the CPU's device."""
    result = execute([program(lesson, "cpu"), *arguments, "--device", "cpu", "--samples", 1],
                     env={"CUDA_CPU_MULTIPROCESSORS": str(multiprocessors)})
    assert result.rc == 0, result.stdout + result.stderr


# Lesson 5 has no tiles: there large layers show nothing that small ones do not.
@pytest.mark.parametrize("lesson, channels, hidden", [
    pytest.param(lesson, *layer, marks=LONG if lesson[0] == "5" and layer[0] * layer[1] > 15000 else ())
    for lesson in GATINGS for layer in LAYERS + RANDOM_LAYERS])
def test_layer(run, backend, lesson, channels, hidden):
    shape = ("--channels", channels, "--hidden", hidden)
    result = run(lesson, 1, *shape, "--samples", 1)
    assert_verified(result, listed(lesson, backend, 1, *shape), 1)
    assert dims_of(result)["layer"] == {"M": 1024, "K": channels, "H": hidden}
    assert dims_of(result)["square"] == {"M": 1, "K": 1, "H": 1}


def test_layer_with_hard_gates(run, backend):
    """Of whose gates exp() is infinite or 0."""
    shape = ("--channels", 72, "--hidden", 40, "--hard-gates")
    result = run("6_gating_fused", 1, *shape, "--samples", 1)
    assert_verified(result, listed("6_gating_fused", backend, 1, *shape), 1)


@pytest.mark.parametrize(
    "n, arguments",
    [pytest.param(n, arguments, id=f"{n}", marks={2: (), 33: (), 64: [pytest.mark.extensive]}.get(n, LONG))
     for n, arguments in SQUARES],
)
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


def softmax_arguments(shape, *more):
    b, d, c = shape
    return (b, "--inputs", d, "--classes", c, *more)


@pytest.mark.parametrize("shape", SOFTMAX_SHAPES, ids=str)
def test_softmax(run, backend, shape):
    arguments = softmax_arguments(shape, "--all")
    result = run(SOFTMAX, *arguments, "--samples", 1)
    assert_verified(result, listed(SOFTMAX, backend, *arguments), 1)
    size = "x".join(map(str, shape))
    dims = dict(zip("BDC", shape))
    assert dims_of(result) == {f"TF32 {size}": dims, f"fp32 {size}": dims}
    # Which rows are there, and which of them round: those on tensor cores, in TF32's table.
    on_tensor_cores = "tensor cores" if shape[2] <= 128 else "specialized"
    fits = shape[1] % 4 == 0 and shape[2] % (2 if shape[2] <= 128 else 4) == 0
    ours = [(problem["name"], kernel) for problem, kernel in result.kernels if kernel["role"] == "ours"]
    assert any(on_tensor_cores in kernel["name"] for _, kernel in ours) == fits
    assert ("left out where D" in " ".join(result.stdout.split())) != fits
    assert any(kernel["name"] == "fused split-K" for _, kernel in ours) == (shape[2] <= 16)
    for table, kernel in ours if shape[1] > 3 and shape[2] > 1 else ():
        rounds = table.startswith("TF32") and on_tensor_cores in kernel["name"]
        assert (kernel["error"] > 1e-6) == rounds


def test_softmax_of_more_tiles_than_run_at_a_time(run):
    """A row's blocks cannot wait for each other then, and a line says that this row is left out."""
    result = run(SOFTMAX, 3, "--inputs", 8, "--classes", 1000, "--samples", 1,
                 env={"CUDA_CPU_MULTIPROCESSORS": "6"})
    names = [kernel["name"] for _, kernel in result.kernels]
    assert "online specialized" in names and "fused specialized" not in names
    assert "Specialized: left out where no cluster fits; fused also where a row's tiles do not." in result.stdout


@pytest.mark.parametrize("shape", [(9, 33, 10), (18, 300, 16), (33, 5, 101), (6, 4, 300), (70, 36, 300),
                                   (5, 132, 40), (18, 36, 700),
                                   pytest.param((8, 72, 4200), marks=pytest.mark.extensive)],
                         ids=str)
def test_softmax_of_hard_rows(run, backend, shape):
    arguments = softmax_arguments(shape, "--hard-rows", "--all")
    result = run(SOFTMAX, *arguments, "--samples", 1)
    assert_verified(result, listed(SOFTMAX, backend, *arguments), 1)
    assert "only -inf " + "x".join(map(str, shape)) in dims_of(result)


# Less than a tile and more; a last tile of columns in which one warp has none; many columns.
@pytest.mark.parametrize("shape", [(1, 1, 2), (17, 65, 3), (7, 31, 30), (70, 33, 65), (2, 100, 97),
                                   (65, 64, 64), (3, 5, 1100)], ids=str)
def test_softmax_training(run, backend, shape):
    arguments = softmax_arguments(shape)
    result = run(TRAINING, *arguments, "--samples", 1)
    assert_verified(result, listed(TRAINING, backend, *arguments), 1)
    # Each gradient's reference was compared with a finite difference, of which it is not all zero.
    printed = " ".join(result.stdout.split())  # long lines are wrapped
    checks = re.findall(r"central difference: (\S+) apart, of (\S+); bound (\S+)", printed)
    assert len(checks) == 2
    for difference, slope, bound in checks:
        assert float(difference) <= float(bound) < abs(float(slope))


# A head in one tile, and in two of which the last is not full; more rows than a tile has.
@pytest.mark.parametrize("shape, heads", [((1, 1, 1), 1), ((5, 9, 10), 3), ((67, 33, 70), 2),
                                          ((2, 70, 64), 5)], ids=str)
def test_softmax_of_heads(run, backend, shape, heads):
    arguments = softmax_arguments(shape, "--heads", heads)
    result = run(TRAINING, *arguments, "--samples", 1)
    assert_verified(result, listed(TRAINING, backend, *arguments), 1)
    assert dict(zip("BDC", shape), H=heads) in dims_of(result).values()


def test_softmax_training_of_hard_rows(run, backend):
    """Half of the classes have a probability of 0 in fp32."""
    arguments = softmax_arguments((40, 9, 70), "--hard-rows")
    result = run(TRAINING, *arguments, "--samples", 1)
    assert_verified(result, listed(TRAINING, backend, *arguments), 1)


def test_softmax_training_of_one_class(run, backend):
    arguments = softmax_arguments((3, 4, 1))
    result = run(TRAINING, *arguments, "--samples", 1)
    assert_verified(result, listed(TRAINING, backend, *arguments), 1)
    assert dims_of(result) and not any(name.startswith("backward") for name in dims_of(result))


def test_softmax_without_arguments(run, backend):
    listing = listed(SOFTMAX, backend, "--all")
    shapes = {name.split(" ", 1)[1] for name, _ in listing}
    assert len(shapes) >= 4
    assert {name for name, _ in listing} == {f"{math} {s}" for math in ("TF32", "fp32") for s in shapes}


def test_layers_have_every_extent():
    assert {channels for channels, _ in LAYERS} >= set(CHANNELS)
    assert {hidden for _, hidden in LAYERS} >= set(HIDDEN)


@pytest.mark.parametrize("n, eigen, width", DIFFUSIONS + LARGE)
def test_diffusion(run, backend, n, eigen, width):
    only_on_a_gpu(backend, n)
    shape = ("--eigen", eigen, "--width", width)
    result = run(DIFFUSION, n, *shape, "--samples", 1)
    assert_verified(result, listed(DIFFUSION, backend, n, *shape), 1)
    dims = {"V": n, "E": eigen, "W": width}
    assert dims_of(result) == {"forward": dims, "backward": dims}
    products = 4 * n * eigen * width
    for problem in result.record["problems"]:
        assert products < problem["flops"] < products + n * width + 10 * eigen * width
        values = 2 * n * width + n * eigen + n + eigen + width  # all but those of E x W
        rest = {"forward": eigen * width, "backward": 2 * eigen * width + width}
        assert problem["min_bytes"] == 2 * (values + rest[problem["name"]])
        for kernel in problem["kernels"]:
            assert kernel["memory_bytes"] >= problem["min_bytes"]
    difference = re.search(r"agree with finite differences to within (\S+)\.$", result.stdout, re.M)
    assert float(difference[1]) < 2e-9


# V, E, W, meshes, multiprocessors: masses of a mesh at any address, part of a tile and more than
# one; several clusters for each mesh, one each, more meshes than clusters; every form of the
# operator.
BATCHES = [(1, 8, 8, 7, 4), (64, 64, 64, 2, 4), (75, 24, 72, 3, 4), (70, 16, 16, 9, 4),
           (65, 136, 72, 2, 8), pytest.param(1030, 8, 72, 32, 4, marks=LONG)]


@pytest.mark.parametrize("name, last", [(DIFFUSION, "split-K"), ("operators_diffusion", "operator")])
@pytest.mark.parametrize("n, eigen, width, meshes, multiprocessors", BATCHES)
def test_batch_of_meshes(name, last, n, eigen, width, meshes, multiprocessors, tmp_path):
    """On the CPU's device: a GPU has room for many clusters."""
    shape = (n, "--eigen", eigen, "--width", width, "--batch", meshes)
    record = tmp_path / "record.json"
    result = execute([program(name, "cpu"), *shape, "--device", "cpu", "--samples", 1,
                      "--json", record],
                     env={"CUDA_CPU_MULTIPROCESSORS": str(multiprocessors)})
    assert result.rc == 0, result.stdout + result.stderr
    for problem in json.loads(record.read_text())["problems"]:
        assert problem["dims"] == {"V": n, "E": eigen, "W": width, "meshes": meshes}
        assert problem["kernels"][-1]["name"] == last
        values = meshes * (2 * n * width + n * eigen + n + eigen) + width
        rest = {"forward": meshes * eigen * width, "backward": 2 * meshes * eigen * width + width}
        assert problem["min_bytes"] == 2 * (values + rest[problem["name"]])
    difference = re.search(r"agree with finite differences to within (\S+)\.$", result.stdout, re.M)
    assert float(difference[1]) < 2e-9


def test_diffusion_sweep(run, backend):
    narrow = ("--eigen", 16, "--width", 16)
    result = run(DIFFUSION, "--sweep", *narrow, "--samples", 1)
    assert_verified(result, listed(DIFFUSION, backend, "--sweep", *narrow), 1)
    largest = 4194304 if backend == "cuda" else 1024
    sizes = [256 << i for i in range(20) if 256 << i <= largest]
    assert [(problem["name"], problem["dims"]["V"]) for problem in result.record["problems"]] == [
        (name, size) for size in sizes for name in ("forward", "backward")
    ]


# GPUs, V, E, W: a tile of 64 vertices each, more, uneven shares, fewer tiles than GPUs.
MESHES = [(1, 130, 128, 256), (2, 128, 64, 64), (2, 520, 128, 256), (3, 200, 40, 136),
          (3, 1000, 128, 64), (4, 129, 16, 512), (4, 1, 8, 8),
          # One GPU has a tile more than the other and, of two rounds, fewer clusters.
          (2, 520, 128, 128), (2, 1088, 128, 64)]


@pytest.mark.parametrize("gpus, n, eigen, width", MESHES)
def test_diffusion_on_several_gpus(gpus, n, eigen, width):
    """On the CPU's devices: a GPU's own are few."""
    arguments = [n, "--gpus", gpus, "--eigen", eigen, "--width", width]
    result = execute([program("bonus_diffusion_gpus", "cpu"), *arguments, "--device", "cpu"])
    assert result.rc == 0, result.stderr
    used = min(gpus, -(-n // 64))
    rows = ["one GPU"] + [f"fused exchange, {used} GPUs"] * (used > 1)
    assert re.findall(r"^(.*?) {2,}.* ok$", result.stdout, re.M) == 2 * rows
    assert (f"On {used} of {gpus} GPUs" in result.stdout) == (used < gpus)


def test_a_silent_gpu_is_named():
    bonus = program("bonus_diffusion_gpus", "cpu")
    command = [bonus, 300, "--gpus", 3, "--silent", "--patience", 500, "--device", "cpu"]
    result = execute(command)
    assert result.rc == 3
    assert re.fullmatch(r"error: GPU \d has waited 500 ms for GPU 2, which does not answer\n",
                        result.stderr)


def test_without_peer_access_one_gpu_is_left():
    bonus = program("bonus_diffusion_gpus", "cpu")
    result = execute([bonus, 300, "--device", "cpu"], env={"CUDA_CPU_PEER_ACCESS": "0"})
    assert result.rc == 0 and "fused exchange," not in result.stdout
    assert "The GPUs cannot write into each other's memory: no fused exchange." in result.stdout


def spatial_kernels(eigen, width):
    """(problem, kernel) of the rows where a block may have 227 KB of shared memory."""
    roles = eigen <= 128
    kernels = [("forward", "unfused")] + [("forward", "one kernel")] * (width <= 704)
    kernels += [("forward", "associated")] * (eigen <= 960)
    kernels += [("forward", "warp specialization"), ("forward", "cluster")] * roles + [("backward", "unfused")]
    return kernels + [("backward", "associated"), ("backward", "warp specialization")] * roles


@pytest.mark.parametrize("n, eigen, width", SPATIALS + LARGE)
def test_spatial_gradients(run, backend, n, eigen, width):
    only_on_a_gpu(backend, n)
    shape = ("--eigen", eigen, "--width", width)
    result = run(SPATIAL, n, *shape, "--samples", 1)
    kernels = listed(SPATIAL, backend, n, *shape)
    if backend == "cpu":
        assert kernels == spatial_kernels(eigen, width)
    assert_verified(result, kernels, 1)
    # Who left a row out says so.
    for problem in ("forward", "backward"):
        left_out = (problem, "associated") not in kernels
        assert left_out == (f'No "associated" {problem}: ' in result.stdout)
    assert (("forward", "one kernel") not in kernels) == ('No "one kernel": ' in result.stdout)
    left_out = ("backward", "warp specialization") not in kernels
    assert left_out == ('Not all of "warp specialization", "cluster": ' in result.stdout)
    dims = {"V": n, "E": eigen, "W": width}
    assert dims_of(result) == {"forward": dims, "backward": dims}
    work = {problem["name"]: problem["flops"] for problem in result.record["problems"]}
    products = 12 * n * eigen * width + 4 * eigen * width**2
    assert work["forward"] == products + 4 * n * width
    assert work["backward"] == 2 * products + 4 * eigen * width**2 + 15 * n * width
    for problem in result.record["problems"]:
        ends = 2 * n * eigen + n * width + eigen * width + 2 * width**2
        if problem["name"] == "backward":
            ends += eigen * width + 2 * width**2
        assert problem["min_bytes"] == 2 * ends
        memory = {kernel["name"]: kernel["memory_bytes"] for kernel in problem["kernels"]}
        assert all(size >= problem["min_bytes"] for size in memory.values())
        # Seven temporaries, and backward five saved tensors besides.
        temporaries = {"forward": 7, "backward": 12}[problem["name"]]
        assert memory["unfused"] >= problem["min_bytes"] + temporaries * 2 * n * width
    difference = re.search(r"agree with finite differences to within (\S+)\.$", result.stdout, re.M)
    assert float(difference[1]) < 5e-9


# With wide tiles and with narrow ones; the second shape has a vertex more than a tile.
@pytest.mark.parametrize("n, eigen, width", [(100, 48, 64), (65, 16, 256)])
def test_spatial_gradients_near_one(run, backend, n, eigen, width):
    """Gradients that depend on vertices where 1 - tanh(u)^2 has hardly a digit."""
    arguments = (n, "--eigen", eigen, "--width", width, "--steep")
    result = run(SPATIAL, *arguments, "--samples", 1)
    assert_verified(result, listed(SPATIAL, backend, *arguments), 1)
    assert ("backward", "unfused") not in listed(SPATIAL, backend, *arguments)


def test_spatial_gradients_of_rows_too_wide_for_one_kernel():
    shape = ("--eigen", "16", "--width", "720")
    assert listed(SPATIAL, "cpu", "3", *shape) == spatial_kernels(16, 720)


def test_spatial_gradients_sweep(run, backend):
    narrow = ("--eigen", 16, "--width", 16)
    result = run(SPATIAL, "--sweep", *narrow, "--samples", 1)
    assert_verified(result, listed(SPATIAL, backend, "--sweep", *narrow), 1)
    largest = 1048576 if backend == "cuda" else 2048
    sizes = [1024 << i for i in range(20) if 1024 << i <= largest]
    assert [(problem["name"], problem["dims"]["V"]) for problem in result.record["problems"]] == [
        (name, size) for size in sizes for name in ("forward", "backward")
    ]


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


@pytest.mark.parametrize("algebra", ["3,0,0", pytest.param("3,0,1", marks=pytest.mark.extensive)])
@pytest.mark.parametrize("batch, features", [(1, 4), (5, 130), (5, 132)])
def test_clifford_without_norm(run, backend, algebra, batch, features):
    arguments = (batch, "--features", features, "--algebra", algebra, "--no-norm")
    result = run(CLIFFORD, *arguments, "--samples", 1)
    assert_verified(result, listed(CLIFFORD, backend, *arguments), 1)


# Rows that fill a block, and more of them than multiprocessors.
@pytest.mark.parametrize("algebra, batch, features", [
    ("2,0,0", 9, 1024), ("3,0,0", 9, 1024),
    *(pytest.param(*each, marks=pytest.mark.extensive)
      for each in (("3,0,1", 9, 512), ("1,3,0", 2, 512), ("4,1,0", 9, 256))),
])
@pytest.mark.parametrize("flags", [(), pytest.param(("--no-norm",), marks=LONG)])
def test_clifford_longest_rows(run, backend, algebra, batch, features, flags):
    arguments = (batch, "--features", features, "--algebra", algebra, *flags)
    result = run(CLIFFORD, *arguments, "--kernel", "on chip|streamed|one launch", "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    names = {kernel["name"] for _, kernel in result.kernels}
    assert backend == "cuda" or {"rows streamed", "both streamed"} <= names


@pytest.mark.extensive
def test_clifford_slots_of_the_exchange(backend):
    """So many rows that each slot comes to its third phase."""
    result = execute([program(CLIFFORD, backend), "41", "--features", "512", "--algebra", "3,0,1",
                      "--kernel", "streamed", "--samples", "1"])
    assert result.rc == 0, result.stdout + result.stderr
    assert "verified against fp64" in result.stdout


# Too long for a block; not a whole number of vectors.
@pytest.mark.parametrize("features", [8192, 130])
def test_clifford_rows_that_are_left_out(run, features):
    result = run(CLIFFORD, 2, "--features", features, "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    assert {kernel["name"] for _, kernel in result.kernels} == {
        "unfused", "fused product", "one launch", "one launch each",
    }
    assert "rows of whole vectors" in " ".join(result.stdout.split())


def test_clifford_by_hand_is_in_the_plane_alone(run):
    """The product that is written by hand is right, and no other algebra has it."""
    arguments = (3, "--features", 9, "--kernel", "by hand|fused", "--samples", 1)
    result = run(CLIFFORD, *arguments, "--algebra", "2,0,0")
    assert result.rc == 0, result.stdout + result.stderr
    assert "product by hand" in {kernel["name"] for _, kernel in result.kernels}
    result = run(CLIFFORD, *arguments, "--algebra", "3,0,0")
    assert "product by hand" not in {kernel["name"] for _, kernel in result.kernels}


@pytest.mark.parametrize("batch, features", CONNECTED_SIZES)
@pytest.mark.parametrize("algebra, blades", [("2,0,0", 4), ("3,0,0", 8)])
def test_connected(run, backend, algebra, blades, batch, features):
    arguments = (batch, "--features", features, "--algebra", algebra)
    rows = listed(CONNECTED, backend, *arguments)
    # All rows of the largest size in a run would take so long that the program says how long.
    for kernels in ("unfused|tiles", "first|beside") if batch * features > 10000 else (".",):
        result = run(CONNECTED, *arguments, "--kernel", kernels, "--samples", 1)
        assert_verified(result, [row for row in rows if re.search(kernels, row[1])], 1)
        for dims in dims_of(result).values():
            assert dims == {"batch": batch, "features": features, "blades": blades}
        assert "gradients agree with finite differences" in result.stdout


def test_connected_takes_whole_vectors(run):
    """Of other rows only the library's kernel is there, and a line says why."""
    result = run(CONNECTED, 3, "--features", 9, "--algebra", "2,0,0", "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    assert {kernel["name"] for _, kernel in result.kernels} == {"unfused"}
    assert 'Only "unfused" takes features that are no multiple of 4' in " ".join(result.stdout.split())


@pytest.mark.parametrize("shape", [(3, 200), (2, 201), (3, 200, "--no-norm")])
def test_connected_few_rows(shape):
    """On the CPU's device, with so many multiprocessors that clusters share sums. Rows of 201 are copied."""
    result = execute([program("operators_clifford_connected", "cpu"), shape[0], "--features", *shape[1:],
                      "--algebra", "2,0,0", "--device", "cpu", "--samples", 1, "--kernel", "planes first"],
                     env={"CUDA_CPU_MULTIPROCESSORS": "132"})
    assert result.rc == 0, result.stdout + result.stderr
    assert "All 2 kernels verified" in result.stdout


@pytest.mark.parametrize("flag", ["--no-norm", "--turned"])
@pytest.mark.parametrize("algebra", ["2,0,0", "3,0,0"])
def test_connected_without_norm_and_turned(run, backend, algebra, flag):
    arguments = (9, "--features", 20, "--algebra", algebra, flag)
    result = run(CONNECTED, *arguments, "--samples", 1)
    assert_verified(result, listed(CONNECTED, backend, *arguments), 1)


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
    [("2,0,0", ()), ("3,0,0", ()), ("3,0,0", ("--no-norm",)),
     *(pytest.param(each, ("--no-norm",), marks=pytest.mark.extensive) for each in ("1,3,0", "3,0,1", "4,1,0"))],
)
def test_clifford_is_equivariant(run, backend, algebra, flags, batch, features):
    arguments = (batch, "--features", features, "--algebra", algebra, "--turned", *flags)
    result = run(CLIFFORD, *arguments, "--samples", 1)
    assert_verified(result, listed(CLIFFORD, backend, *arguments), 1)
    assert dims_of(result).keys() == {"turned"}


@pytest.mark.extensive
@pytest.mark.parametrize("algebra", ["1,3,0", "3,0,1", "4,1,0"])
def test_the_norm_is_not_turned_where_turning_changes_it(backend, algebra):
    command = [program(CLIFFORD, backend), 3, "--features", 20, "--algebra", algebra, "--turned",
               "--device", backend]
    result = execute(command)
    assert result.rc == 2 and result.stdout == ""
    assert re.fullmatch(rf"error: --turned needs --no-norm in Cl\({algebra}\): .* sum of squares.*\n",
                        result.stderr)


@pytest.mark.extensive
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


@pytest.mark.parametrize("lesson", PROGRAMS)
def test_seed_decides_inputs(run, lesson):
    size = (1, "--channels", 9, "--hidden", 5) if lesson in GATINGS else (33,)
    if lesson in (SOFTMAX, TRAINING):
        size = (9, "--inputs", 20, "--classes", 10)
    if lesson in (DIFFUSION, SPATIAL):
        size = (9, "--eigen", 8, "--width", 16)
    if lesson in (CLIFFORD, CONNECTED):
        size = (3, "--features", 9)
    if lesson == MEMORY:
        size = (1,)
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
    assert [kernel["ms"]["samples"] for _, kernel in result.kernels] == [samples] * 4


def test_hot(run, backend):
    cold, hot = (run("1_matmul_basic", 64, "--samples", 3, *flag) for flag in ((), ("--hot",)))
    # The CPU backend has no cache to flush, so nothing there is ever cold.
    assert {k["ms"]["mode"] for _, k in cold.kernels} == {"cold" if backend == "cuda" else "hot"}
    assert {k["ms"]["mode"] for _, k in hot.kernels} == {"hot"}


def test_the_fastest_way_is_found(backend):
    result = execute([program("tests/lessons/fastest", backend)])
    assert result.rc == 0, result.stdout + result.stderr


@pytest.mark.parametrize("lesson, arguments, kernel, way", [
    ("operators_product", [64, "--type", "fp16"], "operator", r"tile 64 x 64; stages: \d+; cluster: 1 x 1; clusters: 1"),
    ("operators_gating", [1], "operator",
     r"columns of a sum: 64; consumers: 4; out in boxes; stages: \d+; .*"),
    ("operators_gating", [1, "--channels", 96, "--hidden", 200], "operator",
     r"columns of a sum: 56; consumers: 4, in teams of 2; out in boxes; .*"),
    ("operators_gating", [2, "--channels", 136, "--hidden", 400], "operator",
     r"columns of a sum: 64; consumers: 2; out in boxes; .*; blocks side by side: 2"),
    ("operators_gating", [2, "--channels", 184, "--hidden", 203], "operator",
     r"columns of a sum: 56; consumers: 4, in teams of 2; out in parts; .*; blocks side by side: 2"),
    ("operators_softmax", [300, "--inputs", 300, "--classes", 260], "fused",
     r"exchange: tile \d+ x \d+; cluster: \d.*"),
])
def test_a_row_says_which_way_it_is(run, lesson, arguments, kernel, way):
    """Where nothing is timed: the one that should be the fastest. (The gated layer has such a row in both tables.)"""
    result = run(lesson, *arguments, "--kernel", f"^{kernel}$", "--count")
    (_, row), *_ = result.kernels
    assert re.fullmatch(way, row["way"])


@pytest.mark.parametrize("channels, hidden, kernels", [
    (128, 64, ["warp specialization"]), (8, 200, ["warp specialization"]), (136, 64, ["clusters"]),
    (128, 60, []), (100, 64, []), (1024, 300, []),  # rows that are not aligned
    (1024, 258200, ["clusters"]), (1024, 516288, ["clusters"]),  # 2 GiB of weights
])
def test_rows_for_hopper_are_left_out_where_a_shape_is_not_theirs(channels, hidden, kernels):
    command = [program("6_gating_fused"), 1, "--channels", channels, "--hidden", hidden]
    result = execute([*command, "--device", "cpu", "--list"])
    assert re.findall("layer: (warp specialization|clusters)", result.stdout) == kernels


def test_one_way_has_no_name(run):
    result = run("1_matmul_basic", 16, "--samples", 1)
    assert {kernel["way"] for _, kernel in result.kernels} == {None}


def test_kernel_filter(run):
    result = run("6_gating_fused", 1, "--kernel", "^(async|tensor)", "--samples", 1)
    assert [(problem["name"], kernel["name"]) for problem, kernel in result.kernels] == [
        ("layer", "tensor cores"), ("layer", "async tiles"),
        ("square", "tensor cores"), ("square", "async tiles"),
    ]
    assert "one thread per element" not in result.stdout


# ---- Attention ------------------------------------------------------------------------------------


def attention_arguments(queries, keys, heads, kv_heads, width, *more):
    return (queries, "--keys", keys, "--heads", heads, "--kv-heads", kv_heads, "--width", width, "--batch", 1, *more)


@pytest.mark.parametrize("shape", ATTENTIONS, ids=str)
def test_attention(run, backend, shape):
    arguments = attention_arguments(*shape)
    result = run(ATTENTION, *arguments, "--samples", 1)
    left_out = ["cuDNN"] if "cuDNN is left out" in result.stdout else []
    assert_verified(result, [row for row in listed(ATTENTION, backend, *arguments) if row[1] not in left_out], 1)
    queries, keys, heads, kv_heads, width = shape
    assert {tuple(dims.values())[1:] for dims in dims_of(result).values()} == {(heads, kv_heads, queries, keys, width)}
    assert set(dims_of(result)) == {"bf16 full", "bf16 causal"}
    names = {kernel["name"] for _, kernel in result.kernels}
    assert ("tensor cores" in names) == ("tile scheduler" in names) == (width in (64, 128, 256))


@pytest.mark.parametrize("flags", [("--fp16", "--full"), ("--full",), ("--causal",)])
def test_attention_of_hard_rows(run, backend, flags):
    """Logits of 16384 and of -infinity, which a row may have only; maxima that grow in some rows only."""
    arguments = attention_arguments(70, 150, 2, 1, 64, "--hard-rows", *flags)
    result = run(ATTENTION, *arguments, "--samples", 1)
    assert_verified(result, listed(ATTENTION, backend, *arguments), 1)


@pytest.mark.parametrize("flags", [(), ("--fp16",)], ids=str)
@pytest.mark.parametrize("shape", [*ATTENTIONS, (70, 1, 4, 2, 64), (3, 2, 1, 1, 128), (140, 130, 2, 1, 128),
                                   (260, 130, 2, 1, 64)], ids=str)
def test_attention_backward(run, backend, shape, flags):
    """One key, whose dQ and dK are 0, and two, of which most may cancel; more tiles of queries than a pipeline's
    stages, and two blocks of keys; and forward's shapes."""
    arguments = attention_arguments(*shape, *flags)
    result = run(BACKWARD, *arguments, "--samples", 1)
    assert_verified(result, listed(BACKWARD, backend, *arguments), 1)
    assert "gradients agree with finite differences" in result.stdout
    names = {kernel["name"] for _, kernel in result.kernels}
    assert ("tensor cores" in names) == ("reduce-add" in names) == (shape[-1] in (64, 128))


@pytest.mark.parametrize("shape", [(200, 700, 2, 1, 64), (150, 500, 4, 4, 128)], ids=str)
def test_attention_backward_in_order(run, backend, shape):
    """Parts of many blocks; the bits are those of the first run, whoever else's may differ."""
    result = run(BACKWARD, *attention_arguments(*shape), "--kernel", "^deterministic$", "--samples", 1, "--runs", 5)
    rows = len(result.kernels)
    assert result.stdout.count("deterministic: dQ has other bits in 0 of 5 more runs.") == rows > 0 or backend != "cpu"


@pytest.mark.parametrize("flags", [("--fp16", "--full"), ("--full",), ("--causal",)])
def test_attention_backward_of_hard_rows(run, backend, flags):
    arguments = attention_arguments(70, 150, 2, 1, 64, "--hard-rows", *flags)
    result = run(BACKWARD, *arguments, "--samples", 1)
    assert_verified(result, listed(BACKWARD, backend, *arguments), 1)


def test_attention_moves_no_logits(tmp_path):
    """The library writes and reads S x T logits, and probabilities. The last kernels move Q and the results once,
    and K and V once for each tile of rows; and of these, tiles that are whole."""
    width = 64
    for size in (128, 256):
        record = tmp_path / "counted.json"
        arguments = [*map(str, attention_arguments(size, size, 1, 1, width, "--full")), "--kernel",
                     "^(library|warp specialization|ping-pong|overlap|tile scheduler)$"]
        result = execute([program(ATTENTION, "cpu"), *arguments, "--device", "cpu", "--count", "--json", record])
        if "not compiled for it" in result.stderr:
            pytest.skip("this compiler's programs do not count")
        assert result.rc == 0, result.stderr
        moved = {kernel["name"]: kernel["counts"]["l2_bytes"]
                 for kernel in json.loads(record.read_text())["problems"][0]["kernels"]}
        assert moved.pop("library") > 4 * 2 * size**2
        once = 2 * 2 * width * (192 * -(-size // 192)) + 4 * size
        for name, count in moved.items():
            assert count <= once + size // 64 * 2 * 2 * width * size, name
        assert len(moved) == 4


# ---- The benchmarks of operators -----------------------------------------------------------------

# What fits tiles and what does not; rows of 16 bytes, of 4, and others; more and fewer rows than columns.
BENCHMARKS = [
    ("operators_product", (100, "--columns", 72, "--depth", 300)),
    ("operators_product", (33, "--columns", 257, "--depth", 17)),
    ("operators_product", (1, "--columns", 129, "--depth", 64)),
    *(("operators_gating", (1, "--channels", channels, "--hidden", hidden)) for channels, hidden in LAYERS),
    ("operators_gating", (1, "--channels", 72, "--hidden", 40, "--hard-gates")),
    *(("operators_diffusion", (n, "--eigen", eigen, "--width", width)) for n, eigen, width in
      [(1, 8, 8), (130, 144, 80), (129, 128, 128), (40, 136, 328), (130, 256, 264)]),
    *(("operators_gradients", (n, "--eigen", eigen, "--width", width)) for n, eigen, width in
      [(1, 8, 8), (33, 48, 80), (129, 128, 144), (65, 200, 40)]),
    *(("operators_softmax", (*softmax_arguments(shape), *more)) for shape in
      [(8, 16, 10), (33, 65, 50), (5, 400, 16), (3, 36, 1000)] for more in [("--all",), ("--all", "--kinds")]),
    ("operators_softmax", softmax_arguments((33, 5, 101), "--hard-rows", "--all", "--kinds")),
    *(("operators_clifford", (batch, "--features", features, "--algebra", "2,0,0")) for batch, features in
      [(1, 1), (5, 130), (130, 8)]),
    ("operators_clifford", (3, "--features", 20, "--turned")),
    *(("operators_clifford_connected", (batch, "--features", features, "--algebra", "2,0,0"))
      for batch, features in [(1, 1), (65, 8), (3, 200)]),
    *(("operators_attention", attention_arguments(*shape)) for shape in
      [(1, 1, 1, 1, 64), (70, 33, 2, 1, 64), (33, 70, 3, 3, 36), (5, 300, 4, 1, 72)]),
    ("operators_attention", attention_arguments(70, 150, 2, 1, 64, "--hard-rows", "--fp16", "--full")),
]


@pytest.mark.parametrize("name, arguments", BENCHMARKS, ids=str)
def test_operators(run, backend, name, arguments):
    result = run(name, *arguments, "--samples", 1)
    rows = listed(name, backend, *arguments)
    assert_verified(result, rows, 1)
    tables = {table for table, _ in rows}
    ours = {problem["name"] for problem, kernel in result.kernels if kernel["role"] == "ours"}
    assert backend == "cuda" or ours == tables  # the operator has a row in each table


def test_every_operator_has_a_benchmark():
    assert {name for name, _ in BENCHMARKS} == set(OPERATORS)


# ---- Any N works: tiny shapes and many seeds ------------------------------------------------------

# How many of 1,000 runs each program gets: some take 10 ms, some a second or two.
TINY_RUNS = {
    "1_matmul_basic": 130, "2_matmul_sharedmem": 100, "3_matmul_tensorcore": 40, "4_matmul_cublas": 60,
    "bonus_matmul_A_stationary": 100, MEMORY: 10, ATTENTION: 10, BACKWARD: 40, "5_gating_unfused": 60, "6_gating_fused": 15,
    DIFFUSION: 80, SPATIAL: 80, "bonus_diffusion_gpus": 20, SOFTMAX: 25, TRAINING: 150, CLIFFORD: 60, CONNECTED: 20,
}
TINY_OPTIONS = {
    "gating": ("--channels", "--hidden"), "diffusion": ("--eigen", "--width"), SPATIAL: ("--eigen", "--width"),
    "softmax": ("--inputs", "--classes"), "clifford": ("--features",), ATTENTION: ("--keys", "--batch"),
}
# A bound above this proves nothing, and the harness knows none.
MOST_TOLERANCE = 0.05


def tiny_shape(lesson, seed):
    """N and all other sizes from 1 to 8, where they are multiples of 8 from 8 to 24, at random."""
    chance = random.Random(f"{lesson} {seed}")
    shape = [chance.randint(1, 8)]
    for name, options in TINY_OPTIONS.items():
        for option in options if name in lesson else ():
            in_eights = option in ("--eigen", "--width")
            shape += [option, 8 * chance.randint(1, 3) if in_eights else chance.randint(1, 8)]
    if lesson == TRAINING:
        shape += ["--heads", chance.randint(1, 3)]
    if lesson == SOFTMAX:
        shape += ["--all"]
    if lesson in (CLIFFORD, CONNECTED):
        shape += ["--algebra", chance.choice(("2,0,0", "3,0,0"))]
    return shape


def test_every_program_has_tiny_runs():
    assert sorted(TINY_RUNS) == sorted(PROGRAMS)
    assert sum(TINY_RUNS.values()) == 1000


def quick_runs(lesson):
    return -(-TINY_RUNS[lesson] // 40)


@pytest.mark.parametrize("lesson, first, last", [
    *((lesson, 1, quick_runs(lesson)) for lesson in PROGRAMS),
    *(pytest.param(lesson, quick_runs(lesson) + 1, runs, marks=pytest.mark.extensive)
      for lesson, runs in TINY_RUNS.items()),
])
def test_tiny_shapes(run, lesson, first, last):
    """Right kernels are verified whatever the shape and the seed, by bounds that prove something."""
    largest = 0, ""
    for seed in range(first, last + 1):
        shape = tiny_shape(lesson, seed)
        result = run(lesson, *shape, "--seed", seed, "--samples", 1)
        assert result.rc == 0, f"{lesson} {shape} --seed {seed}\n{result.stdout}{result.stderr}"
        for problem, kernel in result.kernels:
            place = f"{problem['name']}: {kernel['name']}, {' '.join(map(str, shape))}, seed {seed}"
            largest = max(largest, (kernel["tolerance"], place))
    print(f"{lesson}: the largest tolerance is {largest[0]:.2g} ({largest[1]})")
    assert largest[0] < MOST_TOLERANCE, largest


@pytest.mark.parametrize("lesson, arguments", [
    (TRAINING, (1, "--inputs", 1)),
    ("5_gating_unfused", (1, "--seed", 3)),
    ("5_gating_unfused", (1, "--seed", 117, "--channels", 2, "--hidden", 7)),
    (TRAINING, (1, "--inputs", 1, "--classes", 2, "--seed", 625)),
])
def test_results_whose_terms_cancel(run, lesson, arguments):
    """Of one or two results nearly nothing may be left, but for the rounding errors of their terms."""
    result = run(lesson, *arguments, "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    assert all(kernel["tolerance"] < MOST_TOLERANCE for _, kernel in result.kernels)
