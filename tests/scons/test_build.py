"""What `scons` builds, and what it says: looked at without building, in a copy without a build."""

import json
import re
import shlex
import shutil
import sys

from conftest import LESSONS, OPERATORS, PROGRAMS, ROOT, SOLVED, execute, program
from mutants import INSTEAD
import pytest
from test_style import copy_of_sources, scons

LESSON = "6_gating_fused"


def stand_in(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def toolkit(home, release="13.0", knows="75 80 86 87 89 90 100 120", headers="include", libraries="lib64"):
    """A stand-in for a CUDA toolkit in `home`; its nvcc says where headers and libraries are, which
    are paths in `home` or elsewhere, or None."""
    codes = " ".join(f"sm_{number}" for number in knows.split())
    lines = ["#!/bin/sh", "case $1 in", f"  --list-gpu-code) echo {codes};;", "  --dryrun)"]
    for name, flag, folder in (("INCLUDES", "-I", headers), ("LIBRARIES", "-L", libraries)):
        if folder:
            (home / folder).mkdir(parents=True, exist_ok=True)
            lines.append("    echo " + shlex.quote(f'#$ {name}="{flag}{home / folder}"') + " >&2")
    if libraries:
        (home / libraries / "libcublas.so").touch()
    lines += ["    ;;", f"  *) echo Cuda compilation tools, release {release}, V{release}.1;;", "esac"]
    stand_in(home / "bin", "nvcc", "\n".join(lines) + "\n")
    return home


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_of_sources(tmp_path_factory.mktemp("build") / "tree")


@pytest.fixture
def dry_run(tree, tmp_path):
    """dry_run(*arguments, gpus, cuda_home): how `scons -n` ended there, where nvcc is no other than what
    the arguments and CUDA_HOME name, if this machine has none in /usr/local."""

    def run(*arguments, gpus="", cuda_home=""):
        stand_in(tmp_path / "path", "nvidia-smi", f"#!/bin/sh\nprintf '{gpus}'\n")
        environment = {"PATH": f"{tmp_path / 'path'}:/usr/bin:/bin", "CUDA_HOME": str(cuda_home)}
        return execute([*scons(), "-n", "-Q", *arguments], cwd=tree, env=environment)

    return run


PLANS = {}  # of what several tests ask for


@pytest.fixture
def plan(dry_run, tmp_path):
    """plan(*arguments, gpus): the lines of a dry run where there is nvcc, and GPUs of these kinds."""
    home = toolkit(tmp_path / "cuda")

    def run(*arguments, gpus=""):
        if (arguments, gpus) not in PLANS:
            cuda = [] if any(argument.startswith("cuda=") for argument in arguments) else [f"cuda={home}"]
            result = dry_run(*arguments, *cuda, gpus=gpus)
            assert result.rc == 0, result.stdout + result.stderr
            PLANS[arguments, gpus] = result.stdout.splitlines()
        return PLANS[arguments, gpus]

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


def test_benchmarks_of_operators_are_built_when_asked_for(plan):
    lines = plan("cuda=no", "operators")
    assert built(lines, "INSTALL") == set(OPERATORS)
    assert built(lines, "LINK") == {f"build/cpu/{name}" for name in OPERATORS}
    assert {f"build/cpu/{name}" for name in OPERATORS} <= built(plan("cuda=no", "test-library"), "LINK")
    assert not set(OPERATORS) & built(plan("test", "cuda=no"), "INSTALL")


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
    """`scons test` builds nothing with a sanitizer, `scons test-all` every lesson, or what is one if it makes no
    mistake."""
    quick, everything = (built(plan(target, "cuda=no"), "LINK") for target in ("test", "test-all"))
    assert not any(name.startswith("build/cpu-") for name in quick)
    assert quick < everything
    for sanitizer in ("address", "thread"):
        instead = INSTEAD if sanitizer == "thread" else {}
        programs = {f"mutants/{instead[name]}" if name in instead else name for name in [*PROGRAMS, *OPERATORS]}
        assert {f"build/cpu-{sanitizer}/{program}" for program in programs} <= everything
    assert any("/mutants/" in name for name in everything) and not any("/mutants/" in n for n in quick)


# ---- What is refused, and what is said -----------------------------------------------------------


@pytest.mark.parametrize("argument", ["foo=bar", "Cuda=no", "verbose=yes", "debug=2", "arch=61", "arch=h100", "arch=",
                                      "cxx=no-such-compiler", "cuda=/does/not/exist", "cuda="])
def test_what_scons_does_not_know_is_refused(dry_run, argument):
    result = dry_run(argument, LESSON)
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{argument}: ") and result.stderr.count("\n") == 1


def test_scons_knows_what_it_reads_and_explains():
    text = (ROOT / "SConstruct").read_text()
    known = set(re.findall(r'"(\w+)"', re.search(r"^KNOWN = (.*)$", text, re.MULTILINE)[1]))
    assert known == set(re.findall(r'ARGUMENTS(?:\.get\(|\[)"(\w+)"', text))
    explained = set(re.findall(r"(?<!-)\b(\w+)=", text[text.index('Help("""'):text.index("def advise")]))
    assert explained == known


@pytest.mark.parametrize("release, taken", [("11.8", False), ("12.4", False), ("12.5", True), ("13.0", True)])
def test_the_toolkit_that_is_named_is_taken_or_refused(dry_run, tmp_path, release, taken):
    home = toolkit(tmp_path / "named", release)
    result = dry_run(f"cuda={home}", "arch=90a", "verbose=1", LESSON)
    if taken:
        assert result.rc == 0 and f"] {home}/bin/nvcc -o " in result.stdout
    else:
        assert (result.rc, result.stdout) == (2, "")
        assert result.stderr == (f"cuda={home}: {home}/bin/nvcc is CUDA {release}; "
                                 "the lessons need 12.5 or newer\n")


def test_a_toolkit_that_is_too_old_leaves_the_cpu_programs(dry_run, tmp_path):
    result = dry_run("arch=90a", LESSON, cuda_home=toolkit(tmp_path / "old", "12.4"))
    assert result.rc == 0 and f"build/cpu/{LESSON}" in built(result.stdout.splitlines(), "LINK")
    if not shutil.which("/usr/local/cuda/bin/nvcc"):  # which is taken where there is one
        assert result.stdout.splitlines()[-1] == (f"Built for the CPU: {tmp_path}/old/bin/nvcc is CUDA 12.4; "
                                                  "the lessons need 12.5 or newer")


@pytest.mark.parametrize("gpus, compiled, said", [
    ("6.1\\n", None, "Built for the CPU: the lessons need compute capability 7.5, not 6.1"),
    ("12.1\\n", None, "CUDA 13.0, knows no compute capability 12.1"),
    ("6.1\\n9.0\\n", "90a", "Not built for one of the GPUs: the lessons need compute capability 7.5, not 6.1"),
    ("[N/A]\\n", None, "Built for the CPU: there is no GPU here."),
    ("No devices were found\\n", None, "Built for the CPU: there is no GPU here."),
])
def test_a_gpu_that_nvcc_does_not_know_leaves_the_cpu_programs(plan, gpus, compiled, said):
    lines = plan(LESSON, gpus=gpus)
    assert any(said in line for line in lines)
    assert built(lines, "LINK") == {f"build/{kind}/{LESSON}" for kind in ("cpu", *["cuda"] * bool(compiled))}
    assert not compiled or f"{LESSON}.cu" in built(lines, f"NVCC {compiled}")


def test_an_architecture_that_nvcc_does_not_know_is_refused(dry_run, tmp_path):
    result = dry_run(f"cuda={toolkit(tmp_path / 'cuda')}", "arch=80,75,130")
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr == (f"arch=130: {tmp_path}/cuda/bin/nvcc, CUDA 13.0, "
                             "knows no compute capability 13.0\n")


def test_a_distribution_s_toolkit(dry_run, tmp_path):
    """Its headers are among the compiler's own, where -isystem would change their order; its libraries may
    be in the folder of one architecture."""
    home = toolkit(tmp_path / "usr", headers=None, libraries="lib/x86_64-linux-gnu")
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("--dryrun)", "--dryrun)\n    echo '#$ INCLUDES=\"-I/usr/include\"'"))
    (home / "lib64").mkdir()
    result = dry_run(f"cuda={home}", "arch=90a", "verbose=1", LESSON)
    assert result.rc == 0 and "isystem" not in result.stdout
    assert f"-L{home}/lib/x86_64-linux-gnu -Xlinker -rpath -Xlinker {home}/lib/x86_64" in result.stdout


