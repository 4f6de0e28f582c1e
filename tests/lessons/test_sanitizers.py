"""Lessons are clean under every sanitizer, and mutants of them (mutants.py) are not.

`scons test-all` or `scons sanitize=...` builds what this needs; what is not built is skipped.
"""

from functools import lru_cache
import re
import resource
import shutil

from conftest import CPU_BUILD, OPERATORS, PROGRAMS, ROOT, execute, source_of, words
import hopper_mutants
from mutants import BARRIERS, FEW_MULTIPROCESSORS, INSTEAD, MUTANTS, SANITIZED, whole
import pytest

SANITIZERS = ["address", "thread"]  # "address" checks for undefined behaviour, too
OPTIONS = {"TSAN_OPTIONS": hopper_mutants.TSAN_OPTIONS}
REPORT = re.compile(r"\w+Sanitizer|runtime error:")

# What takes more than one tile and fills none; with rows of 16 bytes and without.
MATMUL_SIZES = [("1",), ("33",), ("36",)]
LAYER_SIZES = [
    ("1", "--channels", "7", "--hidden", "3"),
    ("1", "--channels", "72", "--hidden", "8"),
]
# With the narrow tiles of a large E; with more than one tile along each extent.
DIFFUSION_SIZES = [
    ("1", "--eigen", "336", "--width", "16"),
    ("65", "--eigen", "16", "--width", "144"),
]
# Rows of one warp and of several, single floats and packs, every algebra (in CI two).
CLIFFORD_SIZES = [
    ("3", "--features", "33"),
    ("3", "--features", "260"),
    ("2", "--features", "20", "--algebra", "2,0,0"),
    ("2", "--features", "36", "--algebra", "3,0,1"),
    ("2", "--features", "4", "--algebra", "1,3,0", "--no-norm"),
    ("1", "--features", "8", "--algebra", "4,1,0"),
    ("2", "--features", "4", "--turned"),
]
# Columns of one block, with rows that are hard; D in two blocks; columns in three, and two strips of rows; a softmax
# of rows that are too long for registers.
SOFTMAX_SIZES = [
    ("3", "--inputs", "36", "--classes", "20", "--all", "--hard-rows"),
    ("2", "--inputs", "260", "--classes", "10", "--all"),
    ("35", "--inputs", "5", "--classes", "300"),
    ("130", "--inputs", "40", "--classes", "260", "--all", "--kernel", "specialized"),
    ("2", "--inputs", "4", "--classes", "8300", "--kernel", "^library$"),
]
# One tile; several along each extent.
TRAINING_SIZES = [("2", "--inputs", "8", "--classes", "3"), ("67", "--inputs", "70", "--classes", "97")]
# With two groups of columns; with narrow tiles; with slices of V of more than one tile.
SPATIAL_SIZES = [
    ("1", "--eigen", "16", "--width", "80"),
    ("40", "--eigen", "80", "--width", "48"),
    ("200", "--eigen", "16", "--width", "16"),
]


# Features are mixed: two tiles of rows, features that end within a step, more than a step. In 3-D the
# sanitizers take minutes.
CONNECTED_SIZES = [
    ("66", "--features", "20", "--algebra", "2,0,0"),
    ("3", "--features", "12", "--algebra", "2,0,0", "--no-norm"),
]


# Three tiles of keys; queries that see none, in fewer rows than a tile has.
ATTENTION_SIZES = [
    ("20", "--keys", "140", "--width", "64", "--heads", "1", "--batch", "1", "--full"),
    ("40", "--keys", "33", "--width", "40", "--heads", "2", "--kv-heads", "1", "--batch", "1", "--causal"),
]


MEMORY_SIZES = [("1",)]


def sizes_of(lesson):
    for word, sizes in [("connected", CONNECTED_SIZES), ("attention", ATTENTION_SIZES),
                        ("gating", LAYER_SIZES), ("diffusion_gpus", DIFFUSION_SIZES[1:]),
                        ("diffusion", DIFFUSION_SIZES),
                        ("spatial", SPATIAL_SIZES), ("matmul_softmax", SOFTMAX_SIZES),
                        ("softmax_training", TRAINING_SIZES), ("memory", MEMORY_SIZES),
                        ("clifford", CLIFFORD_SIZES)]:
        if word in lesson:
            return sizes
    return MATMUL_SIZES


