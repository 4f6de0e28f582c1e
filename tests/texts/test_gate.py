"""docs/lessons/6_gating_fused.md says how lesson 6 gets another gate. Here its edits are made."""

import re

from conftest import ROOT, execute
import pytest
from test_style import copy_of_sources, scons

EDIT = re.compile(r"^\| .*?`([\w/]+\.cuh?)`.* \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


def edits():
    """[(file, what is there, what becomes of it)]"""
    page = (ROOT / "docs/lessons/6_gating_fused.md").read_text()
    (section,) = re.findall(r"^## Another gate\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    found = EDIT.findall(section)
    assert len(found) == section.count("\n|") - 2  # all rows of the table
    return found


def test_edits_fit():
    for path, old, _ in edits():
        assert (ROOT / path).read_text().count(old) == 1, (path, old)


@pytest.mark.extensive
@pytest.mark.slow
def test_kernels_and_reference_agree_on_another_gate(tmp_path):
    tree = copy_of_sources(tmp_path / "tree")
    for path, old, new in edits():
        text = (tree / path).read_text()
        (tree / path).write_text(text.replace(old, new))
    lesson = "build/cpu/6_gating_fused"
    built = execute([*scons(), "-Q", "cuda=no", lesson], cwd=tree, timeout=600)
    assert built.rc == 0, built.stdout + built.stderr
    for shape in (["8"], ["1", "--channels", "72", "--hidden", "40"]):
        result = execute([tree / lesson, *shape])
        assert result.rc == 0 and "FAILED" not in result.stdout, result.stdout
