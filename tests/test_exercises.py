"""The exercises (exercises/exercises.py): made from the lessons, and what `./exercise` says of them.

A skeleton must be found wrong in the way that its exercise means, and the lesson, which is the
solution, must be found right. To compile a lesson takes long, so the skeletons of all exercises of a
lesson that are in different kernels are in one program.
"""

import importlib.util
import json
import os
import re
import shutil
import sys

from conftest import CPU_BUILD, ROOT, execute, program
import hopper_mutants
import mutants
import pytest
from test_style import copy_of_sources, formatter, scons

sys.path.append(str(ROOT / "cpu"))
from cu2cpp import TranslationError, translate, with_headers


def load(name):
    """A module of exercises/, under its own name, as check.py imports it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "exercises" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exercises = load("exercises")
check = load("check")
EXERCISES = exercises.EXERCISES
MISTAKES = [each for each in EXERCISES if each.is_mistake]
PROGRAMS = {each.name: name for name, group in exercises.test_programs().items() for each in group}
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


def lesson_of(exercise):
    return exercise.whole()


# ---- The table, the pages, the sources -----------------------------------------------------------


def test_about_fifteen_and_five():
    assert len(EXERCISES) - len(MISTAKES) >= 15 and len(MISTAKES) >= 5
    assert len({each.name for each in EXERCISES}) == len(EXERCISES)
    for each in EXERCISES:  # a name is no beginning of another one
        assert exercises.find(each.name) == [each] == exercises.find(str(each.number))
    assert exercises.find("0") == exercises.find("99") == exercises.find("none") == []


def test_they_stand_in_the_order_of_the_talk():
    for group in (EXERCISES[: -len(MISTAKES)], MISTAKES):
        assert [each.is_mistake for each in group] == [group is MISTAKES] * len(group)
    lessons = [int(each.lesson.split("_")[0]) for each in EXERCISES[: -len(MISTAKES)]]
    assert lessons == sorted(lessons)


@each_exercise
def test_skeleton_with_its_pieces_is_the_lesson(exercise):
    text = lesson_of(exercise)
    skeleton, pieces = exercise.skeleton(text)
    assert skeleton != text
    for (start, _, new), piece in zip(exercise.places(text), pieces, strict=True):
        assert skeleton[start : start + len(new)] == new  # what is before it has been put back
        skeleton = skeleton[:start] + piece + skeleton[start + len(new) :]
    assert skeleton == text


@each_exercise
def test_page(exercise):
    page = exercise.page.read_text()
    assert page.startswith(f"# {exercise.number}. ")
    assert f"\n    ./exercise {exercise.name}\n" in page
    assert f"`{exercises.source_of(exercise.lesson)}`, the row *{exercise.kernel}*" in page
    assert page.count("<details><summary>Hint</summary>") == 1 == page.count("</details>")
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        path, _, anchor = target.partition("#")
        path = exercise.page.parent / path
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, target
    assert max(len(line) for line in page.splitlines()) <= 120


def test_no_page_without_an_exercise():
    pages = set((ROOT / "exercises").glob("*.md"))
    assert pages == {each.page for each in EXERCISES}


def test_readme_leads_to_every_exercise():
    """Each section to those of its lesson, and docs/exercises.md to all."""
    readme = (ROOT / "README.md").read_text()
    overview = (ROOT / "docs" / "exercises.md").read_text()
    for each in EXERCISES:
        page = each.page.relative_to(ROOT).as_posix()
        assert f"](../{page})" in overview, page
        if not each.is_mistake:
            (section,) = (text for text in readme.split("\n## ") if f"\n    ./{each.lesson}" in text)
            assert f"]({page})" in section, page


@each_exercise
def test_reader_sees_what_to_do(exercise):
    source = exercise.source()
    assert max(len(line) for line in source.splitlines()) <= 100
    assert ("// TODO" in source) == (not exercise.is_mistake)
    assert "// TODO" not in lesson_of(exercise)


def test_skeletons_are_formatted(tmp_path):
    shutil.copy(ROOT / ".clang-format", tmp_path)
    for each in EXERCISES:
        (tmp_path / f"{each.name}.cu").write_text(each.source())
    result = execute([formatter(), "--dry-run", "-Werror", *sorted(tmp_path.glob("*.cu"))])
    assert result.rc == 0, result.stderr


@pytest.mark.parametrize("change", [
    {"function": "no such function("}, {"first": "no such line"}, {"nth": 9}, {"last": "no such end"},
])
def test_piece_that_is_not_there_is_an_error(change):
    text = lesson_of(EXERCISES[0])
    cut = {"function": "void matmul_coalesced(", "first": "const int row", "last": "const int col",
           "new": "", **change}
    with pytest.raises(ValueError, match="^exercise x: "):
        exercises.Cut(**cut).where(text, "x")


def test_header_that_another_would_bring_again_is_an_error():
    with pytest.raises(TranslationError, match="^operators/softmax/plans.cuh includes operators/softmax/rows.cuh again"):
        with_headers((ROOT / "9_matmul_softmax.cu").read_text(), "operators/softmax/rows.cuh")


@pytest.mark.parametrize("exercise", [each for each in MISTAKES if each.mutant[0]],
                         ids=lambda exercise: exercise.name)
def test_mistake_is_one_that_is_known_to_be_found(exercise):
    text = lesson_of(exercise)
    ((start, end, new),) = exercise.places(text)
    if len(exercise.mutant) == 1:
        (mutant,) = (each for each in mutants.MUTANTS if each.name == exercise.mutant[0])
        at = mutant.where(text)
        replacement = "" if mutant.new == ";" else mutant.new
        mended = text[:at] + replacement + text[at + len(mutant.old) :]
        assert mended[start:].split() == exercise.source()[start:].split() and start <= at < end
    else:
        mistake = hopper_mistake(exercise)
        assert hopper_mutants.harmless(exercise.lesson, mistake) is None
        assert text.count("\n", 0, start) + 1 == mistake.line


def hopper_mistake(exercise):
    function, change = exercise.mutant
    (mistake,) = (each for each in hopper_mutants.mistakes(exercise.lesson)
                  if each.function == function and f"{each.call} {each.change}" == change)
    return mistake


def test_goal():
    goal = exercises.Goal("sectors", "loads", 4.1, "sectors a load", "4 are possible")
    assert goal.missed(None) is goal.missed({}) is goal.missed({"loads": 3}) is None
    assert goal.missed({"sectors": 41, "loads": 10}) is None
    assert goal.missed({"sectors": 320, "loads": 10}) == "sectors a load: 32, where 4 are possible"


WITH_GOAL = [each for each in EXERCISES if each.goal]


@pytest.mark.parametrize("exercise", WITH_GOAL, ids=lambda exercise: exercise.name)
def test_solution_reaches_the_goal(exercise, tmp_path):
    record = tmp_path / "record.json"
    assert check.run(exercise, program(exercise.lesson), record=record).kind == "right"
    ((counts,),) = [[kernel["counts"] for kernel in problem["kernels"]]
                    for problem in json.loads(record.read_text())["problems"] if problem["kernels"]]
    if counts is None:
        pytest.skip("this compiler does not count")
    assert counts[exercise.goal.per] > 0
    assert check.missed_goal(exercise, record) is None


def test_uncoalesced_kernel_misses_the_goal(tmp_path):
    """With the kernel that lesson 1 begins with in the place of a reader's."""
    (exercise,) = exercises.find("coalesce")
    record = tmp_path / "record.json"
    result = execute([program(exercise.lesson), *exercise.arguments, "--kernel", "^uncoalesced$",
                      "--device", "cpu", "--count", "--json", record])
    assert result.rc == 0
    if '"counts": null' in record.read_text():
        pytest.skip("this compiler does not count")
    text = record.read_text().replace(f"{exercise.lesson}.cu", f"exercises/my/{exercise.name}.cu")
    record.write_text(text)
    said = check.missed_goal(exercise, record, lesson_of(exercise).splitlines())
    assert re.match(r"Right, but sectors for each load of a warp: 16\.5, where 2\.5 .*\n    a load in line \d+: sum \+= A\[", said)


