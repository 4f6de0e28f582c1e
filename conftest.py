"""Runs lessons, on the CPU and, where there is one, on a GPU, and checks the records they write."""

from dataclasses import dataclass
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / folder) for folder in ("site_scons", "tests/lessons", "tests/exercises", "tests/texts")]
LESSONS = sorted(path.stem for path in ROOT.glob("*.cu"))
SOLVED = sorted(path.stem for path in (ROOT / "exercises").glob("*.cu"))  # exercises that are programs
PROGRAMS = LESSONS + SOLVED
OPERATORS = sorted(f"operators_{path.stem}" for path in (ROOT / "operators" / "bench").glob("*.cu"))
SCHEMA = json.loads((ROOT / "tests" / "schema.json").read_text())
CPU_BUILD = ROOT / os.environ.get("CPU_BUILD_DIR", "build/cpu")
CUDA_BUILD = ROOT / "build" / "cuda"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # hides every GPU from CUDA


def _has_gpu():
    if not shutil.which("nvidia-smi") or not CUDA_BUILD.is_dir():
        return False
    return subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.DEVNULL).returncode == 0


HAS_GPU = _has_gpu()
BACKENDS = ["cpu", "cuda"] if HAS_GPU else ["cpu"]


def pytest_configure(config):
    config.addinivalue_line("markers", "extensive: left to `scons test-all`, for the time it takes")
    config.addinivalue_line("markers", "slow: and left out by .ci/run, which has 45 minutes")


@dataclass
class Result:
    """How a program ended, and the record it wrote; None if it wrote none."""

    rc: int
    stdout: str
    stderr: str
    seconds: float
    record: dict = None

    @property
    def kernels(self):
        """(problem, kernel) of every row."""
        return [(p, k) for p in self.record["problems"] for k in p["kernels"]]

    @property
    def errors(self):
        return [kernel["error"] for _, kernel in self.kernels]


def execute(command, timeout=120, env=None, **options):
    """Runs a command to its end; one that takes longer than `timeout` seconds fails the test."""
    start = time.monotonic()
    process = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout, env={**os.environ, **(env or {})}, **options,
    )
    seconds = time.monotonic() - start
    return Result(process.returncode, process.stdout, process.stderr, seconds)


def program(name, backend="cpu"):
    """The path of a lesson or test program; skips the test if it has not been built."""
    path = (CUDA_BUILD if backend == "cuda" else CPU_BUILD) / name
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} has not been built")
    return path


def run_program(path, *arguments):
    """Runs a test program, given by its path; skips the test if it is not there. What it prints is text."""
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} has not been built")
    options = os.environ.get("TSAN_OPTIONS", "")
    environment = {**os.environ, "TSAN_OPTIONS": f"{options} atexit_sleep_ms=0"}
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=300, env=environment)


def hopper_program(name):
    """The path of a program that was built with nvcc, if there is a GPU for it."""
    capability = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if not shutil.which("nvidia-smi") or "9.0" not in subprocess.run(
        capability, capture_output=True, text=True
    ).stdout:
        pytest.skip("no GPU of compute capability 9.0")
    return CUDA_BUILD / name


def source_of(name):
    """The text of a lesson, of solved exercises, or of an operator's benchmark."""
    if name in OPERATORS:
        return (ROOT / "operators" / "bench" / f"{name.removeprefix('operators_')}.cu").read_text()
    return (ROOT / ("exercises" if name in SOLVED else "") / f"{name}.cu").read_text()


def words(value):
    """A test's id: a command line's words; pytest's own choice for what is none."""
    return " ".join(value) if isinstance(value, (list, tuple)) else None


def check_record(record):
    """A record fits the schema, and says of itself only what its numbers bear out."""
    jsonschema.validate(record, SCHEMA, cls=jsonschema.Draft7Validator)
    for problem in record["problems"]:
        first = problem["kernels"][0]["ms"] if problem["kernels"] else None
        for kernel in problem["kernels"]:
            if ms := kernel["ms"]:
                assert ms["p10"] <= ms["median"] <= ms["p90"], kernel
                assert kernel["speedup"] == pytest.approx(first["median"] / ms["median"]), kernel
            if kernel["ok"]:
                assert kernel["error"] is not None, kernel
                assert kernel["error"] <= kernel["tolerance"], kernel


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def run(tmp_path, backend):
    """run(lesson, *arguments): a lesson on this test's backend, and the valid record it wrote."""

    def run_lesson(name, *arguments, **options):
        path = tmp_path / f"{Path(name).name}.json"
        path.unlink(missing_ok=True)
        command = [program(name, backend), *arguments, "--device", backend, "--json", path]
        result = execute(command, **options)
        if path.exists():
            result.record = json.loads(path.read_text())
            check_record(result.record)
        return result

    return run_lesson
