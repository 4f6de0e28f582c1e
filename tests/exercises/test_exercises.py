"""The exercises (exercises/exercises.py): made from the lessons, and what `./exercise` says of them.

A skeleton must be found wrong in the way that its exercise means, as must be what students would
answer (wrong_answers.py); and the lesson, which is the solution, must be found right.
"""

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

from conftest import CPU_BUILD, ROOT, execute, program
import hopper_mutants
from includes import linked_sources
import mutants
import pytest
from test_sanitizers import program_of
from test_style import copy_of_sources, formatter, scons
import wrong_answers

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
PROGRAMS = {each.name: name for name, group in wrong_answers.programs().items() for each in group}
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
    lessons = [int(each.lesson.split("_")[0].replace("bonus", "99")) for each in EXERCISES[: -len(MISTAKES)]]
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
            (section,) = (text for text in readme.split("\n## ")
                          if re.search(rf"^    \./{each.lesson}\b", text, re.MULTILINE))
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
    with pytest.raises(TranslationError, match=r"^primitives/[\w/]+\.cuh includes primitives/launch.h again"):
        with_headers((ROOT / "9_matmul_softmax.cu").read_text(), "primitives/launch.h")


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
    found = look(program("tests/lessons/broken_kernels"), 33, "--kernel", f"^{bug}$", "--samples", 1,
                 "--explain", columns=columns)
    assert found.kind == ("right" if bug == "none" else "wrong")
    assert re.search(text, found.text), found


def test_little_errors_are_told(tmp_path):
    found = look(program("tests/lessons/broken_kernels"), 64, "--kernel", "^half_precision_sum$", "--samples", 1,
                 "--explain")
    assert found.kind == "wrong" and re.search(r"^(It is a little wrong|Wrong from element)", found.text)


@pytest.mark.extensive
def test_race_names_two_lines():
    path = CPU_BUILD.parent / "cpu-thread" / "cpu" / "tests" / "sanitized" / "race_missing_barrier"
    if not path.exists():
        pytest.skip("no build with sanitize=thread")
    lines = (ROOT / "cpu" / "tests" / "sanitized" / "race_missing_barrier.cu").read_text().splitlines()
    result = execute([path], env=check.OPTIONS)
    if "unexpected memory mapping" in result.stderr:
        result = execute(["setarch", "-R", path], env=check.OPTIONS)
    found = check.look_at(result.rc, result.stdout, result.stderr, lines)
    assert found.kind == "race"
    for when in ("here first", "then, by another thread,"):
        assert re.search(rf"^    {when} a (?:read|write) in line \d+: \S", found.text, re.MULTILINE)


@pytest.mark.extensive
def test_out_of_bounds_counts_elements():
    path = CPU_BUILD.parent / "cpu-address" / "cpu" / "tests" / "sanitized" / "oob_dynamic_shared"
    if not path.exists():
        pytest.skip("no build with sanitize=address")
    lines = (ROOT / "cpu" / "tests" / "sanitized" / "oob_dynamic_shared.cu").read_text().splitlines()
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
    (None, "", "endless"), (-11, "", "crash"), (3, "error: no memory\n", "error"), (0, "", "error"),
    (-6, "", "crash"), (-6, "x: exercises/my/x.cu:2: void f(): Assertion `a == b' failed.\n", "assert"),
])
def test_other_ends(rc, stderr, kind):
    found = check.look_at(rc, "", stderr, ["one", "two"])
    assert found.kind == kind and ("no memory" in found.text) == (rc == 3)
    assert ("line 2: two" in found.text) == (kind == "assert")
    assert ("exit()" in found.text) == (rc == 0)


def test_write_behind_an_output():
    found = check.look_at(1, "tile  FAILED\n  wrote 8 bytes behind output 1\n", "")
    assert found == check.Finding("crash", "The kernel wrote 8 bytes behind output 1.")


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
    assert file.with_name("coalesce.cu.1").read_text() == "changed"


def test_restart_overwrites_nothing(reader, tmp_path):
    """However often it is called, and whatever stands in the file."""
    reader("coalesce")
    file = tmp_path / "exercises" / "my" / "coalesce.cu"
    for text in ("one", "two"):
        file.write_text(text)
        assert "Your file is kept as exercises/my/coalesce.cu." in reader("coalesce", "--restart")[1].out
        reader("coalesce", "--restart")  # of the untouched file nothing has to be kept
    assert [path.read_text() for path in sorted(file.parent.glob("coalesce.cu.*"))] == ["one", "two"]