# ---- What is said of a run -----------------------------------------------------------------------


def look(path, *arguments, env=None, lines=(), columns=0):
    result = execute([path, *arguments], env={**check.OPTIONS, **(env or {})})
    return check.look_at(result.rc, result.stdout, result.stderr, lines, columns)


@pytest.mark.parametrize("bug, columns, text", [
    ("none", 0, "^$"),
    ("one_wrong_element", 33, r"^Wrong from element 1088 \(row 32, column 32\) on: it is \S+,"
                              r" where \S+ is expected\. 1 of 1089 elements is wrong\.$"),
    ("last_row_not_written", 33, r"element 1056 \(row 32, column 0\) on: it is NaN, .* 33 of 1089 "),
    ("infinite_element", 0, "^Wrong from element 539 on: it is inf, .* 1 of 1089 elements is wrong"),
])
def test_wrong_elements_are_counted(bug, columns, text):
    found = look(program("tests/broken_kernels"), 33, "--kernel", f"^{bug}$", "--samples", 1,
                 "--explain", columns=columns)
    assert found.kind == ("right" if bug == "none" else "wrong")
    assert re.search(text, found.text), found


def test_little_errors_are_told(tmp_path):
    found = look(program("tests/broken_kernels"), 64, "--kernel", "^half_precision_sum$", "--samples", 1,
                 "--explain")
    assert found.kind == "wrong" and re.search(r"^(It is a little wrong|Wrong from element)", found.text)


