"""Builds and runs a reader's exercise, and says in plain words what is wrong with it.

look_at() makes a Finding of what a run has printed; main() is the program `./exercise`.
"""

import argparse
from contextlib import contextmanager
from dataclasses import dataclass, replace
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from exercises import EXERCISES, FOLDER, ROOT, find, source_of, text_of

PROGRESS = FOLDER / "my" / "progress.json"
SECONDS = 120  # for one run; the small problems take one or two
MOST_OUTPUT = 16 << 20  # bytes of one run; the small problems print some kB
# A report ends the program at once.
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1 atexit_sleep_ms=0"}
BUILDS = {"": "build/cpu", "address": "build/cpu-address", "thread": "build/cpu-thread"}


@dataclass(frozen=True)
class Finding:
    """What is wrong: right, compiler, wrong, race, waits, bounds, assert, crash, endless, goal or error."""

    kind: str
    text: str = ""

    @property
    def symptom(self):
        """The text without what tells the line: who looks for a mistake asks for that."""
        if self.kind in ("compiler", "wrong"):
            return self.text
        if self.kind == "bounds":
            undefined = self.text.startswith("Undefined")
            return ("Undefined: a kernel does what C++ does not allow." if undefined else
                    "Out of bounds: a kernel reaches outside of its memory.")
        if self.kind == "assert":
            return "An assertion does not hold."
        first = self.text.partition("\n")[0]
        return re.sub(r",? (?:in|at|of) line \d+", "", first).replace(" comes first:", " comes first.")


# ---- What a run has printed ------------------------------------------------------------------------

# A place in the source of an exercise, as reports name it, and not in what lessons share.
_PLACE = r"(?:[\w./-]*/)?([\w-]+\.cu):(\d+)"
_OWN = rf"(?<![\w/])(?!(?:common|primitives|operators|problems|cpu)/(?!tests/)){_PLACE}"
_BY_ITSELF = "that goes on by itself"


class Files:
    """The lines of a program of several files, by their names; the first one is the program's first file."""

    def __init__(self, files):
        self.files = files
        self.first = next(iter(files))
        names = "|".join(map(re.escape, sorted(files, key=len, reverse=True)))
        self.own = rf"(?<![\w./-])(?:(?!(?:\./)?(?:common|primitives|operators|problems|cpu)/(?!tests/))[\w./-]*/)?({names}):(\d+)"


def _own(lines):
    """The pattern of a place in the reader's files: its file, and the number of the line."""
    return lines.own if isinstance(lines, Files) else _OWN


def _code(lines, number, file=None):
    """What stands in a line; nothing where the file has no such line."""
    if isinstance(lines, Files):
        lines = lines.files[file or lines.first]
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _number(lines, number, file=None):
    """`line 57`, and of which file, if that is not the first one."""
    other = isinstance(lines, Files) and file not in (None, lines.first)
    return f"line {number} of {file}" if other else f"line {number}"


def _line(lines, number, file=None):
    """`line 57: code`, of the reader's file; the code is left out where the file has no such line."""
    code = _code(lines, number, file)
    return _number(lines, number, file) + (f": {code}" if code else "")


def _own_line(report, lines):
    """The first frame of a stack that is in the exercise's source."""
    match = re.search(rf"^ *#\d+ .*?{_own(lines)}", report, re.MULTILINE)
    if match:
        return f"in {_line(lines, int(match[2]), match[1])}"
    if re.search(r"\bcpu/hopper/(hopper|async_copies)\.cpp", report):
        return f"by a copy, or a product of a warpgroup, {_BY_ITSELF}"
    return "in a line that the report does not name"


