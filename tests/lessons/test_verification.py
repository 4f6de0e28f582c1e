"""Verification passes right kernels and no others: those of broken_kernels.cu are all rejected, and
so are lessons with a planted mistake (mutants.py)."""

import re

from conftest import ROOT, execute, program, source_of
import hopper_mutants
from mutants import FEW_MULTIPROCESSORS, MUTANTS, plant, WRONG
import pytest

BROKEN = "tests/lessons/broken_kernels"
SOURCE = (ROOT / f"{BROKEN}.cu").read_text()
BUGS = re.findall(r"^  (\w+),$", re.search(r"enum class Bug \{(.*?)\}", SOURCE, re.DOTALL)[1],
                  re.MULTILINE)
VERIFICATION_FAILED, DEVICE_CANNOT = 1, 3


def is_rejected(run, bug, n):
    result = run(BROKEN, n, "--kernel", f"^{bug}$", "--samples", 1)
    ((_, kernel),) = result.kernels
    row = next(line for line in result.stdout.splitlines() if line.startswith(bug))
    assert result.rc == (0 if kernel["ok"] else VERIFICATION_FAILED)
    assert ("FAILED" in row) == (not kernel["ok"])
    assert row.endswith(" ok") == kernel["ok"]
    assert ("1 of 1 kernels FAILED verification." in result.stdout) == (not kernel["ok"])
    return not kernel["ok"]


def test_bugs_are_those_of_the_source():
    assert BUGS[0] == "none" and len(BUGS) >= 10


@pytest.mark.parametrize("n", [33, 64, 100])
@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_rejected(run, bug, n):
    harmless = bug.startswith("none") or (bug == "multiples_of_32_only" and n % 32 == 0)
    assert is_rejected(run, bug, n) == (not harmless)


@pytest.mark.parametrize("bug, words", [
    ("writes_behind_output", "wrote [1-4] bytes? behind output 1"),
    ("writes_before_output", "wrote [1-4] bytes? before output 1"),
    ("changes_input", "changed input 2"),
    ("block_too_large", r"not launched, .*\(cudaError\w+\).* (64|1024)"),
])
def test_culprit_is_named_and_nobody_else(run, bug, words):
    """What a kernel does to memory that is not its own, or a launch that is refused, is said in its row; the row
    after it is right, and the table is whole."""
    result = run(BROKEN, 33, "--kernel", f"^(none|{bug}|none_after_the_others)$", "--samples", 2)
    assert result.rc == VERIFICATION_FAILED, result.stdout + result.stderr
    assert {kernel["name"]: kernel["ok"] for _, kernel in result.kernels} == {
        "none": True, bug: False, "none_after_the_others": True,
    }
    below = result.stdout.split(f"\n{bug} ")[1].split("\nnone_after")[0]
    assert re.search(f"FAILED .*{words}", " ".join(below.split())), result.stdout
    assert "1 of 3 kernels FAILED verification." in result.stdout


def test_launch_that_fails_costs_its_row_alone():
    """On the CPU, where the device runs other kernels after it."""
    result = execute([program(BROKEN, "cpu"), "33", "--stop", "--kernel", "^(none|stops|none_after_the_others)$",
                      "--samples", "1", "--device", "cpu"])
    assert result.rc == VERIFICATION_FAILED, result.stdout + result.stderr
    rows = dict(re.findall(r"^(none\w*|stops) .*?(ok|FAILED.*)$", result.stdout, re.MULTILINE))
    assert rows["none"] == rows["none_after_the_others"] == "ok" and "launch failure" in result.stdout, result.stdout
    assert rows["stops"].startswith("FAILED") and "1 of 3 kernels FAILED verification." in result.stdout
    assert re.search(r'row "stops".*__trap', result.stderr), result.stderr


def test_access_outside_of_all_memory_names_the_row(backend):
    """Nothing runs on such a device any more. What was verified before is in the table."""
    result = execute([program(BROKEN, backend), "33", "--wild", "--kernel", "^(none|wild)$", "--device", backend])
    assert result.rc == DEVICE_CANNOT, result.stdout + result.stderr
    assert re.search(r'row "wild"', result.stderr), result.stderr
    if backend == "cpu":
        assert "block (0,0,0)" in result.stderr and "sanitize=address" in result.stderr