# `./exercise` as a process of its own, with a folder of its own, whose check is replaced by `sys.argv[2]`.
DRIVER = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / "exercises")!r}]
import check, exercises
exercises.FOLDER = Path(sys.argv[1]) / "exercises"
check.ROOT, check.PROGRESS = Path(sys.argv[1]), exercises.FOLDER / "my" / "progress.json"
checking = sys.argv[2]
check.check = lambda exercise: eval(checking)
sys.argv = ["exercise", *sys.argv[3:]]
__file__ = {str(ROOT / "exercise")!r}
exec(Path(__file__).read_text())
"""


def process(folder, *arguments, checking="check.Finding('wrong', 'It is so.')", **options):
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), checking, *arguments], text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_full_disk_takes_nothing_away(tmp_path):
    """Files here may have 1000 bytes: of a new one just so much can be written."""
    folder = tmp_path / "exercises" / "my"
    folder.mkdir(parents=True)
    (folder / "coalesce.cu").write_text("mine")
    for _ in range(2):
        run = process(tmp_path, "coalesce", "--restart", preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (1000, 1000)))
        said = run.communicate()[1]
        assert run.returncode == 1 and "File too large" in said and "Traceback" not in said
    assert [path.name for path in folder.iterdir()] == ["coalesce.cu"]
    assert (folder / "coalesce.cu").read_text() == "mine"


def test_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "my").write_text("a file")
    run = process(tmp_path, "coalesce")
    said = run.communicate()[1]
    assert run.returncode == 1 and re.fullmatch(r"\./exercise stops: \S+my\S*: (File exists|Not a directory)\n", said)


@pytest.mark.parametrize("number, rc", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
                         ids=lambda value: getattr(value, "name", None))
def test_what_was_started_ends_too(tmp_path, number, rc):
    (tmp_path / "exercises").mkdir()
    note = tmp_path / "pid"
    checking = f"check.execute(['sh', '-c', 'echo $$ > {note}; sleep 60 & wait'], {{}})"
    run = process(tmp_path, "coalesce", checking=checking)
    while not note.exists() or not note.read_text():
        time.sleep(0.01)
    run.send_signal(number)
    _, said = run.communicate(timeout=20)
    assert run.returncode == rc and "Traceback" not in said
    group = note.read_text().strip()
    left = [line.split() for line in execute(["ps", "-eo", "pgid=,stat="]).stdout.splitlines()]
    assert not [state for each, state in left if each == group and not state.startswith("Z")]


def test_reader_who_stops_reading(tmp_path):
    (tmp_path / "exercises").mkdir()
    run = process(tmp_path)
    run.stdout.close()
    assert run.wait(20) != 0 and run.stderr.read() == ""
    run.stderr.close()


def test_output_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(check, "MOST_OUTPUT", 1 << 16)
    rc, out, _ = check.execute(["sh", "-c", "while :; do echo again and again and again; done"], {})
    found = check.look_at(rc, out, "")
    assert found.kind == "endless" and "prints" in found.text and len(out) <= 1 << 16


@pytest.mark.parametrize("before, after", [(b"", b"// by Ren\xe9\n"), (b"\xef\xbb\xbf", b"")])
def test_any_encoding_is_read(tmp_path, before, after):
    """A name in an editor's encoding, and the mark that Windows puts at the start of a file."""
    file = tmp_path / "x.cu"
    file.write_bytes(before + b"int x;\n" + after)
    text = exercises.text_of(file)
    assert text.encode(errors="surrogateescape") == b"int x;\n" + after
    assert translate(text, "x.cu").startswith('#line 1 "x.cu"\nint x;\n')


def change_of_lesson(monkeypatch, old, new):
    whole = exercises.Exercise.whole
    monkeypatch.setattr(exercises.Exercise, "whole", lambda self: whole(self).replace(old, new))