def test_race_names_two_lines():
    path = program("tests/cpu_backend/race_missing_barrier").parents[3] / "cpu-thread"
    path = path / "tests" / "cpu_backend" / "race_missing_barrier"
    if not path.exists():
        pytest.skip("no build with sanitize=thread")
    lines = (ROOT / "tests" / "cpu_backend" / "race_missing_barrier.cu").read_text().splitlines()
    result = execute([path], env=check.OPTIONS)
    if "unexpected memory mapping" in result.stderr:
        result = execute(["setarch", "-R", path], env=check.OPTIONS)
    found = check.look_at(result.rc, result.stdout, result.stderr, lines)
    assert found.kind == "race"
    for when in ("here first", "then, by another thread,"):
        assert re.search(rf"^    {when} a (?:read|write) in line \d+: \S", found.text, re.MULTILINE)


def test_out_of_bounds_counts_elements():
    path = CPU_BUILD.parent / "cpu-address" / "tests" / "cpu_backend" / "oob_dynamic_shared"
    if not path.exists():
        pytest.skip("no build with sanitize=address")
    lines = (ROOT / "tests" / "cpu_backend" / "oob_dynamic_shared.cu").read_text().splitlines()
    found = look(path, lines=lines)
    assert found.kind == "bounds"
    assert re.search(r"it (reads|writes) \d+ elements? behind the end of \d+ bytes .* in line \d+: \S",
                     found.text)


REPORTS = {
    "waits": "cuda_cpu: kernel launched at x.cu:9, block (0,0,0): deadlock: thread (256,0,0) waits in"
             " barrier_wait() at exercises/my/x.cu:2 (f<4>) for phase 2 of the barrier of"
             " exercises/my/x.cu:1: 1 of 1 arrivals and 0 bytes are missing, like 127 more\n",
    "error": "cuda_cpu: kernel launched at x.cu:9, block (0,0,0): thread (0,0,0): tensor_load() at"
             " exercises/my/x.cu:2 (f): the box is not aligned\n",
}
WORDS = {
    "waits": "A deadlock: threads wait for something that nobody will do.\n    thread (256,0,0) waits in"
             " barrier_wait() in line 2 for phase 2 of the barrier of line 1: 1 of 1 arrivals and 0 bytes"
             " are missing (so do 127 more threads)\n        2: two\n        1: one",
    "error": "A GPU does not define what happens here: thread (0,0,0): tensor_load() in line 2: the box"
             " is not aligned\n        2: two",
}