def _with_lines(message, lines):
    """A message of the backend with `line 57` for each place; and these lines' code, to print below."""
    own = _own(lines)
    places = [(file, int(number)) for file, number in dict.fromkeys(re.findall(own, message))]
    code = [f"        {_number(lines, number, file).removeprefix('line ')}: {_code(lines, number, file)}"
            for file, number in places if _code(lines, number, file)]
    function = r"\((?:[^()]|\([^()]*\))*\)"
    return re.sub(rf"\bat {own} {function}|{own}", lambda at: (
        f"in {_number(lines, int(at[2]), at[1])}" if at[2] else _number(lines, int(at[4]), at[3])), message), code


def _elements(count):
    return "1 element" if count == 1 else f"{count} elements"


def _wrong(stdout, columns):
    """Of what --explain prints below a row that FAILED."""
    match = re.search(
        r"^  wrong from element (\d+) on: (\S+) where (\S+) is expected; (\d+) of (\d+) elements are"
        r" wrong(?: \((result \d+ of \d+)\))?", stdout, re.MULTILINE,
    )
    if not match:
        little = re.search(r"^  (a little wrong .*)", stdout, re.MULTILINE)
        return f"It is {little[1]}." if little else "Wrong: a row of the table has FAILED."
    first, got, expected, count, all_of_them, result = match.groups()
    place = f" (row {int(first) // columns}, column {int(first) % columns})" if columns else ""
    where = f" of {result}" if result else ""
    if "nan" in got:
        said = (f"it is NaN, where {expected} is expected; so nothing was written there, or it was computed"
                " from what was not there yet")
    else:
        said = f"it is {got}, where {expected} is expected"
    count = "All" if count == all_of_them else f"{count} of"
    verb = "is" if count == "1 of" else "are"
    return (f"Wrong from element {first}{place}{where} on: {said}."
            f" {count} {all_of_them} elements {verb} wrong.")


def _race(stderr, lines):
    """Of ThreadSanitizer's report: its first two stacks are the two accesses, the later one first."""
    accesses = re.findall(
        r"^  (?:Previous )?(atomic )?(read|write) of size \d+ at \w+ by .*?:\n(.*?)\n\n", stderr,
        re.MULTILINE | re.DOTALL | re.IGNORECASE,
    )
    said = [
        f"{'an atomic ' if atomic else 'a '}{kind.lower()} {_own_line(stack, lines)}"
        for atomic, kind, stack in accesses[:2]
    ]
    alone = said and _BY_ITSELF in said[0]  # what no thread does
    order = zip(("here first", "then" if alone else "then, by another thread,"), reversed(said))
    return "\n".join([
        "A race: the same memory is used twice, and nothing says which comes first:",
        *(f"    {when} {what}" for when, what in order),
        "Nothing makes the second of them wait for the first."
        + (" A barrier alone may not be enough for what goes on by itself." if alone else ""),
    ])


def _waits(message, lines):
    """Of the backend's report that all threads wait."""
    message = re.sub(r"^deadlock: ", "", message)
    said = []
    for part in re.split(r", (?:but|and) (?=of block |thread )", message):
        part, _, more = part.partition(", like ")
        more = f" (so do {more.replace(' more', '')} more threads)" if more else ""
        part, code = _with_lines(part, lines)
        said += [f"    {part}{more}", *code]
    return "\n".join(["A deadlock: threads wait for something that nobody will do.", *said])


def _bounds(stderr, lines):
    """Of AddressSanitizer's report, or UndefinedBehaviorSanitizer's; None if there is none."""
    undefined = re.search(rf"{_own(lines)}:\d+: runtime error: (.*)", stderr)
    if undefined:
        return f"Undefined: {undefined[3]}, in {_line(lines, int(undefined[2]), undefined[1])}"
    if "ERROR: AddressSanitizer" not in stderr:
        return None
    access = re.search(r"^(READ|WRITE) of size (\d+)", stderr, re.MULTILINE)
    where = re.search(
        r"is located (\d+) bytes (?:to the )?(right|left|after|before|inside)(?: of)? (\d+)-byte region",
        stderr,
    )
    own = _own_line(stderr, lines)
    if not access or not where or where[2] == "inside":
        return f"Out of bounds: a kernel reaches far outside of its memory, {own}"
    size, distance, region = int(access[2]), int(where[1]), int(where[3])
    behind = where[2] in ("right", "after")
    count = distance // size + 1 if behind else max(1, distance // size)
    side = "behind the end" if behind else "before the start"
    verb = "reads" if access[1] == "READ" else "writes"
    return (f"Out of bounds: it {verb} {_elements(count)} {side} of {region} bytes of memory"
            f" ({size} bytes at a time), {own}")