def test_lesson_that_changes_is_told_and_the_piece_carried_over(reader, tmp_path, monkeypatch):
    reader("coalesce")
    file = tmp_path / "exercises" / "my" / "coalesce.cu"
    solved = file.read_text().replace("const int row = 0;", "const int row = threadIdx.y;")
    file.write_text(solved)
    assert "has changed" not in reader("coalesce")[1].out
    assert "has not changed" in reader("coalesce", "--update")[1].out
    change_of_lesson(monkeypatch, "float sum = 0;", "float sum = 0.0f;")
    said = reader("coalesce", finding="compiler")[1].out
    assert said.count("./exercise coalesce --update") == 2 and "The lesson has changed since you began" in said
    assert file.read_text() == solved
    rc, said = reader("coalesce", "--update")
    assert file.read_text() == solved.replace("float sum = 0;", "float sum = 0.0f;")
    assert file.with_name("coalesce.cu.1").read_text() == solved and "coalesce.cu.1" in said.out
    assert "has changed" not in reader("coalesce")[1].out


def test_lesson_that_changes_where_the_reader_has(reader, tmp_path, monkeypatch):
    reader("coalesce")
    file = tmp_path / "exercises" / "my" / "coalesce.cu"
    mine = file.read_text().replace("const int col = 0;", "const int col = threadIdx.x;")
    file.write_text(mine)
    monkeypatch.setattr(exercises.Exercise, "source", lambda self: exercises.Exercise.skeleton(
        self, self.whole())[0].replace("const int col = 0;", "const int column = 0;"))
    rc, said = reader("coalesce", "--update")
    assert rc == 1 and "have changed the same lines" in said.out
    assert "<<<<<<< yours" in file.read_text() and file.with_name("coalesce.cu.1").read_text() == mine


def test_lesson_that_changes_before_the_reader_has_changed_anything(reader, tmp_path, monkeypatch):
    reader("coalesce")
    change_of_lesson(monkeypatch, "float sum = 0;", "float sum = 0.0f;")
    assert "has changed" not in reader("coalesce")[1].out
    assert "float sum = 0.0f;" in (tmp_path / "exercises" / "my" / "coalesce.cu").read_text()


def test_file_of_which_nobody_knows_what_it_began_with(reader, tmp_path):
    """As it was before that was kept."""
    file = tmp_path / "exercises" / "my" / "coalesce.cu"
    file.parent.mkdir()
    file.write_text("mine")
    assert "--restart" in reader("coalesce", finding="compiler")[1].out
    rc, said = reader("coalesce", "--update")
    assert rc == 2 and "has not been kept" in said.out and file.read_text() == "mine"


def test_who_looks_for_a_mistake_is_told_the_symptom():
    for kind, text in (("race", "A race: the same memory\n    here first a read in line 7: x"),
                       ("bounds", "Out of bounds: it writes 2 elements behind the end, in line 7: x"),
                       ("error", "A GPU does not define this: thread 1: barrier_wait() in line 7: no"),
                       ("error", "The block ends; the first were sent at line 7: nobody waits, at line 9"),
                       ("assert", "An assertion does not hold, in line 7: assert(x)"),
                       ("wrong", "Wrong from element 3 on"), ("waits", "A deadlock: x.\n    thread 1 in line 7")):
        symptom = check.Finding(kind, text).symptom
        assert "line" not in symptom and symptom.startswith(text[:6])


def test_line_of_a_mistake_is_told_when_asked(reader, monkeypatch):
    found = check.Finding("race", "A race: the same memory\n    here first a read in line 7: x")
    monkeypatch.setattr(check, "Finding", lambda kind, text: found)
    said = reader("last_tile", finding="race")[1].out
    assert "line 7" not in said and "./exercise last_tile --where" in said
    assert "line 7" in reader("last_tile", "--where", finding="race")[1].out
    assert "line 7" in reader("coalesce", finding="race")[1].out


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
@pytest.mark.parametrize("exercise, sanitizer", [
    (each, sanitizer) for each in EXERCISES for sanitizer in each.sanitizers
], ids=lambda value: getattr(value, "name", value))
def test_solution_is_clean(exercise, sanitizer):
    path = program_of(sanitizer, exercise.lesson)
    if not path.exists():
        pytest.skip(f"no build with sanitize={sanitizer}")
    found = check.run(exercise, path)
    assert found.kind == "right", found.text


def test_each_exercise_has_three_wrong_answers():
    assert set(wrong_answers.WRONG) | {"blade_sign"} == {each.name for each in EXERCISES}
    assert min(map(len, wrong_answers.WRONG.values())) >= 3


@pytest.mark.extensive
@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.name in PROGRAMS],
                         ids=lambda exercise: exercise.name)