@pytest.mark.parametrize("kind", REPORTS)
def test_report_of_the_backend_is_put_into_words(kind):
    assert check.look_at(1, "", REPORTS[kind], ["one", "two"]) == check.Finding(kind, WORDS[kind])


@pytest.mark.parametrize("rc, stderr, kind", [
    (None, "", "endless"), (-11, "", "crash"), (3, "error: no memory\n", "error"), (0, "", "right"),
])
def test_other_ends(rc, stderr, kind):
    found = check.look_at(rc, "", stderr)
    assert found.kind == kind and ("no memory" in found.text) == (rc == 3)


@pytest.mark.parametrize("output, text", [
    ("exercises/my/x.cu:2:5: error: 'a' was not declared\n", "'a' was not declared\n    line 2: two"),
    ("exercises/my/x.cu:2: <<< without >>>( in the same statement\n",
     "<<< without >>>( in the same statement\n    line 2: two"),
    ("In file included from exercises/my/x.cu:1:\ncommon/y.h:7:1: error: no\n",
     "no\n    in common/y.h, line 7, used in line 1: one"),
])
def test_compiler_error(output, text):
    assert check.compiler_error(output, "exercises/my/x.cu", ["one", "two"]) == f"It does not compile: {text}"


# ---- The program ---------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path, monkeypatch, capsys):
    """reader(*arguments, finding): what `./exercise` prints and returns, with a folder of its own, and
    with a check that finds just this."""
    (tmp_path / "exercises").mkdir()
    monkeypatch.setattr(exercises, "FOLDER", tmp_path / "exercises")
    monkeypatch.setattr(check, "PROGRESS", tmp_path / "exercises" / "my" / "progress.json")
    monkeypatch.setattr(check, "ROOT", tmp_path)

    def run(*arguments, finding="wrong"):
        monkeypatch.setattr(check, "check", lambda exercise: check.Finding(finding, "It is so."))
        monkeypatch.setattr(sys, "argv", ["exercise", *arguments])
        rc = check.main("Exercises.")
        return rc, capsys.readouterr()

    return run


def test_progress(reader, tmp_path):
    assert reader()[1].out.count("not started") == len(EXERCISES)
    rc, said = reader("coal")
    file = tmp_path / "exercises" / "my" / "coalesce.cu"
    (line,) = [str(number) for number, text in enumerate(file.read_text().splitlines(), 1) if "TODO" in text]
    assert rc == 1 and f"exercises/my/coalesce.cu, line {line}\n" in said.out
    assert "It is so." in said.out and "as it was given to you" in said.out
    assert re.search(r" 1  coalesce +not right yet ", reader()[1].out)
    file.write_text("mine")
    rc, said = reader("1", finding="right")
    assert rc == 0 and "Right." in said.out and "Next: ./exercise barriers" in said.out
    assert file.read_text() == "mine"
    said = reader()[1].out
    assert re.search(r" 1  coalesce +solved ", said) and f"1 of {len(EXERCISES)} are solved" in said
    file.write_text("changed")
    assert re.search(r" 1  coalesce +not right yet ", reader()[1].out)
    reader("coalesce", "--restart")
    assert file.read_text() == EXERCISES[0].source()
    assert file.with_suffix(".cu.old").read_text() == "changed"


@pytest.mark.parametrize("word, text", [("nothing", "is no exercise"), ("r", "is more than one exercise")])
def test_name_that_is_none(reader, word, text):
    rc, said = reader(word)
    assert rc == 2 and text in said.err


