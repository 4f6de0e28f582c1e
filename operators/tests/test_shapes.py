"""The operators as programs call them, at shapes that fit their tiles and at shapes that do not, in many ways: on the
CPU backend and, where there is one, on a Hopper GPU. Tests whose program has not been built are skipped."""

import re

from conftest import CPU_BUILD, hopper_program, run_program
import pytest

TESTS = CPU_BUILD / "operators" / "tests"
# Rows, columns and depth of products: of a tile and less, of many, with rows of 16 bytes and without.
PRODUCTS = ["1 1 1", "130 72 64", "257 515 136", "392 264 520"]


@pytest.mark.parametrize("multiprocessors", ["2", "3", "8"])
@pytest.mark.parametrize("sizes", PRODUCTS)
def test_hopper_product(sizes, multiprocessors, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = run_program(TESTS / "hopper_product", *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


def test_hopper_products_share_tiles(monkeypatch):
    """Otherwise the test above would say nothing of that."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "6")
    result = run_program(TESTS / "hopper_product", "392", "264", "520")
    kinds = [line.split(" tiles")[0] for line in result.stdout.splitlines() if "some shared along k" in line]
    assert kinds == ["64 x 64", "128 x 192", "128 x 144", "160 x 256"], result.stdout


@pytest.mark.parametrize("sizes", [*PRODUCTS, "4096 4104 1000", "9000 77 4096"])
def test_hopper_product_on_a_gpu(sizes):
    result = run_program(hopper_program("operators/tests/hopper_product"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


# Gradient features of few tiles and of many; attention whose blocks add to the same sums, with queries that see no key,
# and wide; copies of rows that begin at any element and at every other one.
OTHERS = ["features 600 104 72 2", "features 70 128 64 1", "attention 100 420 2 1 64 0", "attention 200 150 2 1 56 1",
          "attention 90 200 2 1 104 1", "copies 33 70", "copies 44 105", "copies 1 1"]


@pytest.mark.parametrize("sizes", OTHERS)
def test_other_kernels(sizes):
    result = run_program(TESTS / "kernels" / "other_kernels", *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("sizes", [*OTHERS, "features 5000 120 200 4", "attention 700 1000 4 2 64 0"])
def test_other_kernels_on_a_gpu(sizes):
    result = run_program(hopper_program("operators/tests/kernels/other_kernels"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


# Less than a tile; rows of 16 bytes of one factor, of the other, of none; shared tiles.
SHAPES = ["1 1 1", "33 72 41", "40 31 64", "130 70 50", "257 136 520"]


@pytest.mark.parametrize("multiprocessors", ["2", "8"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_product_shapes(sizes, multiprocessors, monkeypatch):
    """What a program calls, each operator in the three ways that should be the fastest."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = run_program(TESTS / "product_shapes", *sizes.split(), "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.split(",")[0] for line in result.stdout.splitlines()} == {
        "fp32", "tf32", "3xtf32", "fp16", "fp16 to fp32", "bf16"}


@pytest.mark.parametrize("capability", ["8.0", "8.6"])
@pytest.mark.parametrize("program, sizes, ways", [
    ("product_shapes", "33 72 41", "fp16, mma.sync"), ("product_shapes", "257 136 520", "fp16, mma.sync"),
    ("product_shapes", "257 136 520", "fp16 to fp32, mma.sync"), ("product_shapes", "20 40 2100", "slices"),
    ("product_shapes", "65 131 77", "of a thread"),
    ("product_shapes", "257 136 520", "tf32, TF32 by mma.sync; tile 128"),
    ("product_shapes", "65 131 77", "TF32 by mma.sync; tile 64 x 64 x 32; stages: 3; rows copied"),
    ("product_shapes", "20 40 2100", "3xTF32 by mma.sync; tile 64 x 64 x 32; stages: 3"),
    ("gating_shapes", "65 7 9", "rows copied"),
    ("gating_shapes", "500 64 72", "resident"), ("gating_shapes", "300 128 64", "resident"),
    ("gating_shapes", "600 128 64", "in registers"), ("gating_shapes", "90 104 20", "in registers"),
    ("gating_shapes", "70 512 96", "slices"),
])
def test_all_ways_without_hopper_are_right(capability, program, sizes, ways, monkeypatch):
    """Also where blocks have less shared memory."""
    monkeypatch.setenv("CUDA_CPU_COMPUTE_CAPABILITY", capability)
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "8" if program == "product_shapes" else "3")
    result = run_program(TESTS / program, *sizes.split())
    assert result.returncode == 0 and result.stdout.count(ways) > 1, result.stdout + result.stderr


def test_all_ways_of_a_product_are_right():
    result = run_program(TESTS / "product_shapes", "130", "72", "64")
    assert result.returncode == 0 and result.stdout.count("\n") > 75, result.stdout + result.stderr
    assert result.stdout.count("blocks of a tile: 4") == 4, result.stdout  # of fp32, by clusters


@pytest.mark.parametrize("sizes", ["35 67 301", "33 66 258", "1 131 300"])
def test_rows_as_they_lie_are_right(sizes, monkeypatch):
    """Rows that begin at any element, at every other one, or of one factor alone at every other one."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "32")
    result = run_program(TESTS / "product_shapes", *sizes.split())
    assert result.returncode == 0, result.stdout + result.stderr
    for way in ("tf32, TF32 by mma.sync, rows as they lie", "added up by a second launch"):
        assert result.stdout.count(way) > 1, result.stdout


@pytest.mark.parametrize("sizes, factor", [("40 100 1070", "A"), ("40 100 520", "B"), ("70 34 130", "A")])
def test_a_factor_that_threads_copy_is_right(sizes, factor, monkeypatch):
    """In 16 bits, where rows begin at multiples of 8 bytes or of 4."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "16")
    result = run_program(TESTS / "product_shapes", *sizes.split())
    for name in ("fp16", "bf16"):
        assert result.returncode == 0 and f"{name}, {factor} by threads" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("sizes", ["150 67 1301", "40 72 520"])
