"""Who may include whom. The rooms, from the ground up: primitives and common; checks, lessons; operators, their bench.

    lesson       checks, primitives, common
    operators    primitives, operators, and common/choose/ways.h, how one of several ways is chosen
    operators/bench    operators, checks, primitives, common
    operators/product  the same of operators/product and operators/NAME.h alone: never another operator
    checks       common, primitives, and operators/operands.h, and operators/NAME/NAME.h or tensors.h
    primitives   primitives; on the CPU backend, cpu
    common       common, cpu
"""

from functools import lru_cache
from pathlib import Path
import re
import subprocess

import pytest

from closure import table as closure_table
from includes import ROOT, closure, included_by, linked_sources, sources_of

HEADERS = (".h", ".cuh")
ROOMS = {
    "operators/bench": r"(primitives|operators|problems|common)/",
    "operators/product": r"primitives/|common/choose/ways\.h$|operators/(product/|\w+\.h$)",
    "operators": r"primitives/|common/choose/ways\.h$|operators/(?!bench/)",
    "problems": r"(common|primitives|problems)/|operators/(operands\.h|(\w+)/(\3|tensors)\.h)$",
    "primitives": r"primitives/|cpu/",
    "common": r"common/|cpu/",
    "cpu": r"cpu/",
}
TESTS = ("cpu/tests/", "operators/tests/")  # they include what they test
LESSON = r"(primitives|problems|common)/"


def rule_of(file):
    """What the file may include, as a regular expression."""
    room = next((room for room in ROOMS if file.startswith(f"{room}/")), None)
    if room or not file.endswith(".cu"):
        return ROOMS.get(room, "")
    return LESSON


def violations(includes):
    """Of pairs (file, header that it includes) those that the rule forbids, a sentence each."""
    return [f"{file} includes {header}" for file, header in includes if not re.match(rule_of(file), header)]


def all_includes():
    files = dict.fromkeys([*sources_of(*ROOMS, suffixes=(*HEADERS, ".cu", ".cpp")), *programs()])
    return [(file, header) for file in files if not file.startswith(TESTS) for header in included_by(file)]


def test_rooms_include_only_what_is_below_them():
    includes = all_includes()
    assert len(includes) > 100
    assert violations(includes) == []


@pytest.mark.parametrize("planted", [
    ("primitives/mma.cuh", "common/check.h"),
    ("operators/softmax/rows.cuh", "problems/softmax/softmax.h"),
    ("operators/product/plan.cuh", "common/lesson.h"),
    ("operators/softmax/layer.cuh", "common/choose/choose.h"),
    ("operators/product/plan.cuh", "operators/bench/clifford_unfused.cuh"),
    ("operators/product/portable/tf32.cuh", "operators/softmax/layer.cuh"),
    ("3_matmul_tensorcore.cu", "operators/product/product.cuh"),
    ("6_gating_fused.cu", "operators/gating/gating.h"),
    ("bonus_clifford_fully_connected.cu", "operators/clifford/algebra.cuh"),
    ("problems/gating/gating.h", "operators/gating/rows.cuh"),
    ("common/lesson.h", "primitives/launch.h"),
    ("cpu/execution/fiber.h", "common/device.h"),
])
def test_a_planted_violation_is_found(planted):
    assert violations([planted]) == ["{} includes {}".format(*planted)]


def test_every_include_of_ours_is_there():
    """A quoted include that names no file of ours names one that the compiler finds (CUDA's own names)."""
    for file in sources_of(*ROOMS, suffixes=(*HEADERS, ".cu", ".cpp")):
        text = (ROOT / file).read_text()
        quoted = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
        missing = [name for name in quoted if "/" in name and not (ROOT / name).exists()]
        assert missing == [], f"{file} includes {missing}"


def test_no_room_is_crowded():
    for room in ROOMS:
        for folder in [ROOT / room, *(ROOT / room).rglob("*/")]:
            if folder.is_dir() and "__pycache__" not in str(folder):
                files = [each for each in folder.iterdir() if each.is_file() and each.name != "SConscript"]
                assert len(files) <= 12, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_a_program_links_what_it_includes():
    linked = linked_sources("6_gating_fused.cu")
    assert "problems/gating/gating.cu" in linked and "common/lesson.cpp" in linked
    assert not any("softmax" in source or "clifford" in source for source in linked)