def look_at(rc, stdout, stderr, lines=(), columns=0):
    """The Finding in what a run of an exercise has printed; rc is its exit code, None if it did not
    end. `lines` are those of the source, `columns` the result's."""
    if rc is None:
        if len(stdout) + len(stderr) > MOST_OUTPUT // 2:
            return Finding("endless", f"It has printed more than {MOST_OUTPUT >> 20} MB. Is there a loop that"
                                      " prints, and never ends?")
        return Finding("endless", f"It did not end within {SECONDS} seconds. Is there a loop that never"
                                  " ends, or one in which a thread waits for a value?")
    if "ThreadSanitizer: data race" in stderr:
        return Finding("race", _race(stderr, lines))
    if bounds := _bounds(stderr, lines):
        return Finding("bounds", bounds)
    if match := re.search(r"^cuda_cpu: kernel launched at .*?, block \(.*?\): (.*)$", stderr, re.MULTILINE):
        if "deadlock: " in match[1] or " waits in " in match[1]:
            return Finding("waits", _waits(match[1], lines))
        said, code = _with_lines(match[1], lines)
        kind = "crash" if "outside of all memory" in said else "error"  # of which a sanitizer knows the line
        return Finding(kind, "\n".join([f"A GPU does not define what happens here: {said}", *code]))
    if rc == 1 and (guard := re.search(r"^  ((?:wrote|changed) .*)", stdout, re.MULTILINE)):
        return Finding("crash", f"The kernel {guard[1]}.")
    if rc == 1 and "FAILED" in stdout:
        return Finding("wrong", _wrong(stdout, columns))
    if rc == 0 and re.search(r"^All [1-9]\d* kernels verified", stdout, re.MULTILINE):
        return Finding("right")
    if rc == 0:
        return Finding("error", "The program ended before it had looked at the results. Does something call"
                                " exit()?")
    if match := re.search(r"^[^\n]*?(\S+):(\d+): .*?Assertion [`'](.*)' failed", stderr, re.MULTILINE):
        where = _line(lines, int(match[2])) if re.search(rf"{_OWN}$", f"{match[1]}:{match[2]}") else (
            f"line {match[2]} of {match[1]}")
        return Finding("assert", f"An assertion does not hold, in {where}")
    if rc == -signal.SIGABRT:
        return Finding("crash", "The program has stopped itself: something calls abort(), or has written where it"
                                " must not.")
    if rc < 0 or "Sanitizer" in stderr:
        return Finding("crash", "It crashed: some thread reaches far outside of its memory.")
    last = [line for line in stderr.splitlines() if line.strip()][-3:]
    return Finding("error", "\n".join(["The program stopped:", *(f"    {line}" for line in last)]))


def compiler_error(output, file, lines):
    """The compiler's first error, with the line of the reader's file."""
    match = re.search(rf"{re.escape(file)}:(\d+)(?::\d+)?[:,] ?(?:(?:fatal )?error: )?(.*)", output)
    error = re.search(r"^(.*?):(\d+)(?::\d+)?: (?:fatal )?error: (.*)$", output, re.MULTILINE)
    if error and error[1].endswith(file):
        return f"It does not compile: {error[3]}\n    {_line(lines, int(error[2]))}"
    if error:
        text = f"It does not compile: {error[3]}\n    in {error[1]}, line {error[2]}"
        return text + (f", used in {_line(lines, int(match[1]))}" if match else "")
    if match:  # of the translation to C++
        return f"It does not compile: {match[2]}\n    {_line(lines, int(match[1]))}"
    return "It could not be built:\n" + "\n".join(output.splitlines()[-15:])