def test_gpu_times_stand_side_by_side(reader, monkeypatch):
    """With stand-ins for the build and the run: the reader's takes 4 ms, the lesson's 2 ms."""
    def execute(command, environment):
        kernel = {"name": "coalesced", "ok": True, "ms": {"median": 4.0 if "my" in command[0] else 2.0}}
        record = {"problems": [{"name": "square", "kernels": [kernel]}]}
        open(command[command.index("--json") + 1], "w").write(json.dumps(record))
        assert command[1:5] == ["--kernel", "^coalesced$", "--device", "cuda"]
        return 0, "", ""

    monkeypatch.setattr(check, "build", lambda target: None)
    monkeypatch.setattr(check, "execute", execute)
    rc, said = reader("coalesce", "--gpu", finding="right")
    assert rc == 0
    assert "square: coalesced: yours takes 4 ms, the lesson's 2 ms." in said.out
    monkeypatch.setattr(check, "build", lambda target: "scons: *** Do not know how to make it\n")
    assert "There is no GPU here" in reader("coalesce", "--gpu", finding="right")[1].out


def test_what_a_reader_writes_is_ignored_by_git():
    assert "/exercises/my/" in (ROOT / ".gitignore").read_text().splitlines()


# ---- Skeletons are wrong, and solutions are right --------------------------------------------------


@each_exercise
def test_solution_is_right(exercise):
    found = check.run(exercise, program(exercise.lesson))
    assert found.kind == "right", found.text


@pytest.mark.extensive
@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.sanitizer],
                         ids=lambda exercise: exercise.name)
def test_solution_is_clean(exercise):
    path = CPU_BUILD.parent / f"cpu-{exercise.sanitizer}" / exercise.lesson
    if not path.exists():
        pytest.skip(f"no build with sanitize={exercise.sanitizer}")
    found = check.run(exercise, path)
    assert found.kind == "right", found.text


@pytest.mark.extensive
@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.name in PROGRAMS],
                         ids=lambda exercise: exercise.name)
def test_skeleton_is_found_wrong(exercise):
    path = program(f"mutants/{PROGRAMS[exercise.name]}")
    text = (ROOT / exercises.source_of(exercise.lesson)).read_text()
    lines = exercises.all_skeletons(text, exercises.test_programs()[PROGRAMS[exercise.name]]).splitlines()
    found = check.run(exercise, path, lines)
    if exercise.wrong_too:  # what the sanitizer reports: test_either_barrier_prevents_a_race
        assert found.kind == "wrong", found.text
    else:
        assert re.search(exercise.finds, found.text), found.text


@pytest.mark.extensive
@pytest.mark.parametrize("exercise", [each for each in MISTAKES if each.mutant[0]],
                         ids=lambda exercise: exercise.name)
def test_mistake_is_found(exercise, monkeypatch):
    builds = {"": CPU_BUILD, **{name: CPU_BUILD.parent / f"cpu-{name}" for name in ("address", "thread")}}
    if len(exercise.mutant) == 1:
        (mutant,) = (each for each in mutants.MUTANTS if each.name == exercise.mutant[0])
        name, number = mutant.program, mutant.number
        paths = [builds[exercise.sanitizer] / "mutants" / name]
    else:
        number = hopper_mistake(exercise).number
        paths = [hopper_mutants.program_of(exercise.lesson, builds[kind]) for kind in ("", "thread")]
    monkeypatch.setenv("MISTAKE", str(number))
    for path in paths:
        if not path.exists():
            pytest.skip(f"{path} has not been built")
        found = check.run(exercise, path)
        if found.kind != "right":
            break
    assert re.search(exercise.finds, found.text), found.text


