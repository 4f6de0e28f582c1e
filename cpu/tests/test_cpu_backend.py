"""Tests of the CPU backend in cpu/: its semantics, its errors, and what sanitizers see.

The programs come from the build: CPU_BUILD_DIR names its folder (build/cpu by default), and those
of the sanitizer builds are next to it. Tests whose program has not been built are skipped.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import CPU_BUILD as BUILD, PROGRAMS, ROOT, execute, hopper_program, run_program as run
import pytest

HERE = Path(__file__).resolve().parent
CASES = re.findall(r"^CASE\((\w+)\)", (HERE / "semantics.cu").read_text(), re.MULTILINE)
HOPPER = (HERE / "hopper_semantics.cu").read_text()
HOPPER_CASES = re.findall(r"^CASE\((\w+)\)", HOPPER, re.MULTILINE)
# Those that a GPU can show.
GPU_CASES = re.findall(r"^CASE\((\w+)\)", HOPPER.split("#ifdef CUDA_CPU")[0], re.MULTILINE)

sys.path.insert(0, str(ROOT / "cpu"))
from cu2cpp import TranslationError, translate  # noqa: E402
import units  # noqa: E402


def sanitized(sanitizer, name, *arguments):
    """Runs a program of a sanitizer build."""
    return run(BUILD.parent / f"cpu-{sanitizer}" / "cpu" / "tests" / "sanitized" / name, *arguments)


@pytest.mark.parametrize("case", CASES)
def test_semantics(case):
    result = run(BUILD / "cpu" / "tests" / "semantics", case)
    if BUILD.name == "cpu-thread" and case == "async_copies_missing_wait":
        assert "ThreadSanitizer: data race" in result.stderr
        return
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("what, said", [
    ("wild", r"\(wild, row \"naive\"\), block \(1,0,0\): thread \(2,0,0\) reaches outside of all memory, at"
             r" address 0x\w+: `scons sanitize=address build/cpu-address/cpu/tests/crashes` builds"),
    ("overflow", r"\(overflow, row \"naive\"\), block \(0,0,0\): thread \(2,0,0\) reaches outside of all"),
    ("divide", r"\(divide, row \"naive\"\), block \(0,0,0\): thread \(2,0,0\) divides an integer by zero"),
])
def test_crashes_are_said(what, said):
    """What was printed before is not lost, and an exit code says that the device could not."""
    result = run(BUILD / "cpu" / "tests" / "crashes", what)
    if BUILD.name != "cpu":
        pytest.skip("a sanitizer says it otherwise")
    assert result.returncode == 3 and result.stdout == "before it\n", result.stderr
    assert re.fullmatch(rf"cuda_cpu: kernel launched at cpu/tests/crashes.cu:\d+ {said}.*\n",
                        result.stderr), result.stderr


def test_a_wait_in_vain_ends_in_a_debug_build():
    """On a GPU, too (scons debug=1); without it the CPU backend reports a deadlock."""
    result = run(BUILD / "cpu" / "tests" / "crashes", "spin")
    assert "block (0,0,0), thread (1,0,0) has waited too long for what nobody does\n" in result.stdout
    assert result.stdout.endswith("then: cudaErrorLaunchFailure\n") and "__trap()" in result.stderr


def test_the_hosts_own_end_stays_what_it_is():
    result = run(BUILD / "cpu" / "tests" / "crashes", "host")
    assert result.returncode == -6


@pytest.mark.parametrize("variable, value", [
    ("MULTIPROCESSORS", "abc"), ("MULTIPROCESSORS", "0"), ("MULTIPROCESSORS", ""), ("MULTIPROCESSORS", "2 "),
    ("COMPUTE_CAPABILITY", "8.5"), ("COMPUTE_CAPABILITY", "8"), ("COMPUTE_CAPABILITY", "ninety"),
    ("DEVICES", "9"), ("PEER_ACCESS", "yes"), ("REPEAT_EARLY_LAUNCHES", "2"), ("WATCH_MEMORY", "on"),
    ("MULTIPROCESSOR", "2"), ("WATCH_MEMORY", "99999999999"),
])
def test_variables_are_checked(variable, value, monkeypatch):
    monkeypatch.setenv(f"CUDA_CPU_{variable}", value)
    result = run(BUILD / "cpu" / "tests" / "semantics", "indices_3d")
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
    table = page[page.index("| what runs on 7.5 |"):].split("\n\n")[0]
    what_runs = [what for lessons, what in re.findall(r"^\| ([^|]*) \| (.*) \|$", table, re.MULTILINE)
                 if (name if lesson == "bonus" else lesson) in lessons.split(", ")]
    assert len(what_runs) == 1, table
    assert what_runs[0].startswith("nothing") == (result.returncode == 3), table


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
    result = run(BUILD / "cpu" / "tests" / "semantics", "--list")
    assert sorted(result.stdout.split()) == sorted(CASES)


@pytest.mark.parametrize("case", HOPPER_CASES)
def test_hopper_semantics(case):
    result = run(BUILD / "cpu" / "tests" / "hopper_semantics", case)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", GPU_CASES)
def test_hopper_semantics_on_a_gpu(case):
    result = run(hopper_program("cpu/tests/hopper_semantics"), case)
    assert result.returncode == 0, result.stdout + result.stderr


def test_hopper_cases_cite_the_specification():
    for case in GPU_CASES:
        above = HOPPER.split(f"CASE({case})")[0].rstrip().splitlines()[-1]
        assert above.startswith("//") or case in ("wgmma_bf16", "clusters_that_fit"), case


# ---- Sanitizers ----------------------------------------------------------------------------------


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["race_missing_barrier", "race_between_blocks"])
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


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["oob_dynamic_shared", "oob_static_shared", "oob_global"])
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

# Of cpu/tests/counting.cu. Requests and sectors of global loads and stores, requests and
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
    result = run(BUILD / "cpu" / "tests" / "counting")
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

    load = f"cpu/tests/counting.cu:{line_of('out[i] = in[8 * i];')}"
    assert counted[1]["strided"] == [load, "32", "of", "4"]
    assert counted[1]["words_32"][1:] == ["31", "of", "0"]
    good = {"neighbours", "vectors", "shifted", "same", "words_33", "fours_36"}
    assert not good & counted[1].keys()


def counted_with(folder, script):
    """counting.cu with an addr2line that is this shell script, in a folder of the test's."""
    (folder / "addr2line").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "addr2line").chmod(0o755)
    return execute([BUILD / "cpu" / "tests" / "counting"], env={"PATH": f"{folder}:{os.environ['PATH']}"})