# ---- One name, one thing ---------------------------------------------------------------------------

_NAMESPACE = re.compile(r"^namespace ([\w:]*) ?\{|^\}  // namespace")
_TYPE = re.compile(r"^(?:struct|class|enum class|union) (?:alignas\([^)]*\) )?(\w+)(?!\w|::)[^;]*$")


def types_of(file):
    """The types that a file defines in a namespace that has a name, with that name."""
    spaces, found = [], []
    for line in (ROOT / file).read_text().split("\n"):
        if space := _NAMESPACE.match(line):
            if line.startswith("}"):
                spaces.pop()
            else:
                spaces.append(space[1])
        elif (name := _TYPE.match(line)) and "" not in spaces:
            found.append("::".join([*spaces, name[1]]))
    return found


def programs():
    return [file for file in sources_of(".", suffixes=(".cu",))
            if re.match(r"(\d+|bonus)_\w+\.cu$|exercises/\d\w+\.cu$|operators/bench/\w+\.cu$", file)]


def twice(files):
    """Types that two of these files define, with both."""
    defined = {}
    for file in files:
        for name in types_of(file):
            defined.setdefault(name, []).append(file)
    return {name: places for name, places in defined.items() if len(set(places)) > 1}


@pytest.mark.parametrize("program", programs())
def test_a_program_has_no_two_types_of_one_name(program):
    files = closure(program, *linked_sources(program))
    assert twice(files) == {}


def test_two_types_of_one_name_are_found(tmp_path, monkeypatch):
    for name in ("a.h", "b.h"):
        (tmp_path / name).write_text("namespace room {\n\nstruct Layer {\n  int rows;\n};\n\n}  // namespace room\n")
    monkeypatch.setattr("test_includes.ROOT", tmp_path)
    assert twice(["a.h", "b.h"]) == {"room::Layer": ["a.h", "b.h"]}


@lru_cache(maxsize=None)
def in_the_tree(place):
    """FILE:LINE by its name from the root, also where the tree has stood elsewhere when it was compiled."""
    file, _, line = place.rpartition(":")
    path = Path(file)
    parts = path.relative_to(path.anchor).parts
    names = ("/".join(parts[i:]) for i in range(len(parts)))
    return f"{next((name for name in names if (ROOT / name).is_file()), file)}:{line}"


def defined_in(objects):
    """Of each function that objects have a copy of: in which lines of source, by its linker's name."""
    places = {}
    for each in objects:
        listing = subprocess.run(["nm", "-l", "--defined-only", each], capture_output=True, text=True, check=True)
        for line in listing.stdout.split("\n"):
            match = re.match(r"\w+ [TW] (\w+)\t(.+)", line)
            if match and not re.match(r"_ZNK?St|_ZN9__gnu_cxx|_ZN8nlohmann", match[1]):  # not libraries' own
                places.setdefault(match[1], set()).add(in_the_tree(match[2]))
    return places


@pytest.mark.parametrize("program", ["9_matmul_softmax.cu", "10_clifford_gp.cu"])
def test_copies_of_a_function_come_from_one_place(program):
    """The linker keeps one of several copies of an inline function: they have to be of one source."""
    folder = ROOT / "build/cpu/obj"
    sources = [re.sub(r"^common/.*\.cpp$", "common/all.cpp", source) for source in [program, *linked_sources(program)]]
    objects = [folder / f"{source.rsplit('.', 1)[0]}.o" for source in dict.fromkeys(sources)]
    if not all(each.exists() for each in objects):
        pytest.skip(f"{program} is not built")
    places = defined_in(objects)
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_map_tells_what_a_reader_opens():
    """CONTRIBUTING.md has what tests/texts/closure.py counts, give or take 3 %."""
    printed = (ROOT / "CONTRIBUTING.md").read_text().split("<!-- closures -->")[1].split("<!-- /closures -->")[0]
    rows, counted = printed.strip().split("\n"), closure_table().split("\n")
    assert len(rows) == len(counted)
    for row, now in zip(rows[2:], counted[2:]):
        cells, right = (list(map(str.strip, line.strip("|").split("|"))) for line in (row, now))
        assert cells[0] == right[0]
        for number, is_now in zip(cells[1:], right[1:]):
            assert abs(int(number) - int(is_now)) <= 0.03 * int(is_now), f"{row}: tests/texts/closure.py --write"