def test_a_toolkit_without_libraries(dry_run, tmp_path):
    home = toolkit(tmp_path / "bare", libraries=None)
    why = f"beside {home}/bin/nvcc there is no libcublas.so, which the CUDA toolkit has"
    result = dry_run("arch=90a", f"cuda={home}", LESSON)
    assert (result.rc, result.stdout, result.stderr) == (2, "", f"cuda={home}: {why}\n")
    result = dry_run("arch=90a", LESSON, cuda_home=home)
    assert result.rc == 0 and result.stdout.splitlines()[-1] == f"Built for the CPU: {why}"


# ---- Folders of any name --------------------------------------------------------------------------


# A folder's name, each word of which means something to a shell.
ODD_NAME = """O'Brien R&D "own" $HOME `touch f`; touch g"""


def test_a_program_in_a_folder_of_any_name(tmp_path):
    """It asks addr2line for its lines, by a shell."""
    name = ODD_NAME
    lesson = program("1_matmul_basic")
    (tmp_path / name).mkdir()
    copied = shutil.copy(lesson, tmp_path / name)
    here, there = (execute([path, "64", "--device", "cpu", "--explain"], cwd=tmp_path) for path in (copied, lesson))
    assert (here.rc, here.stdout, here.stderr) == (0, there.stdout, "")
    assert "1_matmul_basic.cu:" in here.stdout or not shutil.which("addr2line")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.fixture(scope="module")
