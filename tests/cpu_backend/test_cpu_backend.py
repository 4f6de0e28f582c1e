"""Tests of the CPU backend in cpu/: its semantics, its errors, and what sanitizers see.

The programs come from the build: CPU_BUILD_DIR names its folder (build/cpu by default), and those
of the sanitizer builds are next to it. Tests whose program has not been built are skipped.
"""

from functools import partial
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import PROGRAMS
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / os.environ.get("CPU_BUILD_DIR", "build/cpu")
CASES = re.findall(r"^CASE\((\w+)\)", (HERE / "semantics.cu").read_text(), re.MULTILINE)
HOPPER = (ROOT / "tests" / "hopper_semantics.cu").read_text()
HOPPER_CASES = re.findall(r"^CASE\((\w+)\)", HOPPER, re.MULTILINE)
# Those that a GPU can show.
GPU_CASES = re.findall(r"^CASE\((\w+)\)", HOPPER.split("#ifdef CUDA_CPU")[0], re.MULTILINE)

sys.path.insert(0, str(ROOT / "cpu"))
from cu2cpp import TranslationError, translate  # noqa: E402


def run(program, *arguments):
    """Runs a program of this folder, given by its path; skips the test if it is not there."""
    if not program.exists():
        pytest.skip(f"{program} has not been built")
    environment = dict(os.environ)
    options = environment.get("TSAN_OPTIONS", "")
    environment["TSAN_OPTIONS"] = f"{options} atexit_sleep_ms=0"
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )


def sanitized(sanitizer, name, *arguments):
    """Runs a program of a sanitizer build."""
    return run(BUILD.parent / f"cpu-{sanitizer}" / "tests" / "cpu_backend" / name, *arguments)


@pytest.mark.parametrize("case", CASES)
def test_semantics(case):
    result = run(BUILD / "tests" / "cpu_backend" / "semantics", case)
    if BUILD.name == "cpu-thread" and case == "async_copies_missing_wait":
        assert "ThreadSanitizer: data race" in result.stderr
        return
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("what, said", [
    ("wild", r"\(wild, row \"naive\"\), block \(1,0,0\): thread \(2,0,0\) reaches outside of all memory, at"
             r" address 0x\w+: `scons sanitize=address build/cpu-address/tests/cpu_backend/crashes` builds"),
    ("overflow", r"\(overflow, row \"naive\"\), block \(0,0,0\): thread \(2,0,0\) reaches outside of all"),
    ("divide", r"\(divide, row \"naive\"\), block \(0,0,0\): thread \(2,0,0\) divides an integer by zero"),
])
def test_crashes_are_said(what, said):
    """What was printed before is not lost, and an exit code says that the device could not."""
    result = run(BUILD / "tests" / "cpu_backend" / "crashes", what)
    if BUILD.name != "cpu":
        pytest.skip("a sanitizer says it otherwise")
    assert result.returncode == 3 and result.stdout == "before it\n", result.stderr
    assert re.fullmatch(rf"cuda_cpu: kernel launched at tests/cpu_backend/crashes.cu:\d+ {said}.*\n",
                        result.stderr), result.stderr


def test_a_wait_in_vain_ends_in_a_debug_build():
    """On a GPU, too (scons debug=1); without it the CPU backend reports a deadlock."""
    result = run(BUILD / "tests" / "cpu_backend" / "crashes", "spin")
    assert "block (0,0,0), thread (1,0,0) has waited too long for what nobody does\n" in result.stdout
    assert result.stdout.endswith("then: cudaErrorLaunchFailure\n") and "__trap()" in result.stderr


def test_the_hosts_own_end_stays_what_it_is():
    result = run(BUILD / "tests" / "cpu_backend" / "crashes", "host")
    assert result.returncode == -6


