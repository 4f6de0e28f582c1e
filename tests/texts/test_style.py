"""The sources are formatted, the scripts are sound, and another compiler takes the code, too."""

import json
import re
import shutil
import sys

from conftest import ROOT, check_record, execute
import pytest

FORMATTER = 14  # major version of clang-format; another one formats a few things differently


def tracked(*patterns):
    result = execute(["git", "ls-files", *patterns], cwd=ROOT) if shutil.which("git") else None
    if not result or result.rc != 0:
        pytest.skip("not a git checkout")
    return result.stdout.splitlines()


def formatter():
    for name in (f"clang-format-{FORMATTER}", "clang-format"):
        if shutil.which(name):
            if re.search(rf"version {FORMATTER}\.", execute([name, "--version"]).stdout):
                return name
    pytest.skip(f"there is no clang-format {FORMATTER}")


def test_sources_are_formatted():
    files = tracked("*.cu", "*.cuh", "*.h", "*.cpp")
    result = execute([formatter(), "--dry-run", "-Werror", *files], cwd=ROOT)
    assert result.rc == 0, result.stderr


def test_shell_scripts():
    if not shutil.which("shellcheck"):
        pytest.skip("there is no shellcheck")
    result = execute(["shellcheck", "install.sh", ".ci/run"], cwd=ROOT)
    assert result.rc == 0, result.stdout


def scons():
    """The scons of this Python: the tests run in the Python of the scons that started them."""
    command = shutil.which("scons")
    if not command:
        pytest.skip("there is no scons")
    return [sys.executable, command]


def copy_of_sources(folder):
    """A place to build in that leaves the real one alone."""
    lessons = "[0-9]*_*[!u]"  # not their sources, *.cu
    left_out = shutil.ignore_patterns(".git", "build", "node_modules", ".sconsign.dblite", lessons)
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


@pytest.mark.extensive
def test_clang_builds_lessons(tmp_path):
    if not shutil.which("clang++"):
        pytest.skip("there is no clang++")
    tree = copy_of_sources(tmp_path / "tree")
    lessons = ["build/cpu/6_gating_fused"]
    built = execute([*scons(), "-Q", "cuda=no", "cxx=clang++", *lessons], cwd=tree, timeout=600)
    assert built.rc == 0, built.stderr
    for lesson in lessons:
        record = tree / "record.json"
        arguments = ["1", "--channels", "7", "--hidden", "3", "--device", "cpu", "--json", record]
        result = execute([tree / lesson, *arguments])
        assert result.rc == 0, result.stderr
        check_record(json.loads(record.read_text()))


@pytest.mark.extensive
def test_mistakes_that_no_longer_fit_fail_the_build(tmp_path):
    tree = copy_of_sources(tmp_path / "tree")
    lesson = tree / "1_matmul_basic.cu"
    text = lesson.read_text()
    lesson.write_text(text.replace("if (row >= n || col >= n) return;", "if (row >= n) return;"))
    mutant = "1_matmul_basic_reads_outside_of_matrices"
    target = f"build/cpu-address/gen/mutants/{mutant}.cu"
    built = execute([*scons(), "-Q", "sanitize=address", target], cwd=tree)
    assert built.rc != 0
    assert f"mutant {mutant}" in built.stderr


@pytest.mark.parametrize("argument", ["sanitize=memory", "sanitize=adress"])
def test_unknown_sanitizer(argument):
    result = execute([*scons(), "-Q", "-n", argument], cwd=ROOT)
    assert result.rc == 2
    assert f"{argument}: choose address or thread" in result.stderr


@pytest.mark.parametrize("argument", ["algebra=3", "algebra=1,0,0", "algebra=3,2,1", "algebra=3,0,0,0"])
def test_unknown_algebra(argument):
    result = execute([*scons(), "-Q", "-n", argument], cwd=ROOT)
    assert result.rc == 2
    assert f"{argument}: choose three numbers" in result.stderr


def test_algebra_is_a_flag_of_its_lesson_alone():
    command = [*scons(), "-Q", "-n", "verbose=1", "cuda=no", "algebra=2,1,0", "build/cpu/10_clifford_gp",
               "build/cpu/1_matmul_basic"]
    result = execute(command, cwd=ROOT)
    assert result.rc == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if "-DALGEBRA=2,1,0" in line)
    assert "-c" in line and "10_clifford_gp.cc" in line


def test_no_line_is_over_100_columns():
    """clang-format leaves comments as they are (ReflowComments)."""
    long = [
        f"{file}:{number}"
        for file in tracked("*.cu", "*.cuh", "*.h", "*.cpp")
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long


def test_editorconfig():
    """It agrees with .clang-format, and the files with it."""
    config = (ROOT / ".editorconfig").read_text()
    (limit,) = re.findall(r"^ColumnLimit: (\d+)$", (ROOT / ".clang-format").read_text(), re.MULTILINE)
    assert re.search(rf"^\[\*\.{{cu,cuh,h,cpp}}\]\nmax_line_length = {limit}$", config, re.MULTILINE)
    for file in tracked("*"):
        text = (ROOT / file).read_bytes()
        assert b"\r" not in text and b"\t" not in text, file
        assert not text or text.endswith(b"\n"), file
        assert file.endswith(".svg") or not re.search(rb"[ \t]+$", text, re.MULTILINE), file