LONG = {"3,0,1", "1,3,0", "4,1,0", "--hard-rows"}  # not in CI
# Lesson 5 has rows of 16 bytes only if N is a multiple of 8, too; its six steps are left out.
MORE_SIZES = {"5_gating_unfused": [("8", "--channels", "1", "--hidden", "8", "--kernel", "^(six|cuBLASLt)")]}


def in_turn(runs):
    """(number, run, sanitizer, whether .ci/run leaves that out) of a lesson's runs. There each run is under one of
    the two sanitizers, in turn, or under both if the lesson has no other run: all would take a quarter of an hour."""
    for number, run in enumerate(runs):
        for which, sanitizer in enumerate(SANITIZERS):
            yield number, run, sanitizer, len(runs) > 1 and number % 2 != which


CASES = [pytest.param(lesson, arguments, sanitizer, id=f"{lesson} {words(arguments)}-{sanitizer}",
                      marks=[pytest.mark.slow] * (left_out or bool(LONG & set(arguments))))
         for lesson in [*PROGRAMS, *OPERATORS]
         for _, arguments, sanitizer, left_out in in_turn([*sizes_of(lesson), *MORE_SIZES.get(lesson, [])])]


def program_of(sanitizer, name):
    """A program of a sanitizer's build. That of a lesson with mistakes that are chosen when it runs is
    the lesson, if none is: `scons test-all` does not build it twice."""
    folder = CPU_BUILD.parent / f"cpu-{sanitizer}"
    path = folder / name
    if not path.exists() and sanitizer == "thread" and name in INSTEAD:
        return folder / "mutants" / INSTEAD[name]
    return path


@lru_cache
def _prefix(sanitizer):
    """What makes programs start: with much address space randomization ThreadSanitizer does not."""
    probe = program_of(sanitizer, PROGRAMS[0])
    if not probe.exists():
        return None
    result = execute([probe, "--list"], env=OPTIONS)
    if "unexpected memory mapping" not in result.stderr:
        return ()
    without = (shutil.which("setarch") or "setarch", "-R")
    if execute([*without, probe, "--list"], env=OPTIONS).rc == 0:
        return without
    return None


def run_sanitized(sanitizer, name, arguments, environment=None):
    prefix = _prefix(sanitizer)
    path = program_of(sanitizer, name)
    if prefix is None or not path.exists():
        pytest.skip(f"no build with sanitize={sanitizer} that starts")
    command = [*prefix, path, *arguments, "--device", "cpu", "--samples", "1"]
    return execute(command, timeout=300, env={**OPTIONS, **(environment or {})})


@pytest.mark.extensive
@pytest.mark.parametrize("lesson, arguments, sanitizer", CASES)
def test_lesson_is_clean(lesson, arguments, sanitizer):
    result = run_sanitized(sanitizer, lesson, arguments)
    assert result.rc == 0, result.stderr
    assert not REPORT.search(result.stderr), result.stderr


@pytest.mark.extensive
def test_identities_are_cheap():
    """With cpu/watch/tsan_identities.cpp a program of 2,000 threads has 50,000 page faults, without it 800,000."""
    path = program_of("thread", "1_matmul_basic")
    if not path.exists() or b"__wrap__ZN6__tsan5AllocEm" not in path.read_bytes():
        pytest.skip("not built with ThreadSanitizer of GCC 12")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    result = run_sanitized("thread", "1_matmul_basic", ["33"])
    assert result.rc == 0, result.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before < 150_000


