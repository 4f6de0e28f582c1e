"""What a lesson prints by default: one screen, in seconds, and only what the run shows."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

from conftest import OPERATORS, PROGRAMS, ROOT, execute, program, source_of
from test_lessons import table_rows
import pytest

LINES, COLUMNS, SECONDS = 45, 100, 10
# Over at once on the CPU, with all the rows: some take only rows of whole vectors.
LAYER, MESH = ("1", "--channels", "3", "--hidden", "1"), ("8", "--eigen", "16", "--width", "16")
SMALL = {
    "5_gating_unfused": LAYER, "6_gating_fused": ("8", "--channels", "8", "--hidden", "8"), "7_diffusion_fused": MESH,
    "8_spatial_gradients": MESH, "9_matmul_softmax": ("8", "--inputs", "16"),
    "10_clifford_gp": ("3", "--features", "12"), "9_softmax_training": ("8", "--inputs", "16"),
    "bonus_clifford_fully_connected": ("3", "--features", "12"), "bonus_memory": ("1",),
}
# Which rows these have depends on the shape.
ROWS_OF_THE_SHAPE = ("9_matmul_softmax", "9_softmax_training", "bonus_diffusion_gpus")
WITH_MEMORY = ["5_gating_unfused", "7_diffusion_fused", "8_spatial_gradients", "10_clifford_gp",
               "bonus_clifford_fully_connected"]


def is_one_screen(stdout, more=0):
    lines = stdout.splitlines()
    assert len(lines) + more <= LINES
    assert max(map(len, lines)) <= COLUMNS


def comparisons(lesson, stdout):
    """How many lines a GPU's run has that compare two rows: the CPU backend prints none."""
    source = source_of(lesson)
    if lesson == "9_matmul_softmax":  # one for each product on tensor cores
        return sum(bool(re.match("fused tensor cores|unfused specialized", row))
                   for _, _, row in table_rows(stdout))
    tables = 2 if lesson.startswith("bonus_attention") else 1  # with a mask and without, of the same function
    return tables * len(re.findall(r"\.compare\(", source))


# Those that take longest on the CPU are left to scons test-all.
@pytest.mark.parametrize("lesson", [
    pytest.param(lesson, marks=[pytest.mark.extensive] * (lesson.split("_")[0] in ("5", "6", "7", "8", "10")
                                                              or lesson == "bonus_attention"))
    for lesson in PROGRAMS
])
def test_default_is_one_screen(run, backend, lesson):
    result = run(lesson)
    assert result.rc == 0, result.stdout + result.stderr
    is_one_screen(result.stdout)
    if backend == "cuda":
        assert result.seconds <= SECONDS
        return
    # On a GPU each table says what its limit is and how it was timed.
    small = () if lesson in ROWS_OF_THE_SHAPE else SMALL.get(lesson, ("8",))
    timed = run(lesson, *small, "--samples", 1)
    rows, default_rows = ([(problem["name"], kernel["name"]) for problem, kernel in each.kernels]
                          for each in (timed, result))
    assert rows == default_rows
    is_one_screen(timed.stdout, 2 * len(timed.record["problems"]) + comparisons(lesson, timed.stdout))
    last = re.sub(r"\n  ", " ", result.stdout).splitlines()[-1]  # a long one has two lines
    named = re.findall(r"--[a-z0-9-]+", last)
    assert re.fullmatch(r"Other tables: another N(?:, --\S+)*(?: or --\S+)? \(see --help\)\.", last)
    help_text = execute([program(lesson), "--help"]).stdout
    source = source_of(lesson)
    own = re.findall(r'(?:\{|\.name = )"(--[\w-]+)"', source) + ["--sweep"] * (".sweep = " in source)
    assert set(own) == set(named) - {"--help"}
    assert all(re.search(rf"^ +{option}\b", help_text, re.MULTILINE) for option in own)


@pytest.mark.extensive
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_one_screen(run, name):
    result = run(name, "--samples", 1)
    assert result.rc == 0, result.stdout + result.stderr
    is_one_screen(result.stdout, 2 * len(result.record["problems"]))


@pytest.mark.parametrize("shape", [(), (9, "--inputs", 40, "--classes", 50),
                                   (4, "--inputs", 36, "--classes", 1000)], ids=str)
def test_softmax_is_one_screen_and_the_rest_an_option(run, shape):
    result, everything = (run("9_matmul_softmax", *shape, "--samples", 1, *flag)
                          for flag in ((), ("--all",)))
    is_one_screen(result.stdout, 2 * len(result.record["problems"])
                  + comparisons("9_matmul_softmax", result.stdout))
    shown, there = ({problem["name"] for problem in each.record["problems"]}
                    for each in (result, everything))
    assert shown < there
    assert all(name.startswith("TF32") for name in shown)
    assert {"fp32" + name[4:] for name in there if name.startswith("TF32")} <= there
    assert "--all" in result.stdout.splitlines()[-1] not in everything.stdout
    assert "--all" not in everything.stdout.splitlines()[-1]