# ---- Building and running --------------------------------------------------------------------------


def _say(text):
    print(text, flush=True)


@contextmanager
def started(command, stdin=subprocess.DEVNULL, **options):
    """A process, and all that it starts. They end with the block, however that ends. There is nothing to read for it,
    if it is not said what is."""
    came, process = [], None  # signals meanwhile: it must not be started and forgotten
    ours = threading.current_thread() is threading.main_thread()  # others get no signals, and may set none
    try:
        handlers = {number: signal.signal(number, lambda number, _: came.append(number))
                    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if ours}
        try:
            process = subprocess.Popen(command, stdin=stdin, start_new_session=True, **options)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process and process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    pass
        if process and process.stdout:
            process.stdout.close()


def build(target, sanitizer=""):
    """Builds a program; None, or what scons printed if that failed."""
    scons = shutil.which("scons")
    if not scons:
        raise SystemExit("There is no scons: run ./install.sh first.")
    cuda = [] if target.startswith("build/cuda") else ["cuda=no"]
    command = [scons, "-Q", *cuda, *([f"sanitize={sanitizer}"] if sanitizer else []), target]
    start, printed, said = time.monotonic(), [], False
    with started(command, cwd=ROOT, text=True, errors="replace", stdout=subprocess.PIPE,
                 stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            printed.append(line)
            step = re.match(r"\[ *\d+/\d+\] CXX .*(common|problems|cpu)/", line)
            if step and not said:
                said = True
                _say("    (Some of what lessons share is not built yet"
                     + (f" for the {sanitizer} sanitizer" if sanitizer else "")
                     + ". That takes up to two minutes, once.)")
        process.wait()
    _say(f"    built in {time.monotonic() - start:.0f} s")
    return "".join(printed) if process.returncode else None


def execute(command, environment):
    """(exit code, stdout, stderr); the code is None if it took too long or printed too much."""
    end = time.monotonic() + SECONDS
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = {**os.environ, **OPTIONS, **environment}
        with started(command, env=environment, stdout=out, stderr=err) as process:
            rc = None
            while rc is None and time.monotonic() < end:
                if sum(os.fstat(file.fileno()).st_size for file in (out, err)) > MOST_OUTPUT:
                    break
                try:
                    rc = process.wait(0.1)
                except subprocess.TimeoutExpired:
                    pass
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read(MOST_OUTPUT).decode(errors="replace"))
    return rc, *printed


def with_lines(report, program):
    """The report with the places of frames that ThreadSanitizer could not find, as <null>."""
    frames = re.findall(r"<null> \((\S+\+(0x[0-9a-f]+))\)", report)[:20]
    if not frames or not shutil.which("addr2line"):
        return report
    for name, address in dict.fromkeys(frames):
        found = subprocess.run(["addr2line", "-i", "-e", str(program), address],
                               capture_output=True, text=True).stdout
        places = [line.partition(" (")[0].replace(f"{ROOT}/", "")
                  for line in found.splitlines() if not line.startswith("??")]
        report = report.replace(f"<null> ({name})", " ".join(places) + f" ({name})")
    return report


def command_of(exercise, program, arguments, count=False):
    """Runs one of an exercise's small problems. To count is not to time."""
    how = ["--count"] if count else ["--samples", "1"]
    return [str(program), *arguments, *exercise.row, "--device", "cpu", "--explain", *how]


def environment_of(exercise):
    number = exercise.multiprocessors
    return {"CUDA_CPU_MULTIPROCESSORS": str(number)} if number else {}