@pytest.mark.parametrize("variable, value", [
    ("MULTIPROCESSORS", "abc"), ("MULTIPROCESSORS", "0"), ("MULTIPROCESSORS", ""), ("MULTIPROCESSORS", "2 "),
    ("COMPUTE_CAPABILITY", "8.5"), ("COMPUTE_CAPABILITY", "8"), ("COMPUTE_CAPABILITY", "ninety"),
    ("DEVICES", "9"), ("PEER_ACCESS", "yes"), ("REPEAT_EARLY_LAUNCHES", "2"), ("WATCH_MEMORY", "on"),
    ("MULTIPROCESSOR", "2"), ("WATCH_MEMORY", "99999999999"),
])
def test_variables_are_checked(variable, value, monkeypatch):
    monkeypatch.setenv(f"CUDA_CPU_{variable}", value)
    result = run(BUILD / "tests" / "cpu_backend" / "semantics", "indices_3d")
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(rf"error: CUDA_CPU_{variable}={value}: \w[^\n]*\n", result.stderr), result.stderr


@pytest.mark.parametrize("value, played", [("8.6", "8.6"), ("75", "7.5"), ("120", "12.0"), ("10.0", "10.0")])
def test_the_first_line_names_the_device_that_is_played(value, played, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_COMPUTE_CAPABILITY", value)
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "3")
    result = run(BUILD / "1_matmul_basic", "8", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert f" as compute capability {played}, 3 cores" in "".join(result.stdout.splitlines()[:3])


SMALL = {"gating": ("--channels", "8", "--hidden", "8"), "softmax": ("--inputs", "8", "--classes", "30"),
         "8_": ("--eigen", "16", "--width", "16"), "clifford": ("--features", "5")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_t4_runs_is_what_the_page_promises(name, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_COMPUTE_CAPABILITY", "7.5")
    shape = next((words for part, words in SMALL.items() if part in name), ())
    result = run(BUILD / name, "2", *shape, "--device", "cpu", "--samples", "1")
    assert result.returncode in (0, 3), result.stdout + result.stderr
    lesson = name.split("_")[0]
    page = (ROOT / "docs/trouble.md").read_text()
    refused = re.search(r"^\| T4.* Not at all: (.*?)\. This GPU ", page, re.MULTILINE)[1]
    named = re.search(rf"\b{name if lesson == 'bonus' else lesson}\b", re.sub(r"\b[89]\.0", "", refused))
    assert bool(named) == (result.returncode == 3), refused


@pytest.mark.parametrize("name, arguments", [
    ("9_softmax_training", ("8", "--inputs", "8", "--classes", "30")),
    ("bonus_clifford_fully_connected", ("8", "--features", "12")),
])
def test_early_launches_may_be_repeated(name, arguments, monkeypatch):
    """Also of kernels that add to something, or write in place: the first was not there, for them."""
    monkeypatch.setenv("CUDA_CPU_REPEAT_EARLY_LAUNCHES", "1")
    result = run(BUILD / name, *arguments, "--device", "cpu", "--samples", "1")
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_cases_are_listed():
    result = run(BUILD / "tests" / "cpu_backend" / "semantics", "--list")
    assert sorted(result.stdout.split()) == sorted(CASES)


@pytest.mark.parametrize("case", HOPPER_CASES)
def test_hopper_semantics(case):
    result = run(BUILD / "tests" / "hopper_semantics", case)
    assert result.returncode == 0, result.stdout + result.stderr


def hopper_program(name):
    """A program that was built with nvcc, if there is a GPU for it."""
    capability = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if not shutil.which("nvidia-smi") or "9.0" not in subprocess.run(
        capability, capture_output=True, text=True
    ).stdout:
        pytest.skip("no GPU of compute capability 9.0")
    return ROOT / "build" / "cuda" / "tests" / name


@pytest.mark.parametrize("case", GPU_CASES)
def test_hopper_semantics_on_a_gpu(case):
    result = run(hopper_program("hopper_semantics"), case)
    assert result.returncode == 0, result.stdout + result.stderr


# Rows, columns and depth of products: of a tile and less, of many, with rows of 16 bytes and without.
PRODUCTS = ["1 1 1", "130 72 64", "257 515 136", "392 264 520"]


@pytest.mark.parametrize("multiprocessors", ["2", "3", "8"])
@pytest.mark.parametrize("sizes", PRODUCTS)
def test_hopper_product(sizes, multiprocessors, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = run(BUILD / "tests" / "hopper_product", *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


def test_hopper_products_share_tiles(monkeypatch):
    """Otherwise the test above would say nothing of that."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "6")
    result = run(BUILD / "tests" / "hopper_product", "392", "264", "520")
    kinds = [line.split(" tiles")[0] for line in result.stdout.splitlines() if "some shared along k" in line]
    assert kinds == ["64 x 64", "128 x 192", "128 x 144", "288 x 128"], result.stdout


@pytest.mark.parametrize("sizes", [*PRODUCTS, "4096 4104 1000", "9000 77 4096"])
def test_hopper_product_on_a_gpu(sizes):
    result = run(hopper_program("hopper_product"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


def test_hopper_cases_cite_the_specification():
    for case in GPU_CASES:
        above = HOPPER.split(f"CASE({case})")[0].rstrip().splitlines()[-1]
        assert above.startswith("//") or case in ("wgmma_bf16", "clusters_that_fit"), case


# ---- Sanitizers ----------------------------------------------------------------------------------


# One race and one access out of bounds are found by `scons test`, too.
extensive = partial(pytest.param, marks=pytest.mark.extensive)


@pytest.mark.parametrize("name", ["race_missing_barrier", extensive("race_between_blocks")])
def test_races_are_reported(name):
    result = sanitized("thread", name)
    assert result.returncode != 0
    assert "ThreadSanitizer: data race" in result.stderr
    assert f"{name}.cu:" in result.stderr


@pytest.mark.extensive
def test_a_product_orders_the_reads_that_it_was_made_of():
    """Whoever has waited for it may give that memory back for four warps, and no newer product's."""
    result = sanitized("thread", "race_fragments")
    assert result.returncode == 0 and "ThreadSanitizer" not in result.stderr, result.stderr
    result = sanitized("thread", "race_fragments", "newest")
    assert result.returncode != 0 and "ThreadSanitizer: data race" in result.stderr


@pytest.mark.extensive
@pytest.mark.parametrize("multiprocessors", ["1", "3", "4"])
def test_correct_kernels_have_no_race(multiprocessors, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = sanitized("thread", "race_free")
    assert result.returncode == 0, result.stderr
    assert "ThreadSanitizer" not in result.stderr


@pytest.mark.parametrize(
    "name", ["oob_dynamic_shared", extensive("oob_static_shared"), extensive("oob_global")]
)
def test_out_of_bounds_accesses_are_reported(name):
    result = sanitized("address", name)
    assert result.returncode != 0
    if name == "oob_static_shared":  # an array that knows its length
        assert "index 32 out of bounds for type 'float [32]'" in result.stderr
    else:
        assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
        assert "0 bytes to the right" in result.stderr or "0 bytes after" in result.stderr
    assert f"{name}.cu:" in result.stderr


# ---- Counting ------------------------------------------------------------------------------------

# Of tests/cpu_backend/counting.cu. Requests and sectors of global loads and stores, requests and
# conflicts of shared loads and stores, requests and sectors of atomics; bytes of cp.async, FLOPs of
# tensor cores, warps at barriers, bytes asked of the L2 cache. Two blocks of two warps, if not one.
COUNTED = {
    "neighbours": (4, 16, 4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32 * 32),
    "strided": (4, 4 * 32, 4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32 * 144),
    "vectors": (4, 4 * 16, 4, 4 * 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32 * 128),
    "shifted": (4, 4 * 5, 4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32 * 36),
    "same": (4, 4, 4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32 * 20),
    "parting": (4 * 5, 4 * 5 * 4, 4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32 * 96),
    # A warp: words so far apart, 4 bytes a lane; then 8, where halves of the warp come one after the
    # other, and 16, where quarters do.
    "words_1": (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "words_2": (0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    "words_32": (0, 0, 0, 0, 1, 31, 0, 0, 0, 0, 0, 0, 0, 0),
    "words_33": (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "pairs_2": (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "pairs_4": (0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0),
    "pairs_34": (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "fours_4": (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "fours_32": (0, 0, 0, 0, 1, 4 * 7, 0, 0, 0, 0, 0, 0, 0, 0),
    "fours_36": (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    # All lanes add to one of the two sums of `atomics`, one after the other.
    "atomics": (0, 0, 0, 0, 0, 0, 0, 0, 8, 4 * 4 + 4 * 32, 0, 0, 0, 32 * 144),
    # One warp of each block copies; the other one's part is zeros.
    "copies": (2, 2 * 16, 4, 4 * 16, 4, 0, 0, 0, 0, 0, 2 * 32 * 16, 0, 4, 32 * 96),
    # Quarters of a fragment: 8 rows, 16 bytes of each.
    "fragments": (2 * 4, 2 * 4 * 8, 4, 32, 0, 0, 0, 0, 0, 0, 0, 2 * 16 ** 3, 0, 32 * 96),
    # By the library: two matrices are read, and one is written; with beta it is read, too.
    "product": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4 * (5 * 7 + 7 * 6 + 5 * 6)),
    "product_added": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4 * (5 * 7 + 7 * 6 + 2 * 5 * 6)),
    "product_and_neighbours": (4, 16, 4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                               4 * (5 * 7 + 7 * 6 + 5 * 6) + 32 * 32),
}


@pytest.fixture(scope="module")
def counted():
    """What counting.cu prints: (the numbers of each kernel, its worst places)."""
    result = run(BUILD / "tests" / "cpu_backend" / "counting")
    if result.returncode == 3:
        pytest.skip("this compiler's programs do not count")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    numbers = {line[0]: tuple(map(int, line[1:])) for line in lines if line[0] != "worst"}
    return numbers, {line[2].rstrip(":"): line[3:] for line in lines if line[0] == "worst"}


def test_every_counted_kernel_has_numbers(counted):
    assert counted[0].keys() == COUNTED.keys()


@pytest.mark.parametrize("kernel", COUNTED)
def test_requests_are_counted(counted, kernel):
    assert counted[0][kernel] == COUNTED[kernel]


@pytest.mark.skipif(not shutil.which("addr2line"), reason="there is no addr2line")
def test_lines_to_blame_are_named(counted):
    source = (HERE / "counting.cu").read_text().splitlines()

    def line_of(text):
        return next(str(i) for i, line in enumerate(source, 1) if text in line)

    load = f"tests/cpu_backend/counting.cu:{line_of('out[i] = in[8 * i];')}"
    assert counted[1]["strided"] == [load, "32", "of", "4"]
    assert counted[1]["words_32"][1:] == ["31", "of", "0"]
    good = {"neighbours", "vectors", "shifted", "same", "words_33", "fours_36"}
    assert not good & counted[1].keys()


# ---- cu2cpp --------------------------------------------------------------------------------------


def body(text):
    """The translation of statements in a function, without the #line directive and the function."""
    output = translate("void f() {\n" + text + "\n}\n", "f.cu")
    first, rest = output.split("\n", 1)
    assert first == '#line 1 "f.cu"'
    assert rest.startswith("void f() {\n") and rest.endswith("\n}\n")
    return rest[len("void f() {\n") : -len("\n}\n")]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("k<<<1, 2>>>(a, b);", "k->*cuda_cpu::launch(1, 2)(a, b);"),
        ("k<float, 32><<<grid, block>>>(a);", "k<float, 32>->*cuda_cpu::launch(grid, block)(a);"),
        ("k<T> <<< g, f(a, b[1]), sizeof(V<int>), s >>> (x);",
         "k<T> ->*cuda_cpu::launch( g, f(a, b[1]), sizeof(V<int>), s )(x);"),
        ("k<<<dim3(n >> 3), b>>>(k2 << 1);", "k->*cuda_cpu::launch(dim3(n >> 3), b)(k2 << 1);"),
        ('// k<<<1, 1>>>(a)\nputs("k<<<1, 1>>>(a)"); /* <<< */',
         '// k<<<1, 1>>>(a)\nputs("k<<<1, 1>>>(a)"); /* <<< */'),
        ("char c = '\"'; k<<<1, 1>>>(1'000'000);",
         "char c = '\"'; k->*cuda_cpu::launch(1, 1)(1'000'000);"),
        ('auto s = R"x(k<<<1, 1>>>("))x";', 'auto s = R"x(k<<<1, 1>>>("))x";'),
        ("__shared__ float a[4];", "float (&a)[4] = cuda_cpu::static_shared([] {});"),
        ("__shared__ half a[N][M + 1][2];",
         "half (&a)[N][M + 1][2] = cuda_cpu::static_shared([] {});"),
        ("__shared__ alignas(16) Foo<A, B> a[f(2, 3)];",
         "Foo<A, B> (&a)[f(2, 3)] = cuda_cpu::static_shared([] {});"),
        ("static __shared__ __align__(8 * sizeof(int)) unsigned long long a;",
         "unsigned long long & a = cuda_cpu::static_shared([] {});"),
        ("alignas(16) __shared__ float a[2];",
         "float (&a)[2] = cuda_cpu::static_shared([] {});"),
        ("extern __shared__ float a[];", "float *const a = cuda_cpu::dynamic_shared();"),
        ("extern __shared__ __align__(16) unsigned char a[];",
         "unsigned char *const a = cuda_cpu::dynamic_shared();"),
        ("extern __shared__ float a[][32];", "float (*const a)[32] = cuda_cpu::dynamic_shared();"),
        ("#pragma unroll 4\nfor (;;) {}", "\nfor (;;) {}"),
        ("__noinline__ void g();", "__attribute__((noinline)) void g();"),
        ("__attribute__((__noinline__)) void g();", "__attribute__((__noinline__)) void g();"),
    ],
)
def test_translation(source, expected):
    assert body(source) == expected


def test_line_numbers_stay():
    source = "void f() {\n__shared__ float\na[2]\n[3];\nk<<<1,\n2>>>\n(\na);\n}\n// end"
    lines = translate(source, "f.cu").split("\n")
    original = source.split("\n")
    for line in ("void f() {", "a);", "}", "// end"):
        assert lines.index(line) == original.index(line) + 1


@pytest.mark.parametrize(
    "source, problem",
    [
        ("void f() {\n  __shared__ int a, b;\n}", "f.cu:2: declare one __shared__ variable"),
        ("void f() {\n  __shared__ int a = 1;\n}", "f.cu:2: a __shared__ variable cannot be init"),
        ("__shared__ int a;", "f.cu:1: __shared__ is only supported inside of functions"),
        ("namespace n {\nextern __shared__ int a[];\n}", "f.cu:2: __shared__ is only supported"),
        ("void f() {\n  extern __shared__ int a;\n}", "f.cu:2: extern __shared__ needs an array"),
        ("void f() {\n  __shared__ int a[];\n}", "f.cu:2: a __shared__ array of unknown size"),
        ("void f() {\n  k<<<1, 2;\n}", "f.cu:2: <<< without >>>("),
    ],
)
def test_translation_errors(source, problem):
    with pytest.raises(TranslationError, match=re.escape(problem)):
        translate(source, "f.cu")


def test_command_line(tmp_path):
    source, target = tmp_path / "a.cu", tmp_path / "a.cc"
    source.write_text("void f() { k<<<1, 1>>>(); }\n")
    script = ROOT / "cpu" / "cu2cpp.py"
    subprocess.run([sys.executable, script, source, target], check=True)
    expected = "void f() { k->*cuda_cpu::launch(1, 1)(); }\n"
    assert target.read_text() == f'#line 1 "{source}"\n' + expected
    source.write_text("__shared__ int a;\n")
    command = [sys.executable, script, source, target]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith(f"error: {source}:1: ")


# Less than a tile; rows of 16 bytes of one factor, of the other, of none; shared tiles.
SHAPES = ["1 1 1", "33 72 41", "40 31 64", "130 70 50", "257 136 520"]


@pytest.mark.parametrize("multiprocessors", ["2", "8"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_product_shapes(sizes, multiprocessors, monkeypatch):
    """What a program calls, each operator in the three ways that should be the fastest."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = run(BUILD / "tests" / "product_shapes", *sizes.split(), "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.split(",")[0] for line in result.stdout.splitlines()} == {"fp32", "tf32", "3xtf32", "fp16",
                                                                        "bf16"}


def test_all_ways_of_a_product_are_right():
    result = run(BUILD / "tests" / "product_shapes", "130", "72", "64")
    assert result.returncode == 0 and result.stdout.count("\n") > 75, result.stdout + result.stderr


@pytest.mark.parametrize("sizes", [*SHAPES, "4096 1000 4104", "1000 4097 333"])
def test_product_shapes_on_a_gpu(sizes):
    result = run(hopper_program("product_shapes"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


# One row, and rows that are no multiple of 8; of no multiple of a tile, with weights that stay whole, aligned
# and not, in blocks side by side, and not at all.
LAYERS = ["1 1 1", "77 40 24", "200 72 136", "136 51 37", "200 133 300", "136 1032 264", "130 1025 33"]


@pytest.mark.parametrize("multiprocessors", ["2", "8"])
@pytest.mark.parametrize("sizes", LAYERS)
def test_gating_shapes(sizes, multiprocessors, monkeypatch):
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", multiprocessors)
    result = run(BUILD / "tests" / "gating_shapes", *sizes.split(), "3")
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


def test_all_ways_of_a_layer_are_right():
    result = run(BUILD / "tests" / "gating_shapes", "136", "72", "136")
    assert result.returncode == 0 and result.stdout.count("\n") > 40, result.stdout + result.stderr


@pytest.mark.parametrize("sizes", [*LAYERS, "1000 128 64", "4097 256 200"])
def test_gating_shapes_on_a_gpu(sizes):
    result = run(hopper_program("gating_shapes"), *sizes.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("sizes, kinds", [
    ("4194304 128 64", {"columns"}), ("128 128 64", {"columns", "tile"}), ("4096 4096 4096", {"tile"}),
    ("65536 200 200", {"columns", "tile"}),  # only blocks side by side have room
    ("1024 1024 258200", {"tile"}), ("1024 1024 516288", {"tile"}),  # 2 GiB of weights
])
def test_weights_that_do_not_fit_do_not_stay(sizes, kinds, monkeypatch):
    """Weights that one block holds, and enough tiles for all blocks: nothing else is tried."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "132")
    result = run(BUILD / "tests" / "gating_shapes", *sizes.split(), "0")
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
    result = run(BUILD / "tests" / "attention_shapes", *shape.split())
    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.split(",")[0] for line in result.stdout.splitlines()} == {"bf16", "fp16"}
    if shape == "1 3 700 4 1 128 0 4":
        assert ", 4 heads a tile, keys in 2 parts" in result.stdout


@pytest.mark.parametrize("shape", [*GROWING, *many(LONG_GROWING)])
def test_attention_whose_logits_grow(shape, monkeypatch):
    """Exponentials relative to the first tile's maximum become too large, in most rows of both types, so that
    later tiles are multiplied once more."""
    monkeypatch.setenv("CUDA_CPU_MULTIPROCESSORS", "2")
    result = run(BUILD / "tests" / "attention_shapes", *shape.split())
    assert result.returncode == 0, result.stdout + result.stderr
    grown = re.findall(r"of (\d+) rows (\d+) outgrow", result.stdout)
    assert len(grown) == 2 and all(2 * int(some) > int(rows) for rows, some in grown)


ATTENTIONS_OF_A_GPU = ["2 1000 1000 16 16 128 0", "1 4097 4097 8 8 64 1", "1 1 30000 64 8 128 1", "2 515 3000 16 2 256 1",
                       "1 2000 700 8 4 100 1"]


@pytest.mark.parametrize("shape", [*ATTENTIONS, *LONG_ATTENTIONS, *GROWING, *LONG_GROWING, *ATTENTIONS_OF_A_GPU])
def test_attention_shapes_on_a_gpu(shape):
    result = run(hopper_program("attention_shapes"), *shape.split())
    assert result.returncode == 0 and result.stdout, result.stdout + result.stderr