def on_terminal(columns, command):
    """What a program prints to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                               stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # Linux says so when the last writer has gone
        pass
    os.close(ours)
    assert process.wait() == 0
    return text.decode().replace("\r\n", "\n")


def header_of(stdout):
    """Of the last table."""
    return re.findall(r"^kernel .*", stdout, re.MULTILINE)[-1].split()


# A column with memory, and none; rows that are left out.
@pytest.mark.parametrize("lesson, columns", [
    pytest.param(lesson, columns, marks=[pytest.mark.extensive] * (
        columns != 80 and lesson not in ("1_matmul_basic", "5_gating_unfused", "9_matmul_softmax")))
    for columns in (200, 80, 60) for lesson in PROGRAMS])
def test_tables_fit_a_terminal(lesson, columns):
    command = [program(lesson), *SMALL.get(lesson, ("8",)), "--device", "cpu", "--samples", "1"]
    whole, text = execute(command).stdout, on_terminal(columns, command)
    assert len(table_rows(whole)) == len(re.findall(r" (?:ok|needs a GPU .*)$", text, re.MULTILINE))
    rows = [line for line in text.splitlines() if re.search(r"^kernel | ok$", line)]
    assert rows and max(map(len, rows)) <= columns
    kept = header_of(text)
    assert set(kept) <= set(header_of(whole)) and {"kernel", "ms", "speed"} <= set(kept)
    if columns == 200:
        assert kept == header_of(whole)


@pytest.mark.parametrize("lesson", ["1_matmul_basic", "9_matmul_softmax"])
def test_counts_fit_a_terminal_too(lesson):
    """What goes last is by how much a kernel moves more than it must, and whether it is right."""
    command = [program(lesson), *SMALL.get(lesson, ("8",)), "--device", "cpu"]
    for columns in (80, 60):
        text = on_terminal(columns, command)
        rows = [line for line in text.splitlines() if re.search(r"^kernel | ok$", line)]
        assert rows and max(map(len, rows)) <= columns, text
        assert {"kernel", "least", "error"} <= set(header_of(text))


def test_too_narrow_a_terminal_goes_without_gigabytes_per_second():
    command = [program("5_gating_unfused"), *LAYER, "--device", "cpu", "--samples", "1"]
    assert "GB/s" in header_of(on_terminal(100, command))
    assert "GB/s" not in header_of(on_terminal(80, command))
    assert "TFLOP/s" in header_of(on_terminal(80, command))
    short = [program("1_matmul_basic"), "8", "--device", "cpu", "--samples", "1"]
    assert "GB/s" in header_of(on_terminal(80, short))


@pytest.mark.parametrize("lesson", WITH_MEMORY)
def test_memory_column_has_digits(lesson):
    command = [program(lesson), *SMALL[lesson], "--device", "cpu", "--samples", "1"]
    rows = re.findall(r"^.* (\S+) ok$", execute(command).stdout.split("B\n", 1)[1], re.MULTILINE)
    assert rows and all(float(value) >= 1 for value in rows[-2:])


@pytest.mark.parametrize(
    "sentence, factor, printed",
    [
        ("Tiles: % times as fast.", 12.114, "Tiles: 12.11 times as fast."),
        ("Forward: % times as fast.", 0.96, "Forward: 0.96 times as fast."),
        ("The last kernel runs at % of cuBLAS's rate.", 0.96,
         "The last kernel runs at 0.96 of cuBLAS's rate."),
    ],
)
def test_comparison_says_which_is_faster(sentence, factor, printed):
    result = execute([program("tests/lessons/comparison"), sentence, factor])
    assert (result.rc, result.stdout) == (0, printed + "\n")


@pytest.mark.parametrize("lesson", PROGRAMS)
def test_no_comparison_takes_for_granted_which_is_faster(lesson):
    """Each has its factor in words that are right in both directions."""
    source = source_of(lesson)
    headers = re.findall(r'^#include "((?:common|primitives|operators|problems)/[\w/]+\.(?:cuh|h))"', source, re.MULTILINE)
    source += "".join((ROOT / header).read_text() for header in headers)
    calls = re.findall(r"\.compare\((.*?)\);", source, re.DOTALL)
    assert len(calls) == len(re.findall(r"\.compare\(", source))
    assert calls or lesson == "4_matmul_cublas"
    for call in calls:
        sentence = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call))
        assert re.search(r"% times as fast\b|% of \w+'s rate", sentence), call


def test_failed_kernels_are_not_called_right():
    result = execute([program("tests/lessons/broken_kernels"), "33", "--device", "cpu", "--samples", "1"])
    assert re.search(r"^\d+ of \d+ kernels FAILED verification\.$", result.stdout, re.MULTILINE)
    assert not re.search(r"\bright\b|\bverified\b", result.stdout)


def test_seconds_decide_how_often_a_kernel_is_timed(run, backend):
    few, many = (run("1_matmul_basic", 300, "--seconds", seconds) for seconds in (0.1, 60))
    least, most = (3, 50) if backend == "cuda" else (1, 5)
    assert {kernel["ms"]["samples"] for _, kernel in few.kernels} == {least}
    assert {kernel["ms"]["samples"] for _, kernel in many.kernels} == {most}
    few = run("1_matmul_basic", 300, "--seconds", 0.1, "--samples", 2)
    assert {kernel["ms"]["samples"] for _, kernel in few.kernels} == {2}


def test_records_ask_for_more_than_a_screen(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results")
    import record

    run, arguments = record.runs_of("9_matmul_softmax")[0]
    assert run == "" and "--all" in arguments
    assert record.SECONDS > SECONDS
    for lesson in PROGRAMS:
        known = execute([program(lesson), "--help"]).stdout
        for _, arguments in record.runs_of(lesson):
            options = [word for word in arguments if word.startswith("--")]
            assert all(option in known for option in [*options, "--seconds"])