def run(exercise, program, lines=(), record=None):
    """Runs a CPU build with the exercise's small problems; `record` is where the first one's counts go."""
    for arguments in exercise.problems:
        found = run_problem(exercise, program, arguments, lines, record)
        if found.kind != "right":
            return found
        record = None
    return found


def run_problem(exercise, program, arguments, lines, record):
    command = command_of(exercise, program, arguments, count=bool(record))
    command += ["--json", str(record)] if record else []
    environment = environment_of(exercise)
    rc, stdout, stderr = execute(command, environment)
    if "unexpected memory mapping" in stderr and shutil.which("setarch"):
        # ThreadSanitizer does not start where addresses are randomized too much.
        rc, stdout, stderr = execute(["setarch", "-R", *command], environment)
    found = look_at(rc, stdout, with_lines(stderr, program), lines, exercise.columns_of(arguments))
    if found.kind == "right" or arguments == exercise.arguments:
        return found
    return replace(found, text=f"{found.text}\nThat was with {command_words(arguments)}. Smaller and other"
                               " problems came out right.")


def command_words(arguments):
    """The arguments as a reader would say them: N = 33, --width 40."""
    return ", ".join(["N = " + arguments[0], *re.findall(r"--\S+(?: \d+)?", " ".join(arguments[1:]))])


def kernels_of(record):
    """What the record of a run says of its kernels."""
    if not record.exists():
        return []
    return [kernel for problem in json.loads(record.read_text())["problems"] for kernel in problem["kernels"]]


def missed_goal(exercise, record, lines=()):
    """What a right kernel still lacks, from the counts in the record of the run, if it has any."""
    for kernel in kernels_of(record) if exercise.goal else ():
        counts = kernel.get("counts")  # null: not counted
        if missed := exercise.goal.missed(counts):
            worst = [place for place in counts.get("worst", ())
                     if place["file"].endswith(f"{exercise.name}.cu")
                     and exercise.goal.count.startswith(f"{place['memory']}_{place['access']}_")]
            return "\n".join([
                f"Right, but {missed}.",
                *(f"    a {place['access']} in {_line(lines, place['line'])}" for place in worst),
            ])
    return None


def check(exercise):
    """Builds the reader's file, and looks at it in every way that it needs."""
    lines = text_of(exercise.file).splitlines()
    name = f"exercises/my/{exercise.name}"
    if "\0" in "".join(lines[:10]):
        return Finding("compiler", f"{name}.cu is not in UTF-8. Your editor can save it as that.")

    def program(sanitizer):
        output = build(f"{BUILDS[sanitizer]}/{name}", sanitizer)
        if output is not None:
            return Finding("compiler", compiler_error(output, f"{name}.cu", lines))
        return ROOT / BUILDS[sanitizer] / name

    return look_in_every_way(exercise, program, lines)


def _what_races(exercise, once, has_met):
    """Of a race in a loop over tiles, which names the same lines whichever barrier is missing. `once` is
    what was found where the loop has one step; `has_met` is False where no thread met another one."""
    where = f"With {command_words(exercise.one_step)}, which takes one step only,"
    if once.kind != "race":
        return f"This race is between the reads of a tile and the writes of the next one. {where} there is none."
    if has_met:
        return f"This race is between the writes of a tile and the reads of it. {where} it is there, too."
    return ("There are two races: one between the writes of a tile and the reads of it, and one between these"
            " reads and the writes of the next tile.")


