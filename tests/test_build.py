"""What `scons` builds, and what it says: looked at without building, in a copy without a build."""

import re

from conftest import LESSONS, PROGRAMS, SOLVED, execute
import hopper_mutants
import pytest
from test_style import copy_of_sources, scons

NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.1"\n'
LESSON = "6_gating_fused"


def stand_in(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_of_sources(tmp_path_factory.mktemp("build") / "tree")


@pytest.fixture
def plan(tree, tmp_path):
    """plan(*arguments, gpus): the lines of a dry run where there is nvcc, and GPUs of these kinds."""
    stand_in(tmp_path / "cuda" / "bin", "nvcc", NVCC)
    (tmp_path / "cuda" / "lib64").mkdir()

    def run(*arguments, gpus=""):
        stand_in(tmp_path / "path", "nvidia-smi", f"#!/bin/sh\nprintf '{gpus}'\n")
        path = f"{tmp_path / 'path'}:/usr/bin:/bin"
        command = [*scons(), "-n", "-Q", *arguments]
        if not any(argument.startswith("cuda=") for argument in arguments):
            command.append(f"cuda={tmp_path / 'cuda'}")
        result = execute(command, cwd=tree, env={"PATH": path})
        assert result.rc == 0, result.stdout + result.stderr
        return result.stdout.splitlines()

    return run


def built(lines, what):
    """What lines such as "[ 3/64] CXX common/device.cpp" name."""
    return {name for line in lines if (name := re.sub(rf"^\[ *\d+/\d+\] {what} ", "", line)) != line}


def test_without_a_gpu_the_cpu_programs_are_built(plan):
    lines = plan()
    assert not built(lines, "NVCC .*?")
    assert built(lines, "INSTALL") == set(PROGRAMS)
    assert built(lines, "LINK") == {f"build/cpu/{program}" for program in PROGRAMS}
    assert re.match("Built for the CPU: there is no GPU here.* scons arch=90a", lines[-1])


def test_with_a_gpu_both_are_built(plan):
    lines = plan(gpus="9.0\\n8.6\\n9.0\\n")
    compiled = built(lines, "NVCC 86,90a")
    assert {f"{lesson}.cu" for lesson in LESSONS} <= compiled
    assert {f"exercises/{program}.cu" for program in SOLVED} <= compiled
    assert built(lines, "LINK") == {
        f"build/{backend}/{program}" for program in PROGRAMS for backend in ("cpu", "cuda")
    }
    assert not any("Built for the CPU" in line for line in lines)


def test_a_gpu_without_the_toolkit(plan):
    lines = plan("cuda=no", gpus="9.0\\n")
    assert not built(lines, "NVCC .*?") and built(lines, "INSTALL") == set(PROGRAMS)


@pytest.mark.parametrize("arch, shown, flags", [
    ("90a", "90a", ["arch=compute_90a,code=sm_90a"]),
    ("90,80", "90a,80", ["arch=compute_90a,code=sm_90a", "arch=compute_80,code=sm_80"]),
    ("all", "75,80,90a,90ptx", ["arch=compute_75,code=sm_75", "arch=compute_80,code=sm_80",
                                "arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]),
])
def test_architectures(plan, arch, shown, flags):
    lines = plan(f"arch={arch}", LESSON)
    assert f"{LESSON}.cu" in built(lines, f"NVCC {shown}")
    commands = [line for line in plan(f"arch={arch}", LESSON, "verbose=1") if "nvcc" in line]
    assert commands
    for command in commands:
        assert re.findall("-gencode=(.*?) ", command) == flags


def test_one_lesson_comes_with_its_cpu_twin(plan):
    lines = plan("arch=90a", LESSON)
    assert built(lines, "LINK") == {f"build/cpu/{LESSON}", f"build/cuda/{LESSON}"}
    assert built(lines, "INSTALL") == {LESSON}


@pytest.mark.parametrize("arguments", [(), ("arch=90a",), ("sanitize=thread",)])
def test_lines_are_short_and_count(plan, arguments):
    lines = [line for line in plan(*arguments) if not line.startswith("Built for")]
    counts = []
    for line in lines:
        assert len(line) <= 100
        counts.append(tuple(map(int, re.match(r"\[ *(\d+)/(\d+)\] [A-Z0-9]+ ", line).groups())))
    assert [count for count, _ in counts] == sorted(count for count, _ in counts)
    assert len({total for _, total in counts}) == 1
    assert 0 < counts[0][0] and counts[-1][0] == counts[-1][1]


def test_tests_without_sanitized_lessons(plan):
    """`scons test` builds one program for each of two sanitizers, `scons test-all` every lesson, or what
    is one if it makes no mistake."""
    quick, everything = (built(plan(target, "cuda=no"), "LINK") for target in ("test", "test-all"))
    sanitized = {name for name in quick if name.startswith("build/cpu-")}
    assert sanitized == {"build/cpu-thread/tests/cpu_backend/race_missing_barrier",
                         "build/cpu-address/tests/cpu_backend/oob_dynamic_shared"}
    assert quick < everything
    for sanitizer in ("address", "thread"):
        mistakes = hopper_mutants.LESSONS if sanitizer == "thread" else ()
        programs = {f"mutants/{hopper_mutants.name_of(name)}" if name in mistakes else name
                    for name in PROGRAMS}
        assert {f"build/cpu-{sanitizer}/{program}" for program in programs} <= everything
    assert any("/mutants/" in name for name in everything) and not any("/mutants/" in n for n in quick)
