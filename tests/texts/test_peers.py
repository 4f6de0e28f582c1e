"""The peers of peers/: their records and the table made of them, and, where PyTorch is installed,
their formulas against the fp64 references. torch.compile and Triton need a GPU."""
import importlib
import json
import math
import sys

import pytest

from conftest import ROOT, check_record, execute

for folder in ("results", "peers"):
    sys.path.insert(0, str(ROOT / folder))

import compare
import records
import update_readme


class Outcome:
    """What measure.Measured is, without PyTorch."""

    def __init__(self, samples=(), error=1e-4, worst_error=1e-3, ok=True, reason=None):
        self.samples, self.error, self.worst_error = list(samples), error, worst_error
        self.ok, self.reason = ok, reason


def row(name, role, ms, **changes):
    return {
        "name": name, "role": role,
        "ms": {"median": ms, "p10": 0.9 * ms, "p90": 1.1 * ms, "samples": 5, "mode": "cold"},
        "tflops": 2.0 / ms, "gbps": 3.0 / ms, "percent_of_limit": 100 * 0.1 / ms, "speedup": 1.0,
        "memory_bytes": None, "resources": None, "error": 1e-4, "worst_error": 1e-3,
        "tolerance": 1e-3, "ok": True, **changes,
    }


def lesson_run(baseline_ms, ours_ms):
    """A lesson's record as it is written, of a baseline and two rows of ours."""
    kernels = [row("simple", "baseline", baseline_ms, tolerance=2e-3),
               row("first", "ours", 2 * ours_ms), row("best", "ours", ours_ms)]
    for kernel in kernels:
        kernel["speedup"] = baseline_ms / kernel["ms"]["median"]
    return {
        "lesson": "6_gating_fused", "commit": "0123456789" * 4, "time": "2026-01-31T12:00:00Z",
        "seed": 1,
        "device": {"backend": "cuda", "name": "NVIDIA H200", "compute_capability": "9.0",
                   "sms": 132, "memory_bytes": 1, "l2_bytes": 1, "peak_bytes_per_second": 1.0,
                   "driver": "13.0", "runtime": "13.0"},
        "problems": [{"name": "layer", "dims": {"M": 4096, "K": 128}, "dtype": "fp16", "flops": 2e9,
                      "min_bytes": 3e6, "limit": "memory", "limit_ms": 0.1, "kernels": kernels}],
    }


VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
RUNS = [lesson_run(8.0, 0.5), lesson_run(9.0, 0.4), lesson_run(10.0, 0.3)]


def merged(**peers):
    """A record of three rounds; `peers`: by name, what each round measured."""
    return records.merged_run(RUNS, [peers], VERSIONS)


def times(record):
    return {kernel["name"]: kernel["ms"]["median"] for kernel in record["problems"][0]["kernels"]}


def test_merged_record():
    record = merged(PyTorch=[Outcome([1.0, 1.2]), Outcome([1.1]), Outcome([1.3, 5.0], error=3e-4)])
    check_record(record)
    assert times(record) == {"simple": 9.0, "first": 0.8, "best": 0.4, "PyTorch": 1.2}
    peer = record["problems"][0]["kernels"][-1]
    assert peer["role"] == "peer" and peer["ok"] and peer["ms"]["mode"] == "cold"
    assert peer["ms"]["samples"] == 5 and peer["error"] == 3e-4
    # The bound of the row that rounds most often.
    assert peer["tolerance"] == 2e-3
    # From the problem's work and the time, as in a lesson's own rows.
    assert peer["tflops"] == pytest.approx(2e9 / 1.2e-3 * 1e-12)
    assert peer["gbps"] == pytest.approx(3e6 / 1.2e-3 * 1e-9)
    assert peer["percent_of_limit"] == pytest.approx(100 * 0.1 / 1.2)
    best = record["problems"][0]["kernels"][2]
    assert best["ms"]["samples"] == 15 and best["tflops"] == pytest.approx(2.0 / 0.4)
    assert list(records.failures(record)) == []