@pytest.mark.skipif(not shutil.which("addr2line"), reason="there is no addr2line")
def test_one_addr2line_answers_all(counted, tmp_path):
    """It takes a tenth of a second to start, and a run has many lines to look up."""
    starts = tmp_path / "starts"
    result = counted_with(tmp_path, f'echo >>"{starts}"\nexec {shutil.which("addr2line")} "$@"')
    assert result.rc == 0 and result.stdout.count("counting.cu:") >= 2
    assert starts.read_text() == "\n"


@pytest.mark.parametrize("answers", ["exit 0", "read question; echo 0x0"])
def test_lines_are_unknown_where_nobody_answers(counted, tmp_path, answers):
    result = counted_with(tmp_path, answers)
    assert result.rc == 0 and "counting.cu:" not in result.stdout


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


# ---- What ./try takes of the lessons' build --------------------------------------------------------


@pytest.mark.parametrize("changed, taken", [
    (None, True), ("cpu/runtime/a.cpp", False), ("cpu/runtime/a.h", False), ("build/cpu/obj/cpu/runtime/all.o", False),
    (units.STATE, False)])
def test_objects_are_taken_while_nothing_has_changed(tmp_path, changed, taken):
    names = ["c/names", "runtime/all"]
    objects = ["build/cpu/obj/cpu/runtime/all.o"]
    for file in ["cpu/units.py", "cpu/c/names.cpp", "cpu/runtime/a.cpp", "cpu/runtime/a.h", *objects]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    assert units.ready(tmp_path, names) == {}
    (tmp_path / units.STATE).write_text(units.state_of(tmp_path, objects))
    if changed:
        (tmp_path / changed).write_text("changed")
    assert units.ready(tmp_path, names) == ({"runtime/all": tmp_path / objects[0]} if taken else {})


def test_the_lessons_build_says_what_it_was_made_of():
    """Without this the test above would not notice that scons and ./try name other objects."""
    state = ROOT / units.STATE
    if not state.exists() or any(file.stat().st_mtime > state.stat().st_mtime for file in units.made_of(ROOT)):
        pytest.skip("scons has not built the lessons here, as they are now")
    names = units.units(sorted(ROOT.glob("cpu/*/*.cpp")), lambda source: False)
    ready = units.ready(ROOT, names)
    assert set(ready) == {name for name in names if not name.startswith(f"{units.APART}/")}