def test_wrong_answers_are_refused(exercise, monkeypatch):
    """The exercise as it is given, and each wrong answer: in words that tell one from the others. (A mistake
    that is mended at a wrong place goes on to do what it did.)"""
    name, words = PROGRAMS[exercise.name], {}
    builds = {sanitizer: ROOT / check.BUILDS[sanitizer] / "mutants" / name for sanitizer in ("", *exercise.sanitizers)}
    builds[""] = program(f"mutants/{name}")
    for path in builds.values():
        if not path.exists():
            pytest.skip(f"{path} has not been built")
    text = (ROOT / exercises.source_of(exercise.lesson)).read_text()
    source = wrong_answers.program(text, wrong_answers.programs()[name])
    lines = source.split("#line 1\n", 1)[1].splitlines()
    given = wrong_answers.Answer(exercise.finds, ())
    for which, answer in enumerate((given, *wrong_answers.WRONG[exercise.name])):
        monkeypatch.setenv("MISTAKE", str(wrong_answers.number_of(exercise, which)))
        found = check.look_in_every_way(exercise, builds.get, lines)
        assert found.kind != "right", f"answer {which} is accepted"
        assert re.search(answer.finds, found.text), f"answer {which}: {found.text}"
        same = words.setdefault(found.text, which)
        assert same in (which, answer.like) or exercise.is_mistake, f"answers {which} and {same}: {found.text}"
        assert not exercise.is_mistake or " line " not in found.symptom, f"answer {which}: {found.symptom}"


@pytest.mark.parametrize("races, barriers, said", [
    ({"33", "32"}, 0, "two races"),
    ({"33", "32"}, 2, "between the writes of a tile and the reads of it."),
    ({"33"}, 2, "between the reads of a tile and the writes of the next one."),
])
def test_each_race_of_a_loop_over_tiles_is_told(races, barriers, said, monkeypatch):
    """With stand-ins for the runs: there are races where N is one of `races`."""
    (exercise,) = exercises.find("barriers")

    def run(exercise, program, lines=(), record=None):
        if program:
            return check.Finding("race", "A race.") if exercise.arguments[0] in races else check.Finding("right")
        record.write_text(json.dumps({"problems": [{"kernels": [{"counts": {"barriers": barriers}}]}]}))
        return check.Finding("wrong", "Wrong.")

    monkeypatch.setattr(check, "run", run)
    found = check.look_in_every_way(exercise, lambda sanitizer: sanitizer, [])
    assert found.kind == "race" and said in found.text and found.text.startswith("Wrong.\nA race.\n")
    assert ("There are two" in found.text) == ("met at no barrier" in found.text) == (barriers == 0)
    assert found.text.count("race is between") == (barriers > 0)


SIGN = "for (unsigned later = a >> 1; later != 0; later >>= 1) swaps += std::popcount(later & b);"
SQUARES = """for (int v = 0; v < kVectors; ++v)
      if (a & b & 1u << v) sign *= v < p ? 1 : v < p + q ? -1 : 0;"""


def blade_sign(swaps, squares):
    return f"int swaps = 0; {swaps}\n int sign = swaps % 2 == 0 ? 1 : -1; {squares}\n return sign;"


@pytest.mark.extensive
@pytest.mark.parametrize("given", [
    None,  # as it is given
    blade_sign(SIGN.replace("a >> 1", "a"), SQUARES),  # a vector passes itself
    blade_sign(SIGN.replace("popcount(later & b)", "popcount(later & ~b)"), SQUARES),
    blade_sign(SIGN, ""),  # every square is 1
    blade_sign(SIGN, SQUARES.replace("v < p + q ? -1 : 0", "-1")),  # and here none is 0
    blade_sign(SIGN, SQUARES),
], ids=("given", "itself", "others", "squares", "zero", "right"))
def test_wrong_signs_of_blades_do_not_compile(tmp_path, given):
    """The lesson's own assertions speak."""
    (exercise,) = exercises.find("blade_sign")
    if not (CPU_BUILD / "gen" / "primitives").is_dir():
        pytest.skip("the headers have not been translated")
    text, (_,) = exercise.skeleton(lesson_of(exercise))
    text = text.replace("return 1;", given, 1) if given else text
    code = tmp_path / "blade_sign.cc"
    code.write_text(translate(text, "exercises/my/blade_sign.cu"))
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-w", "-Wfatal-errors", "-DFEW_ALGEBRAS",
               f"-I{ROOT / 'cpu' / 'include'}", f"-I{CPU_BUILD / 'gen'}", f"-I{ROOT}", code]
    result = execute(command)
    assert (result.rc == 0) == (given == blade_sign(SIGN, SQUARES)), result.stderr
    if result.rc:
        said = check.compiler_error(result.stderr, "exercises/my/blade_sign.cu", text.splitlines())
        assert re.search(exercise.finds, said) and re.search(r"line \d+: static_assert\(Cl<", said), said