def odd_tree(tmp_path_factory):
    return copy_of_sources(tmp_path_factory.mktemp("odd") / ODD_NAME)


def test_a_folder_of_any_name_builds(odd_tree):
    """A program whose flags have the folder's name is compiled; those of a toolkit in there are shown."""
    command = [*scons(), "-Q", "cuda=no"]
    target = "build/cpu/obj/1_matmul_basic.o"
    result = execute([*command, target, "compile_commands.json"], cwd=odd_tree)
    assert result.rc == 0, result.stdout + result.stderr
    assert (odd_tree / target).exists() and not list(odd_tree.rglob("[fg]"))
    entries = json.loads((odd_tree / "compile_commands.json").read_text())
    (entry,) = (each for each in entries if each["file"] == "1_matmul_basic.cu")
    assert entry["directory"] == str(odd_tree)
    assert execute([*entry["arguments"], "-fsyntax-only"], cwd=entry["directory"]).rc == 0


def test_a_toolkit_in_a_folder_of_any_name(odd_tree):
    home = toolkit(odd_tree / "cuda")
    result = execute([*scons(), "-Q", "-n", "verbose=1", "arch=90a", f"cuda={home}", LESSON], cwd=odd_tree)
    assert result.rc == 0, result.stderr
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    (linked,) = (line for line in lines if f"-o build/cuda/{LESSON} " in line)
    assert str(home / "lib64") in linked
    result = execute([*scons(), "-Q", "arch=90a", f"cuda={home}", f"build/cuda/obj/{LESSON}.o"], cwd=odd_tree)
    assert result.rc == 0, result.stdout + result.stderr  # this nvcc does nothing but to say its release


def test_no_word_goes_through_a_shell(tree):
    word = "x;touch f; ' $(touch f)"
    result = execute([*scons(), "-Q", "diff", "1_matmul_basic", word], cwd=tree)
    assert result.rc == 2 and f"1_matmul_basic has no kernel {word}: " in result.stderr
    result = execute([*scons(), "-Q", "marked=x;touch f", "cuda=no", "-n", "test-all"], cwd=tree)
    assert result.rc == 0 and "-m 'x;touch f'" in result.stdout
    assert not list(tree.rglob("f"))


# ---- The commit -----------------------------------------------------------------------------------


def test_a_tree_inside_of_another_repository_has_no_commit(tmp_path):
    if not shutil.which("git"):
        pytest.skip("there is no git")
    script = ("import sys; sys.path.insert(0, 'results'); from commit import commit_of; "
              "print(commit_of('*.cu', 'cpu'))")
    tree = tmp_path / "outer" / "tree"
    for folder in ("results", "cpu"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(ROOT / "results" / "commit.py", tree / "results")

    def commit():
        result = execute([sys.executable, "-c", script], cwd=tree)
        assert result.rc == 0, result.stderr
        return result.stdout.strip()

    def git(folder, *words):
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        result = execute(["git", *identity, *words], cwd=folder)
        assert result.rc == 0, result.stderr
        return result.stdout.strip()

    assert commit() == "unknown" or (tmp_path / ".git").exists()
    git(tmp_path / "outer", "init", "-q")
    git(tmp_path / "outer", "commit", "-q", "--allow-empty", "-m", "another project")
    assert commit() == "unknown"
    git(tree, "init", "-q")
    assert commit() == "unknown"  # there is none yet
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "this one")
    assert commit() == git(tree, "rev-parse", "HEAD")
    (tree / "cpu" / "new.cpp").touch()
    assert commit() == git(tree, "rev-parse", "HEAD") + "-dirty"
    assert "commit_of(" in (ROOT / "SConstruct").read_text()