def test_failures_are_recorded():
    record = merged(
        PyTorch=[Outcome([1.0]), Outcome([1.0], error=math.nan, worst_error=math.nan, ok=False),
                 Outcome([1.0])],
        Triton=[Outcome(), Outcome(ok=False, reason="CompilationError: no"), Outcome()],
    )
    check_record(record)
    peer = record["problems"][0]["kernels"][-1]
    assert peer["name"] == "PyTorch" and not peer["ok"] and peer["error"] is None
    assert record["problems"][0]["not_run"] == [
        {"name": "Triton", "role": "peer", "reason": "CompilationError: no"}]
    assert [name for _, name, _ in records.failures(record)] == ["PyTorch", "Triton"]
    line = update_readme.side_by_side(record["problems"][0])
    assert line["failed"] == ["PyTorch", "Triton"]
    assert line["PyTorch"] is None and line["ratio"] is None


def test_side_by_side():
    problem = merged(**{
        "PyTorch": [Outcome([1.2])] * 3, "torch.compile": [Outcome([0.6])] * 3,
        "Triton": [Outcome([0.3], ok=False)] * 3, "Triton, 3xTF32": [Outcome([0.2])] * 3,
    })["problems"][0]
    line = update_readme.side_by_side(problem)
    assert (line["ours_name"], line["ours"], line["limit"]) == ("best", 0.4, 0.1)
    # Of several rows the fastest that was verified; and a peer that is faster than ours shows.
    assert (line["PyTorch"], line["torch.compile"], line["Triton"]) == (1.2, 0.6, 0.2)
    assert line["ratio"] == pytest.approx(0.5) and line["failed"] == []


def test_table_in_the_readme(tmp_path, monkeypatch):
    (tmp_path / "results" / "h200").mkdir(parents=True)
    record = merged(**{"PyTorch": [Outcome([1.2])] * 3, "torch.compile": [Outcome([0.2])] * 3,
                       "Triton": [Outcome(reason="no", ok=False)] * 3})
    (tmp_path / "results" / "h200" / "6.peers.json").write_text(json.dumps(record))
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    text = "<!-- peers h200/6.peers h200/6.peers -->\nold\n<!-- end -->"
    lines = update_readme.MARKER.sub(update_readme.render, text).splitlines()
    assert lines[1] == "NVIDIA H200, PyTorch 2.11.0, Triton 3.6.0; commit 012345678."
    times = "400.0 us | 1.200 ms | 200.0 us | failed | 100.0 us"
    assert lines[5:7] == [f"| 6 | layer, M = 4096, K = 128 | {times} | 0.50x |"] * 2
    text = "<!-- peers h200/6.peers: layer, square -->\nold\n<!-- end -->"
    assert update_readme.MARKER.sub(update_readme.render, text).splitlines()[5:-1] == lines[5:6]
    text = "<!-- peers h200/6.peers: square -->\nold\n<!-- end -->"
    assert len(update_readme.MARKER.sub(update_readme.render, text).splitlines()) == 6