def look_in_every_way(exercise, program, lines):
    """What is wrong with an exercise; program(sanitizer) is the program, or why there is none."""
    program = functools.cache(program)

    def built_and_run(sanitizer, record=None, of=exercise):
        built = program(sanitizer)
        return built if isinstance(built, Finding) else run(of, built, lines, record)

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        _say("Is it right?")
        found = built_and_run("", record if exercise.goal else None)
        if found.kind == "crash":
            _say("It writes where it must not. Where? A build with the address sanitizer tells.")
            closer = built_and_run("address")
            return closer if closer.kind == "bounds" else found
        if found.kind == "right" and (missed := missed_goal(exercise, record, lines)):
            return Finding("goal", missed)
        has_met = not any((kernel.get("counts") or {}).get("barriers") == 0 for kernel in kernels_of(record))
    if found.kind == "right" or found.kind == "wrong" and exercise.wrong_too:
        # Where the results are right, "address" first: it takes a tenth of the time of "thread".
        for sanitizer in sorted(exercise.sanitizers) if found.kind == "right" else exercise.sanitizers:
            _say({"thread": "Is there a race? A build with the thread sanitizer looks.",
                  "address": "Does it stay inside of its memory? A build with the address sanitizer looks."}
                 [sanitizer])
            closer = built_and_run(sanitizer)
            if closer.kind == "race" and exercise.one_step:
                once = built_and_run(sanitizer, of=replace(exercise, arguments=exercise.one_step, more=()))
                closer = replace(closer, text=f"{closer.text}\n{_what_races(exercise, once, has_met)}")
            if closer.kind == "race" and found.kind == "wrong":
                met = "" if has_met else "\nIn this run the kernel's threads have met at no barrier."
                return Finding("race", f"{found.text}\n{closer.text}{met}")
            if closer.kind != "right":
                return closer
    return found


def run_on_gpu(exercise):
    """The reader's kernel and the lesson's, at the lesson's default size."""
    rows = {}
    for name in (f"exercises/my/{exercise.name}", exercise.lesson):
        _say(f"Building {name} for the GPU.")
        output = build(f"build/cuda/{name}")
        if output is not None:
            _say(compiler_error(output, f"{name}.cu", []) if "error" in output else
                 "There is no GPU here, or no nvcc: see `scons`.")
            return
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "record.json"
            command = [str(ROOT / "build" / "cuda" / name), *exercise.row, "--device", "cuda",
                       "--json", str(record), "--explain", *exercise.gpu_arguments]
            rc, stdout, stderr = execute(command, {})
            if not record.exists():
                _say("\n".join((stderr or stdout).splitlines()[-3:]))
                return
            if rc != 0:
                _say(_wrong(stdout, 0))
            for problem in json.loads(record.read_text())["problems"]:
                for kernel in problem["kernels"]:
                    rows.setdefault(f"{problem['name']}: {kernel['name']}", []).append(kernel)
    for name, (yours, ours) in rows.items():
        state = "" if yours["ok"] else " (wrong)"
        _say(f"{name}: yours takes {yours['ms']['median']:.4g} ms{state},"
             f" the lesson's {ours['ms']['median']:.4g} ms.")


# ---- Progress, and the program ---------------------------------------------------------------------


def _digest(exercise):
    return hashlib.sha256(exercise.file.read_bytes()).hexdigest()


def progress():
    """{name: the digest of the file that was right}."""
    try:
        return json.loads(PROGRESS.read_text())
    except (OSError, ValueError):
        return {}


def note(exercise, is_right):
    solved = progress()
    solved.pop(exercise.name, None)
    if is_right:
        solved[exercise.name] = _digest(exercise)
    write(PROGRESS, json.dumps(solved, indent=1) + "\n")


def state_of(exercise, solved):
    if not exercise.file.exists():
        return "not started"
    return "solved" if solved.get(exercise.name) == _digest(exercise) else "not right yet"


def show_all():
    solved, width = progress(), max(len(exercise.name) for exercise in EXERCISES)
    for exercise in EXERCISES:
        if exercise.number == 1:
            _say("Fill in what is missing:\n")
        if exercise.is_mistake and not EXERCISES[exercise.number - 2].is_mistake:
            _say("\nFind the mistake:\n")
        _say(f"  {exercise.number:2}  {exercise.name:{width}}  {state_of(exercise, solved):13}"
             f"  lesson {exercise.lesson.split('_')[0]}: {exercise.title}")
    count = sum(state_of(exercise, solved) == "solved" for exercise in EXERCISES)
    upcoming = next((each for each in EXERCISES if state_of(each, solved) != "solved"), None)
    _say(f"\n{count} of {len(EXERCISES)} are solved."
         + (f" Next: ./exercise {upcoming.name}" if upcoming else ""))


