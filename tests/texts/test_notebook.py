"""notebooks/lessons.ipynb is a notebook, and its cells do what they say: on the CPU build, at N = 1."""

import contextlib
import io
import json
import re
import sys
import types

from conftest import LESSONS, ROOT, program
import jsonschema
import pytest

NOTEBOOK = json.loads((ROOT / "notebooks" / "lessons.ipynb").read_text())
SOURCES = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"]}
CODE = {
    cell["id"]: SOURCES[cell["id"]] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"
}

# Of Jupyter's format 4.5, what this notebook uses of it; and nothing that a run leaves behind.
CELL = {"cell_type": {"const": "markdown"}}
CODE_CELL = {
    "cell_type": {"const": "code"}, "execution_count": {"type": "null"}, "outputs": {"maxItems": 0}
}
COMMON = {
    "id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
    "metadata": {"type": "object"},
    "source": {"type": "array", "items": {"type": "string"}},
}


def closed(properties):
    return {"properties": properties, "required": sorted(properties), "additionalProperties": False}


SCHEMA = {
    "type": "object",
    **closed({
        "nbformat": {"const": 4},
        "nbformat_minor": {"const": 5},
        "metadata": {"type": "object", "required": ["kernelspec", "language_info"]},
        "cells": {"items": {"oneOf": [closed({**CELL, **COMMON}), closed({**CODE_CELL, **COMMON})]}},
    }),
}


def without_hopper(record):
    """The record of a GPU that lacks its kernels."""
    for problem in record["problems"]:
        names = (r"one warpgroup|warp specialization|tile scheduler|clusters|rasterization|ping-pong|overlap|rare|one launch|"
                 r"streamed")
        problem["kernels"] = [k for k in problem["kernels"] if not re.search(names, k["name"])]
    return record


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The notebook's names once all cells have run, but for those that build and draw; and what the
    cells printed."""
    for lesson in LESSONS:
        program(lesson)
    # A place of its own that looks like a clone, in which the lessons are those of the CPU build.
    root = tmp_path_factory.mktemp("notebook")
    (root / "SConstruct").touch()
    (root / "build").mkdir()
    (root / "build" / "cpu").symlink_to(program(LESSONS[0]).parent)
    (root / "results").symlink_to(ROOT / "results")
    (root / "lessons").symlink_to(root)
    (root / "exercise").symlink_to(ROOT / "exercise")
    for lesson in LESSONS:
        (root / lesson).symlink_to(program(lesson))
    names, printed = {}, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(root)
        patch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "argv", ["notebook"])
        for name, source in CODE.items():
            if name in ("build", "own-program", "plot"):  # the second one is test_try.py's
                continue
            if name.startswith("run-"):
                # A lesson at N = 1, in little time.
                source = re.sub(r"in \(.*?\):", "in (1,):", source)
                source = re.sub(r'(lesson\("\w+"), (?:\d+|n)', r'\1, 1, "--samples", 1', source)
            exec(compile(source, name, "exec"), names)
            if name == "lesson":
                names["capability"] = None  # on a machine with a GPU, too
        yield names, printed


def test_format():
    jsonschema.validate(NOTEBOOK, SCHEMA, cls=jsonschema.Draft7Validator)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)


def test_every_lesson_is_run():
    names = re.findall(r'lesson\("(\w+)"', "".join(CODE.values()))
    assert names == sorted(
        LESSONS, key=lambda name: (name.startswith("bonus"), int(re.sub(r"\D.*", "", name) or 0))
    )


def test_first_code_cell_says_where_to_clone_from():
    first = next(iter(CODE.values()))
    assert re.search(r'^REPOSITORY = "https://', first, re.MULTILINE)
    assert "REPOSITORY" in CODE["clone"]


def test_builds_by_the_command_of_the_readme():
    (command,) = re.findall(r'sh\("(.*?)"\)', CODE["build"])
    assert f"    {command} " in (ROOT / "README.md").read_text()


def test_cells_run(notebook):
    names, printed = notebook
    assert printed.getvalue().count(" kernels verified against fp64.") >= len(LESSONS)
    assert "did not succeed" not in printed.getvalue()
    assert list(names["measured"].iterdir()) == []  # there are no times to record on a CPU


def test_exercises_are_listed(notebook):
    _, printed = notebook
    assert "Next: ./exercise" in printed.getvalue() or "21 of 21 are solved" in printed.getvalue()


def test_lesson_that_fails_is_told(notebook, capsys):
    names, _ = notebook
    names["lesson"]("1_matmul_basic", "none")
    assert "1_matmul_basic did not succeed" in capsys.readouterr().out


def test_lesson_on_a_gpu_that_cannot_run_it(notebook, monkeypatch, capsys):
    names, _ = notebook
    monkeypatch.setitem(names, "capability", 7.5)
    small = ("--eigen", 16, "--width", 16, "--samples", 1, "--device", "cpu")
    names["lesson"]("7_diffusion_fused", 131072, *small, least=8.0)
    printed = capsys.readouterr().out
    assert "7_diffusion_fused needs compute capability 8.0" in printed
    assert "verified against fp64" in printed and "did not succeed" not in printed


def test_plots_of_an_older_gpu(notebook, monkeypatch):
    names, _ = notebook
    shown = []
    display = types.ModuleType("IPython.display")
    display.SVG, display.display = str, shown.append
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(names, "capability", 7.5)
    for path in (ROOT / "results" / "h200").glob("[1-4]_matmul_*.json"):
        record = without_hopper(json.loads(path.read_text()))
        n = record["problems"][0]["dims"]["N"]
        (names["measured"] / f"{record['lesson']}.{n}.json").write_text(json.dumps(record))
    exec(compile(CODE["plot"], "plot", "exec"), names)
    assert str(names["measured"] / "3_matmul_tensorcore.svg") in shown
    monkeypatch.delitem(sys.modules, "plot")
