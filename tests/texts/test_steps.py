"""`scons diff LESSON`: what changes from one kernel of a lesson to the next, from the source."""

import importlib.util
import re
import sys

from conftest import LESSONS, ROOT, execute
import pytest

spec = importlib.util.spec_from_file_location("steps", ROOT / "docs" / "steps.py")
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)


def test_every_lesson_with_a_ladder_has_one():
    assert set(steps.LADDERS) == set(LESSONS) - {"4_matmul_cublas", "5_gating_unfused"}


@pytest.mark.parametrize("lesson", steps.LADDERS)
def test_ladder_is_in_the_source(lesson):
    text = (ROOT / f"{lesson}.cu").read_text()
    parts = steps.parts_of(text)
    kernels = [name for name, _, kernel in parts if kernel]
    assert len(kernels) == len(re.findall("^__global__", text, re.MULTILINE))
    ladder = steps.LADDERS[lesson]
    assert [name for name in kernels if name in ladder] == ladder
    for name, block, kernel in parts:
        assert not kernel or (block[-1] == "}" and any(f"{name}(" in line for line in block))


@pytest.mark.parametrize("lesson", steps.LADDERS)
def test_both_kernels_can_be_made_of_the_difference(lesson):
    parts = {name: block for name, block, _ in steps.parts_of((ROOT / f"{lesson}.cu").read_text())}
    for before, after in zip(steps.LADDERS[lesson], steps.LADDERS[lesson][1:]):
        lines = [line for line in steps.steps(lesson, before, after) if line and line[0] != "@"]
        assert [line[2:] for line in lines if line[0] in "+ "] == parts[after]
        old = [line[2:] for line in lines if line[0] in "- "]
        assert old == parts[before] or all(line[0] == "+" for line in lines)


def test_first_step():
    lines = list(steps.steps("1_matmul_basic"))
    assert lines[0] == "@@ matmul_uncoalesced -> matmul_coalesced"
    assert "+   const int col = blockIdx.x * blockDim.x + threadIdx.x;" in lines
    assert "    float sum = 0;" in lines


def test_what_is_new_beside_a_kernel_is_named():
    lines = list(steps.steps("2_matmul_sharedmem", "matmul_registers"))
    assert lines[1] == "@@ new beside it: load4, store4"


@pytest.mark.parametrize("arguments, rc, text", [
    (["1_matmul_basic"], 0, "@@ matmul_uncoalesced -> matmul_coalesced"),
    (["2_matmul_sharedmem", "matmul_tile", "matmul_async"], 0, "@@ matmul_tile -> matmul_async"),
    (["2_matmul_sharedmem", "matmul_tail"], 2, "2_matmul_sharedmem has no kernel matmul_tail"),
    (["4_matmul_cublas"], 2, "invalid choice: '4_matmul_cublas'"),
    ([], 2, "LESSON"),
])
def test_command(arguments, rc, text):
    result = execute([sys.executable, ROOT / "docs" / "steps.py", *arguments])
    assert result.rc == rc and text in result.stdout + result.stderr