@pytest.mark.extensive
@pytest.mark.parametrize("mutant", SANITIZED, ids=lambda mutant: mutant.name)
def test_mutant_is_reported(mutant):
    environment = {"MISTAKE": str(mutant.number), **FEW_MULTIPROCESSORS,
                   "CUDA_CPU_COMPUTE_CAPABILITY": mutant.capability}
    result = run_sanitized(
        mutant.build, f"mutants/{mutant.program}", mutant.arguments, environment
    )
    assert result.rc != 0, result.stdout
    assert re.search(mutant.report, result.stderr), result.stderr
    # What follows a header with mistakes has the lesson's name.
    places = rf"({mutant.program}|/{mutant.lesson}|^{mutant.lesson})\.cu:|(?:common|primitives|operators|problems)/[\w/]+\.(?:cuh|cu):"
    assert re.search(places, result.stderr), "the report does not lead to the mistake"


@pytest.mark.extensive
@pytest.mark.parametrize("lesson, run, sanitizer", [
    pytest.param(lesson, run, sanitizer, id=f"{lesson}-run{number}-{sanitizer}",
                 marks=[pytest.mark.slow] * (left_out or bool(LONG & set(run[0]))))
    for lesson in hopper_mutants.PROGRAMS
    for number, run, sanitizer, left_out in in_turn(hopper_mutants.RUNS[lesson])])
def test_hopper_kernels_are_clean(lesson, run, sanitizer):
    arguments, multiprocessors = run
    environment = hopper_mutants.environment_of(arguments, multiprocessors)
    result = run_sanitized(sanitizer, hopper_mutants.built_as(lesson), arguments, environment)
    assert result.rc == 0, result.stderr
    assert not REPORT.search(result.stderr), result.stderr


def takes_long(lesson, mistake):
    """In CI one of 26 mistakes is made, and none that makes no difference, as to find nothing takes
    a whole run under ThreadSanitizer: all take a quarter of an hour."""
    return mistake.number % 26 != 1 or bool(hopper_mutants.harmless(lesson, mistake))


@pytest.mark.extensive
@pytest.mark.parametrize(
    "lesson, mistake",
    [pytest.param(lesson, mistake, id=f"{lesson} {mistake}",
                  marks=[pytest.mark.slow] * takes_long(lesson, mistake))
     for lesson in hopper_mutants.PROGRAMS for mistake in hopper_mutants.judged(lesson)],
)
def test_mistake_of_a_hopper_kernel_is_found(lesson, mistake):
    prefix = _prefix("thread")
    programs = [hopper_mutants.program_of(lesson, CPU_BUILD.parent / f"cpu{kind}")
                for kind in ("", "-thread")]
    if prefix is None or not all(path.exists() for path in programs):
        pytest.skip("no build with sanitize=thread that starts")
    verdict, report = hopper_mutants.judge(lesson, mistake, CPU_BUILD, prefix)
    if reason := hopper_mutants.harmless(lesson, mistake):
        # Without a wait two launches write the same values: ThreadSanitizer may see that, or not.
        if mistake.call.startswith("wait_for_previous_kernel") and verdict == "data race":
            return
        assert verdict is None and not report, f"this is said to be harmless ({reason}):\n{report}"
    else:
        assert verdict in ("verification", "error", "deadlock", "data race"), report


@pytest.mark.parametrize("lesson", [*PROGRAMS, *OPERATORS])
def test_every_barrier_has_a_mutant(lesson):
    """Those of Hopper's kernels are derived from the source (hopper_mutants.py)."""
    code = hopper_mutants.code_of(whole(lesson, source_of(lesson)))
    barriers = code.count("__syncthreads();") - sum(
        code.count("__syncthreads();", start, end)
        for start, end, _ in hopper_mutants.hopper_parts(code)
    )
    assert barriers == sum(count for name, _, _, count, _ in BARRIERS if name == lesson)


def test_harmless_mistakes_are_there():
    for lesson, reasons in hopper_mutants.HARMLESS.items():
        found = [hopper_mutants.harmless(lesson, m) for m in hopper_mutants.mistakes(lesson)]
        assert set(reasons.values()) <= set(found)
    for lesson, calls in hopper_mutants.BY_CHANCE.items():
        assert set(calls) <= {f"{m.call} {m.change}" for m in hopper_mutants.mistakes(lesson)}


def test_mutant_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
