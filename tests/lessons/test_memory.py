"""What a row claims of memory (inputs, outputs, temporaries: the column of bytes) is what it uses.

The CPU backend gives each allocation pages of its own and closes them before a launch: whoever comes to
one opens it (cpu/watch/memory_watch.h). Its bytes are those that the allocator gave out, all of them.
"""
import json
import re

import pytest

from conftest import LESSONS, OPERATORS, execute, program, source_of

LINE = re.compile(r"^memory of (.*): (.*): (\d+) bytes used, (\d+) claimed$", re.MULTILINE)
RUNS = [
    ("5_gating_unfused", "1 --channels 16 --hidden 8"),
    ("5_gating_unfused", "1 --channels 7 --hidden 3"),
    ("7_diffusion_fused", "200 --eigen 64 --width 64"),
    ("7_diffusion_fused", "200 --eigen 24 --width 320"),
    ("7_diffusion_fused", "75 --eigen 24 --width 72 --batch 3"),
    ("8_spatial_gradients", "100 --eigen 48 --width 32"),
    ("8_spatial_gradients", "40 --eigen 160 --width 16"),
    ("10_clifford_gp", "3 --features 40"),
    ("10_clifford_gp", "3 --features 40 --no-norm"),
    ("10_clifford_gp", "3 --features 260 --algebra 2,0,0"),
    pytest.param("10_clifford_gp", "1 --features 300 --algebra 3,0,1", marks=pytest.mark.extensive),
    ("bonus_clifford_fully_connected", "5 --features 36 --algebra 2,0,0"),
    ("bonus_clifford_fully_connected", "3 --features 12 --no-norm"),
    ("bonus_attention_backward", "70 --keys 150 --heads 2 --kv-heads 1 --width 64 --batch 1"),
    ("bonus_attention_backward", "40 --keys 40 --heads 2 --kv-heads 2 --width 128 --batch 1"),
    ("operators_diffusion", "200 --eigen 64 --width 64"),
    ("operators_diffusion", "200 --eigen 136 --width 320"),
    ("operators_diffusion", "75 --eigen 24 --width 72 --batch 3"),
    ("operators_gradients", "100 --eigen 48 --width 32"),
    ("operators_gradients", "40 --eigen 160 --width 16"),
    ("operators_clifford", "3 --features 261 --algebra 2,0,0"),
    ("operators_clifford", "3 --features 40 --no-norm"),
    ("operators_clifford_connected", "5 --features 33 --algebra 2,0,0"),
    ("operators_clifford_connected", "3 --features 12 --no-norm"),
]


@pytest.mark.parametrize("lesson, arguments", RUNS, ids=lambda words: words)
def test_claims(lesson, arguments, tmp_path):
    record = tmp_path / "record.json"
    command = [program(lesson), *arguments.split(), "--device", "cpu", "--samples", "1", "--json", record]
    result = execute(command, env={"CUDA_CPU_WATCH_MEMORY": "1"})
    assert result.rc == 0, result.stderr
    found = {(problem, row): (int(used), int(claimed))
             for problem, row, used, claimed in LINE.findall(result.stderr)}
    claims = {(problem["name"], kernel["name"]): kernel["memory_bytes"]
              for problem in json.loads(record.read_text())["problems"]
              for kernel in problem["kernels"] if kernel["memory_bytes"]}
    assert claims and found.keys() == claims.keys()
    assert {row: used for row, (used, _) in found.items()} == claims


def test_every_lesson_with_the_column_is_here():
    with_column = {name for name in (*LESSONS, *OPERATORS) if ".occupies(" in source_of(name)}
    assert with_column == {getattr(run, "values", run)[0] for run in RUNS}