# ---- The reader's files ----------------------------------------------------------------------------


def write(path, text, keep=False):
    """Writes a file, whole or not at all. With `keep` the file that was there gets a name with a number,
    NAME.cu.1 or the next that is free; returns that one."""
    kept = None
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(new, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
        if keep:
            names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
            kept = path.rename(next(name for name in names if not os.path.lexists(name)))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return kept


def commit():
    """The commit that these files are of, or "" if nobody knows."""
    try:
        said = subprocess.run(["git", "rev-parse", "--show-toplevel", "--short", "HEAD"], cwd=ROOT, text=True,
                              capture_output=True).stdout.split("\n")
    except OSError:
        return ""
    return said[1] if len(said) > 1 and Path(said[0]) == ROOT else ""


def given_file(exercise):
    return exercise.file.parent / "given" / f"{exercise.name}.json"


def given(exercise):
    """What the reader began with: the commit and the source; None if that has not been kept."""
    try:
        return json.loads(given_file(exercise).read_text())
    except (FileNotFoundError, ValueError):
        return None


def note_given(exercise):
    write(given_file(exercise), json.dumps({"commit": commit(), "source": exercise.source()}))


def start(exercise):
    """Writes the reader's file; the name of the one that was there, if somebody has changed it."""
    began = given(exercise)
    untouched = exercise.source(), began and began["source"]
    keep = exercise.file.exists() and text_of(exercise.file) not in untouched
    kept = write(exercise.file, exercise.source(), keep)
    note_given(exercise)
    return kept


def say_what_has_changed(exercise, began):
    """Of a lesson that is another one since the reader began."""
    now = commit()
    known = began["commit"] and now and began["commit"] != now
    _say("The lesson has changed since you began"
         + (f", at commit {began['commit']} (it is {now} now)" if known else "")
         + ". Your file still has what stood there.")
    if known:
        files = " ".join((source_of(exercise.lesson), *exercise.headers))
        _say(f"    what has changed:      git diff {began['commit']} -- {files}")
    _say(f"    carry your piece over: ./exercise {exercise.name} --update")


def update(exercise, began):
    """Puts what the reader has changed into what the lesson is now; whether that went well."""
    with tempfile.TemporaryDirectory() as folder:
        mine, before, now = (Path(folder) / name for name in ("mine", "before", "now"))
        mine.write_bytes(exercise.file.read_bytes())
        before.write_bytes(began["source"].encode())
        now.write_bytes(exercise.source().encode())
        merge = subprocess.run(
            ["git", "merge-file", "-p", "-L", "yours", "-L", "what you began with", "-L", "the lesson now",
             mine, before, now], capture_output=True)
    if merge.returncode not in range(128):
        raise OSError(0, f"git merge-file: {merge.stderr.decode(errors='replace').strip()}")
    kept = write(exercise.file, merge.stdout, keep=True)
    note_given(exercise)
    if merge.returncode == 0:
        _say(f"Your piece is in what the lesson is now. Your file as it was: {kept.relative_to(ROOT)}")
        return True
    places = [str(number) for number, line in enumerate(text_of(exercise.file).splitlines(), 1)
              if line.startswith("<<<<<<< yours")]
    _say(f"You and the lesson have changed the same lines. Choose in {exercise.file.relative_to(ROOT)}, line"
         f"{'s' if len(places) > 1 else ''} {', '.join(places)}, where both stand. Your file as it was:"
         f" {kept.relative_to(ROOT)}")
    return False


def say_what_to_do(exercise):
    is_solved = state_of(exercise, progress()) == "solved"
    lines = text_of(exercise.file).splitlines()
    _say(f"Exercise {exercise.number}, {exercise.name}: {exercise.title}")
    _say(f"    to read:  {exercise.page.relative_to(ROOT)}")
    file = exercise.file.relative_to(ROOT)
    todo = [str(number) for number, line in enumerate(lines, 1) if "// TODO" in line]
    if exercise.is_mistake:
        _say(f"    to mend:  {file}, the kernel of the row '{exercise.kernel}'")
    elif todo and not is_solved:
        numbers = " and ".join(filter(None, (", ".join(todo[:-1]), todo[-1])))
        _say(f"    to fill:  {file}, line{'s' if len(todo) > 1 else ''} {numbers}")
    else:
        _say(f"    yours:    {file}")


def main(text):
    """The program; its exit code."""
    parser = argparse.ArgumentParser(
        prog="./exercise", usage="./exercise [NAME] [--gpu] [--where] [--restart] [--update]",
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, its first letters, or a number")
    parser.add_argument("--gpu", action="store_true", help="run it on a GPU, too")
    parser.add_argument("--where", action="store_true", help="name the line of a mistake, too")
    parser.add_argument("--restart", action="store_true", help="begin again")
    parser.add_argument("--update", action="store_true", help="carry your piece over into a newer lesson")
    chosen = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    try:
        return run_chosen(chosen)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        print(f"./exercise stops: {file}{error.strerror}", file=sys.stderr)
        return 1


def run_chosen(chosen):
    if not chosen.name:
        show_all()
        return 0
    found = find(chosen.name)
    if len(found) != 1:
        names = ", ".join(exercise.name for exercise in found or EXERCISES)
        print(f"'{chosen.name}' is {'more than one' if found else 'no'} exercise: {names}", file=sys.stderr)
        return 2
    (exercise,) = found
    began = given(exercise) if exercise.file.exists() else None
    is_old = began is not None and began["source"] != exercise.source()
    is_untouched = is_old and text_of(exercise.file) == began["source"]
    if chosen.restart or is_untouched or not exercise.file.exists():
        is_old = False
        if kept := start(exercise):
            _say(f"Your file is kept as {kept.relative_to(ROOT)}.")
    elif chosen.update and is_old:
        if not update(exercise, began):
            return 1
        is_old = False
    elif chosen.update:
        _say("The lesson has not changed since you began." if began else
             f"What you began with has not been kept. ./exercise {exercise.name} --restart writes a new file,"
             " and keeps yours beside it.")
        return 2
    say_what_to_do(exercise)
    if is_old:
        say_what_has_changed(exercise, began)
    finding = check(exercise)
    is_right = finding.kind == "right"
    try:
        note(exercise, is_right)
    except OSError as error:
        _say(f"(Your progress is not kept: {error.strerror}.)")
    if not is_right:
        asks = exercise.is_mistake and not chosen.where
        said = finding.symptom if asks else finding.text
        _say(f"\n{said}")
        if said != finding.text:
            _say(f"Where? ./exercise {exercise.name} --where")
        if text_of(exercise.file) == exercise.source():
            _say("\nThe file is as it was given to you. Change it, and run this again.")
        elif finding.kind == "compiler" and is_old:
            _say(f"\nThe lesson has changed, which may be the reason: ./exercise {exercise.name} --update")
        elif finding.kind == "compiler" and not given(exercise):
            _say(f"\nIs the file of an older version? ./exercise {exercise.name} --restart writes a new one, and"
                 " keeps yours beside it.")
        return 1
    _say("\nRight.")
    if chosen.gpu:
        run_on_gpu(exercise)
    solved = progress()
    later = EXERCISES[exercise.number :] + EXERCISES
    upcoming = next((each for each in later if state_of(each, solved) != "solved"), None)
    _say(f"Next: ./exercise {upcoming.name}" if upcoming else "That was the last one: all are solved.")
    return 0