@pytest.fixture
def clone(tmp_path):
    """A copy of the sources in which what all lessons share has been built."""
    scons()  # or skips the test
    build, signatures = ROOT / "build" / "cpu", ROOT / ".sconsign.dblite"
    shared = [f"obj/{folder}" for folder in ("common", "problems", "cpu")]
    if not all((build / folder).is_dir() for folder in shared) or not signatures.exists():
        pytest.skip("nothing has been built")
    # scons notes what it has built when it ends. What it does not know it would build again.
    objects = [path for folder in shared for path in (build / folder).rglob("*.o")]
    if max(path.stat().st_mtime for path in objects) > signatures.stat().st_mtime:
        pytest.skip("scons, which runs this test, has not noted yet what it has built")
    tree = copy_of_sources(tmp_path / "tree")
    shutil.rmtree(tree / "exercises" / "my", ignore_errors=True)
    for built in check.BUILDS.values():
        for part in (*shared, *(f"gen/{folder}" for folder in ("common", "cpu", "primitives", "operators", "problems"))):
            if (ROOT / built / part).is_dir():
                shutil.copytree(ROOT / built / part, tree / built / part)
    shutil.copy(signatures, tree)
    return tree


@each_exercise
def test_reader_links_what_the_lesson_does(exercise, tmp_path):
    file = tmp_path / "x.cu"
    file.write_text(exercise.source())
    assert set(linked_sources(str(file))) == set(linked_sources(exercises.source_of(exercise.lesson)))


@pytest.mark.extensive
@pytest.mark.parametrize("most", [2, pytest.param(None, id="all", marks=pytest.mark.slow)])
def test_exercises_are_built_as_a_reader_builds_them(clone, most):
    """By the reader's own command, of all exercises whose files include the same the first one, or of these the
    shortest with an even and with an odd number: what differs between them test_wrong_answers_are_refused()
    compiles. Some editors put a mark at the start, and some write a name in Latin-1."""
    files = {(each.lesson, each.headers): each for each in reversed(EXERCISES)}
    my = clone / "exercises" / "my"
    my.mkdir()
    chosen = sorted(files.values(), key=lambda each: len(each.whole()))
    if most:
        chosen = [next(each for each in chosen if each.number % 2 == odd) for odd in range(most)]
    assert {each.number % 2 for each in chosen} == {0, 1}
    for each in chosen:
        does_compile = "compile" not in each.finds
        source = each.source() if does_compile else each.whole()
        mark, end = (b"", b"// Ren\xe9\n") if each.number % 2 else (b"\xef\xbb\xbf", b"")
        (my / f"{each.name}.cu").write_bytes(mark + source.encode() + end)
    programs = [f"build/cpu/exercises/my/{each.name}" for each in chosen]
    result = execute([shutil.which("scons"), "-Q", "-k", "cuda=no", *programs], timeout=600, cwd=clone)
    assert result.rc == 0, result.stdout + result.stderr
    assert not re.search(r"CXX (common|problems|cpu)/", result.stdout), "what is shared was built again"


SUMS = """float a[TM], b[TN];
      for (int i = 0; i < TM; ++i) a[i] = a_tile[y + i * kThreadsY][k];
      for (int j = 0; j < TN; ++j) b[j] = b_tile[k][x + j * kThreadsX];
      for (int i = 0; i < TM; ++i) {
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
      }
      //"""


# With a sanitizer, of whose build .ci/run has not all, and without one.
@pytest.mark.extensive
@pytest.mark.parametrize("name, solve", [
    pytest.param("coalesce", [("const int row = 0;", "const int row = blockIdx.y * blockDim.y + threadIdx.y;"),
                              ("const int col = 0;", "const int col = blockIdx.x * blockDim.x + threadIdx.x;")],
                 marks=pytest.mark.slow),
    ("registers", [("// TODO: add to sum", SUMS)]),
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