def test_without_torch_or_a_gpu(tmp_path):
    result = execute([sys.executable, ROOT / "peers" / "compare.py", "--out", tmp_path],
                     env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.rc == 3 and result.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_unknown_lesson():
    result = execute([sys.executable, ROOT / "peers" / "compare.py", "1_matmul_basic"])
    assert result.rc == 2 and "no peers of 1_matmul_basic" in result.stderr


def test_runs_of_a_lesson():
    lessons = {"first": ("module", {"": [], "small": ["8"]}), "second": ("module", {"": ["9"]})}
    assert compare.runs_named(["first", "second:"], lessons) == (
        [("first", "", []), ("first", "small", ["8"]), ("second", "", ["9"])], [])
    assert compare.runs_named(["first:small"], lessons) == ([("first", "small", ["8"])], [])
    assert compare.runs_named(["first:large", "third", "second:"], lessons)[1] == [
        "first:large", "third"]


# ---- With PyTorch, on the CPU, in fp32 -----------------------------------------------------------

PROBLEMS = [
    ("gating", "layer", {"M": 50, "K": 40, "H": 30}),
    ("diffusion", "forward", {"V": 100, "E": 16, "W": 32}),
    ("diffusion", "backward", {"V": 100, "E": 16, "W": 32}),
    ("gradients", "forward", {"V": 100, "E": 16, "W": 32}),
    ("gradients", "backward", {"V": 100, "E": 16, "W": 32}),
    ("softmax", "fp32", {"B": 20, "D": 50, "C": 30}),
    ("clifford", "forward", {"batch": 10, "features": 12, "blades": 4}),
    ("clifford", "forward + backward", {"batch": 10, "features": 12, "blades": 4}),
    ("clifford", "forward + backward", {"batch": 10, "features": 12, "blades": 8}),
    ("connected", "forward", {"batch": 10, "features": 12, "blades": 8}),
    ("connected", "forward + backward", {"batch": 10, "features": 12, "blades": 4}),
    ("attention", "full", {"batch": 2, "heads": 4, "kv_heads": 2, "S": 20, "T": 30, "d": 16}),
    ("attention", "causal", {"batch": 2, "heads": 2, "kv_heads": 2, "S": 30, "T": 30, "d": 16}),
]
TOLERANCE = 1e-5  # fp32 sums of some 100 terms


@pytest.fixture(params=PROBLEMS, ids=lambda problem: f"{problem[0]}-{problem[1]}")
def case(request):
    """The Case of a small problem."""
    pytest.importorskip("torch")
    import operators

    module, name, dims = request.param
    problem = {"name": name, "dims": dims, "dtype": "fp32"}
    return importlib.import_module(module).case(problem, operators.drawer(problem, 1, "cpu"))


def verified(case, outputs):
    import measure

    measured = measure.Measured(ok=True)
    measure.verify(outputs, case.expected, TOLERANCE, measured)
    return measured.ok


def test_eager_agrees_with_fp64(case):
    assert verified(case, case.peers["PyTorch"]()())


def test_planted_errors_are_caught(case):
    """In each output: one wrong element, one that is NaN, one that was not written."""
    outputs = case.peers["PyTorch"]()()
    for i, output in enumerate(outputs):
        for wrong in (1.01 * output.abs().max().item() + 1, math.nan, math.inf):
            copies = [each.clone() for each in outputs]
            copies[i].view(-1)[-1] = wrong
            assert not verified(case, copies)


def test_a_wrong_scale_is_caught(case):
    assert not verified(case, [1.001 * output for output in case.peers["PyTorch"]()()])


def test_gradients_are_those_of_the_forward_pass():
    """What the references of backward say by formula, autograd says of the forward references."""
    torch = pytest.importorskip("torch")
    import diffusion
    import gradients

    def numbers(*shape):
        return torch.rand(shape, dtype=torch.float64, generator=generator) - 0.5

    def leaves(*tensors):
        return [tensor.requires_grad_() for tensor in tensors]

    generator = torch.Generator().manual_seed(1)
    x, times = leaves(numbers(30, 5), numbers(5))
    basis, mass, evalues = numbers(30, 7), numbers(30), numbers(7)
    spectral, out = diffusion.reference(x, basis, mass, evalues, times)
    d_spectral, d_out = numbers(7, 5), numbers(30, 5)
    expected = torch.autograd.grad((spectral, out), (times, x), (d_spectral, d_out))
    actual = diffusion.reference_backward(d_spectral, d_out, spectral, basis, mass, evalues, times)
    for one, other in zip(actual, expected):
        assert torch.allclose(one, other, rtol=1e-10)

    Gr, Gi, d_out = numbers(30, 7), numbers(30, 7), numbers(30, 5)
    inputs = leaves(numbers(7, 5), numbers(5, 5), numbers(5, 5))
    expected = torch.autograd.grad(gradients.reference(Gr, Gi, *inputs), inputs, d_out)
    actual = gradients.reference_backward(d_out, Gr, Gi, *inputs)
    for one, other in zip(actual, expected):
        assert torch.allclose(one, other, rtol=1e-10)


def test_clifford_algebra():
    """In 3-D e1 e2 = e12 = -e2 e1, and e12 squares to -1."""
    pytest.importorskip("torch")
    from clifford import algebra_of

    algebra = algebra_of(8)
    assert (len(algebra.triples), len(algebra.terms)) == (20, 64)
    signs = {(i, j): (k, sign) for i, j, k, _, sign in algebra.terms}
    assert (signs[1, 2], signs[2, 1], signs[4, 4]) == ((4, 1), (4, -1), (0, -1))
