#!/usr/bin/env python3
"""What a reader of a lesson has to open: its own lines, and those of all the .cuh and .h that it includes.

    tests/texts/closure.py            a table: the lesson, and the lines by room
    tests/texts/closure.py --write    puts it into CONTRIBUTING.md
"""

import argparse
from pathlib import Path
import re
import sys

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "site_scons"))
from includes import ROOT, closure, sources_of  # noqa: E402

ROOMS = ("primitives", "operators", "problems", "common")
PLACE = re.compile(r"(<!-- closures -->\n).*?(<!-- /closures -->)", re.DOTALL)


def lines_of(file):
    return (ROOT / file).read_text().count("\n")


def lessons():
    return [file for file in sources_of(".", suffixes=(".cu",)) if re.match(r"(\d+|bonus)_\w+\.cu$", file)]


def order(lesson):
    return (lesson.startswith("bonus"), int(re.match(r"\d+", lesson)[0]) if lesson[0].isdigit() else 0, lesson)


def table():
    """Markdown: a row a lesson."""
    rows = ["| lesson | its own | " + " | ".join(ROOMS) + " | all |", "|---|" + "--:|" * (len(ROOMS) + 2)]
    for lesson in sorted(lessons(), key=order):
        files = closure(lesson)
        by_room = [sum(lines_of(file) for file in files if file.startswith(room + "/")) for room in ROOMS]
        own = lines_of(lesson)
        rows.append(f"| {lesson[:-3]} | {own} | " + " | ".join(map(str, by_room)) + f" | {own + sum(by_room)} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into CONTRIBUTING.md")
    if not parser.parse_args().write:
        print(table())
        return
    path = ROOT / "CONTRIBUTING.md"
    text = path.read_text()
    if not PLACE.search(text):
        sys.exit("CONTRIBUTING.md has no <!-- closures -->")
    path.write_text(PLACE.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text))


if __name__ == "__main__":
    main()