@pytest.mark.parametrize("how", ["--count", "--time"])
@pytest.mark.parametrize("bug", ["counter_left_as_it_is", "half_left_as_it_is"])
def test_later_launches_must_be_right(run, bug, how):
    """What a launch leaves behind is what the next one finds, or the one after it."""
    result = run(BROKEN, 33, how, "--kernel", f"^(none|{bug})$")
    assert result.rc == VERIFICATION_FAILED
    assert [kernel["ok"] for _, kernel in result.kernels] == [True, False]


def test_one_bad_kernel_is_enough(run):
    result = run(BROKEN, 33, "--kernel", "^(none|bias_forgotten)$", "--samples", 1)
    assert result.rc == VERIFICATION_FAILED
    assert {kernel["name"]: kernel["ok"] for _, kernel in result.kernels} == {
        "none": True, "bias_forgotten": False,
    }
    assert "1 of 2 kernels FAILED verification." in result.stdout


@pytest.mark.parametrize("bug", ["last_row_not_written", "adds_to_old_output", "infinite_element"])
def test_error_without_a_value_is_null(run, bug):
    ((_, kernel),) = run(BROKEN, 33, "--kernel", bug, "--samples", 1).kernels
    assert kernel["error"] is None and not kernel["ok"]


def test_where_zeros_are_expected(run):
    """Zeros have no error; all else is beyond any bound."""
    result = run(BROKEN, 33, "--kernel", "^all_", "--samples", 1)
    kernels = {kernel["name"]: kernel for _, kernel in result.kernels}
    assert kernels["all_zero"]["ok"] and kernels["all_zero"]["error"] == 0
    for wrong in ("all_small", "all_nan"):
        assert not kernels[wrong]["ok"] and kernels[wrong]["error"] is None


def test_elements_far_above_the_others(run):
    """They are rounded in units of their own size. An error beyond the bound in these units is found, though it is
    within the bound for the sum of squares."""
    result = run(BROKEN, 33, "--kernel", "^large_", "--samples", 1, "--explain")
    kernels = {kernel["name"]: kernel for _, kernel in result.kernels}
    assert kernels["large_rounded"]["ok"] and not kernels["large_wrong"]["ok"]
    assert "wrong from element 0 on: 1012 where 1000 is expected; 1 of 5000 elements are wrong" in result.stdout


def programs_with_mistakes():
    """Name of the program, lesson, and the source where that is not the lesson's, of all that are built with
    mistakes in them."""
    found = {(mutant.program, mutant.lesson, mutant.operator or "") for mutant in MUTANTS}
    found |= {(hopper_mutants.name_of(program), program,
               hopper_mutants.source_of(program) if program in hopper_mutants.TESTS else "")
              for program in hopper_mutants.PROGRAMS}
    return sorted(found)


@pytest.mark.parametrize("name, lesson, source", programs_with_mistakes())
def test_every_mistake_finds_its_place(name, lesson, source):
    """They are built and run by the extensive tests only; what a change of the source breaks shows here."""
    text = (ROOT / source).read_text() if source else source_of(lesson)
    assert plant(name, lesson, text) not in (text, f"#line 1\n{text}")


@pytest.mark.extensive
@pytest.mark.parametrize("mutant", WRONG, ids=lambda mutant: mutant.name)
def test_wrong_lesson_is_rejected(mutant):
    command = [program(f"mutants/{mutant.program}"), *mutant.arguments, "--device", "cpu"]
    environment = {"MISTAKE": str(mutant.number), **FEW_MULTIPROCESSORS,
                   "CUDA_CPU_COMPUTE_CAPABILITY": mutant.capability}
    result = execute([*command, "--samples", "1"], env=environment)
    assert result.rc == VERIFICATION_FAILED, result.stdout + result.stderr
    assert re.search(mutant.report, result.stdout + result.stderr), result.stdout + result.stderr
