"""Whoever makes the first minutes longer is told: tests/first_minutes.py --here, with times that are given."""

import io
import json
import sys

from conftest import ROOT
import pytest

sys.path.insert(0, str(ROOT / "tests"))
import first_minutes  # noqa: E402

UNIT = 4.0  # seconds


@pytest.fixture
def here(monkeypatch, tmp_path, capsys):
    """here(seconds of the processor of `scons`, of `scons test`): the exit code and what is printed, where 50 units and
    100 are recorded."""
    record = tmp_path / "first_minutes.json"
    record.write_text(json.dumps({"first": 50, "second": 100}))
    monkeypatch.setattr(first_minutes, "RECORD", record)

    def run(first, second, code=0, to_record=False, unit=UNIT):
        taken = dict(zip((command for _, command in first_minutes.HERE), (first, second)))
        monkeypatch.setattr(first_minutes, "run",
                            lambda command, folder, log, sampling: (code, 1.0, taken[command], unit))
        return first_minutes.here(to_record), capsys.readouterr().out

    run.record = record
    return run


def test_ten_percent_are_allowed(here):
    rc, said = here(54 * UNIT, 109 * UNIT)
    assert rc == 0 and "54.0 units of 4.00 s, at most 55.0" in said and "109.0 units of 4.00 s, at most 110.0" in said


@pytest.mark.parametrize("first, second, said", [
    (56, 100, "56.0 units of 4.00 s, MORE than 55.0"), (50, 111, "111.0 units of 4.00 s, MORE than 110.0")])
def test_more_fails(here, first, second, said):
    rc, printed = here(first * UNIT, second * UNIT)
    assert rc == 1 and said in printed and printed.count("MORE") == 1


def test_a_slower_machine_is_no_growth(here):
    assert here(54 * 3 * UNIT, 109 * 3 * UNIT, unit=3 * UNIT)[0] == 0


def test_the_unit_is_measured_meanwhile(monkeypatch):
    """Every so often, or once for a short command; and what that takes is none of the command's time."""
    monkeypatch.setattr(first_minutes, "EVERY", 0.05)
    times = iter(range(2, 100, 2))
    monkeypatch.setattr(first_minutes, "unit", lambda: next(times))
    monkeypatch.setattr(first_minutes, "processor_seconds", lambda: 1000.0 if next(times) == 2 else 7000.0)
    log = io.StringIO()
    code, seconds, processor, one = first_minutes.run("echo here; sleep 0.4; exit 3", ROOT, log, sampling=True)
    assert code == 3 and 0.4 <= seconds < 10 and log.getvalue().endswith("here\n")
    measured = [4 + 2 * k for k in range(round((one - 4) + 1))]  # 4, 6, 8, ...: their mean is `one`
    assert len(measured) > 1 and processor == 6000 - sum(measured)
    monkeypatch.setattr(first_minutes, "EVERY", 60)
    monkeypatch.setattr(first_minutes, "unit", lambda: 5)
    assert first_minutes.run("true", ROOT, log, sampling=True)[3] == 5
    assert first_minutes.run("true", ROOT, log)[3] == 0


def test_a_command_that_fails_is_no_time(here):
    assert here(50 * UNIT, 100 * UNIT, code=2)[0] == 2


def test_recording(here):
    rc, _ = here(60 * UNIT, 120 * UNIT, to_record=True)
    assert rc == 0 and json.loads(here.record.read_text()) == {"first": 60.0, "second": 120.0}


def test_without_a_record_nothing_is_compared(here):
    here.record.unlink()
    rc, said = here(500 * UNIT, 1000 * UNIT)
    assert rc == 0 and "MORE" not in said and "at most" not in said


@pytest.mark.parametrize("lesson", first_minutes.CHANGED)
def test_the_line_that_is_changed_is_there(lesson, tmp_path):
    (tmp_path / f"{lesson}.cu").write_text((ROOT / f"{lesson}.cu").read_text())
    first_minutes.change(tmp_path, lesson)
    lines = zip((ROOT / f"{lesson}.cu").read_text().split("\n"), (tmp_path / f"{lesson}.cu").read_text().split("\n"))
    assert sum(old != new for old, new in lines) == 1


def test_the_slowest_are_told(here, monkeypatch):
    """As scons and pytest print them; ten of each."""
    monkeypatch.setattr(first_minutes, "COMPILED", {})
    monkeypatch.setattr(first_minutes, "TESTED", {})
    for number in range(12):
        first_minutes.slowest(f"Command execution time: build/cpu/obj/{number}.o: {number}.5 seconds\n")
        first_minutes.slowest("Command execution time: test: 300.5 seconds\n")
        first_minutes.slowest(f"{number}.25s call     tests/x.py::test_{number}\n")
    _, said = here(50 * UNIT, 100 * UNIT)
    assert "   11.5  build/cpu/obj/11.o\n" in said and "    2.2  tests/x.py::test_2\n" in said
    assert "obj/1.o" not in said and "::test_1\n" not in said and "300.5" not in said
