#!/usr/bin/env python3
"""How long a newcomer waits, and whoever changes a line: the README's commands, timed.

    tests/first_minutes.py [FOLDER]    in fresh clones of this repository's HEAD, which are made, used and deleted in
                                       FOLDER (default: the system's folder for such things)
    tests/first_minutes.py --here      `scons` and `scons test` in this folder, as .ci/run does it; fails where one of
                                       them takes over 10 % more of the processor than tests/first_minutes.json says
    tests/first_minutes.py --record    the same, and writes that file

install.sh should have run once before, so that nothing is downloaded. Beside each command stand the minutes that it
should take on two cores. With --here processor time is given in units, too: one unit is what a fixed source takes to
compile, in the mean of many times while the command runs, so that machines can be compared, and hours of one machine
on which others work. The slowest compilations and tests come last.
What the commands print goes to FOLDER/first_minutes.log, with --here to the terminal.
"""

import argparse
from contextlib import contextmanager, nullcontext
import json
import os
from pathlib import Path
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "first_minutes.json"
GROWTH = 1.1
# What, the command, and the most minutes that it should take on two cores.
COMMANDS = [
    ("install.sh with nothing to do", "./install.sh all", 1 / 60),
    ("clone to the first table", "./install.sh && scons --debug=time && ./6_gating_fused 4096", 2),
    ("the same, built for a GPU, too", "./install.sh && scons arch=90a && ./6_gating_fused 4096", 10),
    ("clone to passed tests", "./install.sh all && scons --debug=time test", 8),
]
# In the clone of the last one a kernel of each of these lessons changes, from one line to another.
CHANGED = {
    "2_matmul_sharedmem": ("float sum = 0;", "float sum = 0 + 0;"),
    "3_matmul_tensorcore": ("for (int k = 0; k < n; k += 16) {", "for (int k = 0; k + 0 < n; k += 16) {"),
    "6_gating_fused": ("for (int k = 0; k < in.K; ++k) {", "for (int k = 0; k + 0 < in.K; ++k) {"),
}
CHANGES = [
    ("a kernel of {lesson} has changed", "scons", 1 / 3),
    ("the tests of that lesson", "/usr/bin/env python3 -m pytest -q tests/lessons/test_lessons.py -k {lesson}", 1),
]
HERE = [("first", "scons --debug=time"), ("second", "scons --debug=time test")]
FIXED = "\n".join(f"#include <{name}>" for name in ("map", "string")) + """
std::map<std::string, int> all = {{"a", 1}};
int f(const std::string& text) { return ++all[text]; }
"""
EVERY = 20  # seconds


def processor_seconds():
    """Of all commands so far that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def unit():
    """Seconds of one core for the fixed source."""
    command = ["g++", "-std=c++20", "-O1", "-c", "-x", "c++", "-", "-o", os.devnull]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    process.stdin.write(FIXED.encode())
    process.stdin.close()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit("error: g++ does not compile")
    return used.ru_utime + used.ru_stime


@contextmanager
def sampled():
    """The list of the units that are measured meanwhile: what else runs on the machine makes both them and the command
    slower."""
    units, ended = [], threading.Event()

    def sample():
        while not ended.wait(EVERY):
            units.append(unit())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield units
    finally:
        ended.set()
        thread.join()


def run(command, folder, log, sampling=False):
    """(exit code, seconds, seconds of the processor, the unit) of a command, whose output goes to the log. The unit is
    0 where nobody wants samples: they take some 2 % of two cores."""
    start, before = time.monotonic(), processor_seconds()
    print(f"$ {command}", file=log, flush=True)
    environment = {**os.environ, "PYTEST_ADDOPTS": "--durations=10 --durations-min=1"}
    with (sampled() if sampling else nullcontext([])) as units:
        with subprocess.Popen(command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout:
                if not line.startswith(("scons: *** [test]", "Command execution time", "SConscript:")):
                    print(line, end="", file=log, flush=True)
                slowest(line)
        seconds = time.monotonic() - start
    processor = processor_seconds() - before - sum(units)
    if sampling and not units:
        units.append(unit())
    return process.returncode, seconds, processor, sum(units) / len(units) if units else 0


COMPILED, TESTED = {}, {}


def slowest(line):
    """Notes what scons and pytest say of their times."""
    if match := re.match(r"Command execution time: (build/\S+): ([\d.]+) seconds", line):
        COMPILED[match[1]] = float(match[2])
    elif match := re.match(r"([\d.]+)s (?:call|setup) +(.+)", line):
        TESTED[match[2]] = float(match[1])


def show_slowest():
    for what, times in (("compilations", COMPILED), ("tests", TESTED)):
        print(f"\nThe slowest {what}, seconds:")
        for name, seconds in sorted(times.items(), key=lambda each: -each[1])[:10]:
            print(f"{seconds:7.1f}  {name}")


def change(tree, lesson):
    """A line of a kernel."""
    source, (before, after) = tree / f"{lesson}.cu", CHANGED[lesson]
    text = source.read_text()
    if before not in text:
        sys.exit(f"error: {lesson} has no longer the line that is changed: {before}")
    source.write_text(text.replace(before, after, 1))


def in_clones(folder):
    with open(folder / "first_minutes.log", "w") as log, tempfile.TemporaryDirectory(dir=folder) as place:
        clone = Path(place) / "clone"

        def show(what, command, minutes):
            code, seconds, processor, _ = run(command, clone, log)
            if code:
                sys.exit(f"error: {command} ended with {code}, see {log.name}")
            print(f"{seconds:7.1f} s of {60 * minutes:3.0f}, processor {processor:6.1f} s  {what}: {command}", flush=True)

        for each in COMMANDS:
            shutil.rmtree(clone, ignore_errors=True)
            subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
            show(*each)
        for lesson in CHANGED:
            change(clone, lesson)
            for what, command, minutes in CHANGES:
                show(what.format(lesson=lesson), command.format(lesson=lesson), minutes)
    show_slowest()


def here(record):
    """0 if both commands succeed, in no more processor time than recorded."""
    said = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found, lines, failed = {}, [], False
    for name, command in HERE:
        code, seconds, processor, one = run(command, ROOT, sys.stdout, sampling=True)
        if code:
            return code
        found[name] = round(processor / one, 1)
        most = GROWTH * said.get(name, float("inf"))
        failed |= found[name] > most
        lines.append(f"{command}: {seconds:.0f} s, processor {processor:.0f} s, {found[name]} units of {one:.2f} s"
                     + (f", {'MORE than' if found[name] > most else 'at most'} {most:.1f}" if name in said else ""))
    show_slowest()
    print("\n" + "\n".join(lines), flush=True)
    if record:
        RECORD.write_text(json.dumps(found) + "\n")
        return 0
    return int(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()), metavar="FOLDER")
    parser.add_argument("--here", action="store_true", help="in this folder, against what is recorded")
    parser.add_argument("--record", action="store_true", help="the same, and record it")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not folder.is_dir():
        parser.error(f"{folder} is no folder")
    if arguments.here or arguments.record:
        return here(arguments.record)
    return in_clones(folder)


if __name__ == "__main__":
    sys.exit(main())