@pytest.mark.extensive
@pytest.mark.parametrize("number, first, then", [(1, "read", "write"), (2, "write", "read")])
def test_either_barrier_prevents_a_race(number, first, then, monkeypatch):
    """Exercise barriers, with one of the two put back."""
    (exercise,) = exercises.find("barriers")
    (mutant,) = (each for each in mutants.MUTANTS
                 if each.name == f"{exercise.lesson}_matmul_tile_without_barrier_{number}")
    path = CPU_BUILD.parent / "cpu-thread" / "mutants" / mutant.program
    if not path.exists():
        pytest.skip("no build with sanitize=thread")
    monkeypatch.setenv("MISTAKE", str(mutant.number))
    found = check.run(exercise, path, lesson_of(exercise).splitlines())
    assert re.search(exercise.finds, found.text), found.text
    assert re.search(rf"here first a {first} in line .*tile.*\n.* a {then} in line .*tile", found.text)


@pytest.mark.extensive
def test_blade_sign_does_not_compile(tmp_path):
    """By itself: it would keep the other skeletons of its lesson from being built."""
    (exercise,) = exercises.find("blade_sign")
    file = tmp_path / "exercises" / "my" / "blade_sign.cu"
    file.parent.mkdir(parents=True)
    file.write_text(exercises.leave_out(exercise.source(), exercise.lesson))

    code = tmp_path / "blade_sign.cc"
    code.write_text(translate(file.read_text(), "exercises/my/blade_sign.cu"))
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-w", "-Wfatal-errors",
               f"-I{ROOT / 'common' / 'cpu'}", f"-I{CPU_BUILD / 'gen'}", f"-I{ROOT}", code]
    result = execute(command)
    assert result.rc != 0
    said = check.compiler_error(result.stderr, "exercises/my/blade_sign.cu", exercise.source().splitlines())
    assert re.search(exercise.finds, said), said


@pytest.fixture
def clone(tmp_path):
    """A copy of the sources in which what all lessons share has been built."""
    scons()  # or skips the test
    shared, signatures = ROOT / "build" / "cpu" / "obj" / "common", ROOT / ".sconsign.dblite"
    if not shared.is_dir() or not signatures.exists():
        pytest.skip("nothing has been built")
    # scons notes what it has built when it ends. What it does not know it would build again.
    if max(path.stat().st_mtime for path in shared.rglob("*.o")) > signatures.stat().st_mtime:
        pytest.skip("scons, which runs this test, has not noted yet what it has built")
    tree = copy_of_sources(tmp_path / "tree")
    shutil.rmtree(tree / "exercises" / "my", ignore_errors=True)
    for part in ("obj/common", "gen/common"):
        shutil.copytree(ROOT / "build" / "cpu" / part, tree / "build" / "cpu" / part)
    shutil.copy(signatures, tree)
    return tree


@pytest.mark.extensive
@pytest.mark.parametrize("name, solve", [
    ("coalesce", [("const int row = 0;", "const int row = blockIdx.y * blockDim.y + threadIdx.y;"),
                  ("const int col = 0;", "const int col = blockIdx.x * blockDim.x + threadIdx.x;")]),
    ("blade_sign", None),
])
def test_exercise_from_end_to_end(clone, name, solve):
    (exercise,) = exercises.find(name)
    result = execute([clone / "exercise", name], timeout=300)
    said = result.stdout
    assert result.rc == 1, said + result.stderr
    assert "a minute or two" not in said, "what is shared was built again"
    assert re.search(exercise.finds, said, re.MULTILINE), said
    if not solve:
        return
    file = clone / "exercises" / "my" / f"{name}.cu"
    text = file.read_text()
    for gap, filled in solve:
        assert gap in text
        text = text.replace(gap, filled)
    file.write_text(text)
    result = execute([clone / "exercise", name], timeout=300)
    assert result.rc == 0 and "\nRight.\n" in result.stdout, result.stdout + result.stderr
    progress = json.loads((clone / "exercises" / "my" / "progress.json").read_text())
    assert set(progress) == {name}