def test_slices_that_a_second_launch_adds_up_are_right(sizes, monkeypatch):
    """In 16 bits, where rows of C are aligned and where they are not."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "32")
    result = run_program(TESTS / "product_shapes", *sizes.split())
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("fp16", "bf16"):
        found = [line for line in result.stdout.splitlines() if line.startswith(name) and "second launch" in line]
        assert len(found) > 5, result.stdout


@pytest.mark.parametrize("sizes", [*SHAPES, "4096 1000 4104", "1000 4097 333", "453 88 3629", "85 4484 3576",
                                   "568 80 3518", "135 480 11824", "92 67 4999"])
def test_product_shapes_on_a_gpu(sizes):
    result = run_program(hopper_program("operators/tests/product_shapes"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


# One row, and rows that are no multiple of 8; of no multiple of a tile, with weights that stay whole, aligned
# and not, in blocks side by side, and not at all.
LAYERS = ["1 1 1", "77 40 24", "200 72 136", "136 51 37", "200 133 300", "136 1032 264", "130 1025 33"]


@pytest.mark.parametrize("multiprocessors", ["2", "8"])
@pytest.mark.parametrize("sizes", LAYERS)
def test_gating_shapes(sizes, multiprocessors, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = run_program(TESTS / "gating_shapes", *sizes.split(), "3")
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


def test_all_ways_of_a_layer_are_right():
    result = run_program(TESTS / "gating_shapes", "136", "72", "136")
    assert result.returncode == 0 and result.stdout.count("\n") > 40, result.stdout + result.stderr


@pytest.mark.parametrize("sizes", [*LAYERS, "1000 128 64", "4097 256 200"])
def test_gating_shapes_on_a_gpu(sizes):
    result = run_program(hopper_program("operators/tests/gating_shapes"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("sizes, kinds", [
    ("4194304 128 64", {"columns"}), ("128 128 64", {"columns", "tile"}), ("4096 4096 4096", {"tile"}),
    ("65536 200 200", {"columns", "tile"}),  # only blocks side by side have room
    ("1024 1024 258200", {"tile"}), ("1024 1024 516288", {"tile"}),  # 2 GiB of weights
])
def test_weights_that_do_not_fit_do_not_stay(sizes, kinds, monkeypatch):
    """Weights that one block holds, and enough tiles for all blocks: nothing else is tried."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "132")
    result = run_program(TESTS / "gating_shapes", *sizes.split(), "0")
    assert {line.split()[0] for line in result.stdout.splitlines()} == kinds


# Batch, queries, keys, heads, heads of keys, width, causal: with a mask fewer keys than queries; rows that are
# filled up to the tiles' width, and such as are no multiples of 16 bytes; few queries, for which heads that share
# keys are packed, and keys are divided.
ATTENTIONS = ["1 70 70 2 2 64 1", "1 300 130 2 1 72 1 4", "1 33 200 2 1 36 1", "1 3 700 4 1 128 0 4"]
LONG_ATTENTIONS = ["1 3 700 4 1 128 0", "1 9 700 4 2 256 1", "2 257 390 4 2 256 1", "3 1 1 1 1 1 0",
                   "1 1 2000 6 2 100 1 12"]
# The same, how many ways at most, and how many times as large the logits of the first key are.
GROWING = ["1 70 520 1 1 64 0 4 40"]
LONG_GROWING = ["1 300 1000 1 1 64 1 3 30", "2 200 600 1 1 128 1 2 40", "1 70 520 2 1 256 1 2 50"]


def many(shapes):
    return [pytest.param(shape, marks=pytest.mark.extensive) for shape in shapes]


@pytest.mark.parametrize("shape", [*ATTENTIONS, *many(LONG_ATTENTIONS)])
def test_attention_shapes(shape, monkeypatch):
    """What a program calls, in all or in the first few ways."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "2")
    result = run_program(TESTS / "attention_shapes", *shape.split())
    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.split(",")[0] for line in result.stdout.splitlines()} == {"bf16", "fp16"}
    if shape == "1 3 700 4 1 128 0 4":
        assert ", 4 heads a tile, keys in 2 parts" in result.stdout


@pytest.mark.parametrize("shape", [*GROWING, *many(LONG_GROWING)])
def test_attention_whose_logits_grow(shape, monkeypatch):
    """Exponentials relative to the first tile's maximum become too large, in most rows of both types, so that
    later tiles are multiplied once more."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "2")
    result = run_program(TESTS / "attention_shapes", *shape.split())
    assert result.returncode == 0, result.stdout + result.stderr
    grown = re.findall(r"of (\d+) rows (\d+) outgrow", result.stdout)
    assert len(grown) == 2 and all(2 * int(some) > int(rows) for rows, some in grown)


ATTENTIONS_OF_A_GPU = ["2 1000 1000 16 16 128 0", "1 4097 4097 8 8 64 1", "1 1 30000 64 8 128 1", "2 515 3000 16 2 256 1",
                       "1 2000 700 8 4 100 1"]


@pytest.mark.parametrize("shape", [*ATTENTIONS, *LONG_ATTENTIONS, *GROWING, *LONG_GROWING, *ATTENTIONS_OF_A_GPU])
def test_attention_shapes_on_a_gpu(shape):
    result = run_program(hopper_program("operators/tests/attention_shapes"), *shape.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr
