"""What is recorded under results/, and what the README says of it."""
import json
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, check_record

RECORDS = sorted((ROOT / "results").glob("*/*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record_is_valid_and_verified(path):
    record = json.loads(path.read_text())
    check_record(record)
    assert record["device"]["backend"] == "cuda"
    assert not record["commit"].endswith("-dirty")
    # A peer may fail: the table says so.
    assert all(kernel["ok"] for problem in record["problems"] for kernel in problem["kernels"]
               if kernel["role"] != "peer")
    assert not any("not_run" in problem for problem in record["problems"])


def test_readme_agrees_with_the_records():
    command = [sys.executable, ROOT / "results" / "update_readme.py", "--check"]
    assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize("path", ["README.md", "docs/tables.md", "slides/talk.md"])
def test_a_wrong_number_is_found(tmp_path, path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    command = [sys.executable, tmp_path / "results" / "update_readme.py"]
    (tmp_path / path).parent.mkdir(exist_ok=True)
    marker = "<!-- value h200/6_gating_fused layer: tensor cores | ms -->"
    (tmp_path / path).write_text(f"{marker}1.03<!-- end --> ms")
    assert subprocess.run([*command, "--check"]).returncode == 1
    assert subprocess.run(command).returncode == 0
    assert subprocess.run([*command, "--check"]).returncode == 0
    record = json.loads((ROOT / "results/h200/6_gating_fused.json").read_text())
    row = next(k for k in record["problems"][0]["kernels"] if k["name"] == "tensor cores")
    text = (tmp_path / path).read_text()
    number = re.fullmatch(re.escape(marker) + "(.+)<!-- end --> ms", text)[1]
    assert float(number) == pytest.approx(row["ms"]["median"], rel=0.005)


def test_readme_check_can_fail(tmp_path):
    (tmp_path / "results").mkdir()
    script = tmp_path / "results" / "update_readme.py"
    script.write_text((ROOT / "results" / "update_readme.py").read_text())
    (tmp_path / "README.md").write_text("<!-- table h200/x square -->1.0 ms<!-- end -->")
    assert subprocess.run([sys.executable, script, "--check"], capture_output=True).returncode != 0


@pytest.fixture
def plot(tmp_path):
    """plot(*arguments): plot.py in a copy of results/; skips where matplotlib is another one."""
    matplotlib = pytest.importorskip("matplotlib")
    drawn_by = re.search(r"Matplotlib v([\d.]+)", (ROOT / "results/h200/ladder.svg").read_text())[1]
    if matplotlib.__version__ != drawn_by:
        pytest.skip(f"matplotlib {drawn_by} drew the plots, this is {matplotlib.__version__}")
    shutil.copytree(ROOT / "results", tmp_path / "results")

    def run(*arguments):
        command = [sys.executable, tmp_path / "results" / "plot.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def test_plots_are_what_the_records_give(plot):
    result = plot("--check")
    assert result.returncode == 0, result.stderr


def test_plots_change_with_a_record(plot, tmp_path):
    path = tmp_path / "results" / "h200" / "1_matmul_basic.json"
    record = json.loads(path.read_text())
    record["problems"][0]["kernels"][0]["tflops"] *= 2
    path.write_text(json.dumps(record))
    (tmp_path / "results" / "h200" / "no_such_lesson.svg").write_text("<svg/>")
    result = plot("--check")
    assert result.returncode == 1
    wrong = result.stderr.split(": ")[1].split()
    assert wrong == ["ladder.svg", "no_such_lesson.svg", "roofline.svg"]


def test_plots_show_peers_and_sweeps_when_there_are_some(plot, tmp_path):
    folder = tmp_path / "results" / "h200"
    ours = json.loads((folder / "6_gating_fused.json").read_text())
    layer = ours["problems"][0]
    layer["kernels"] = [{**layer["kernels"][0], "name": "a peer", "role": "peer"}]
    (folder / "6_gating_fused.peers.json").write_text(json.dumps(ours))
    kernels = [{"name": name, "role": "ours", "speedup": speed, "memory_bytes": 1e9 / speed}
               for name, speed in (("unfused", 1), ("fused", 5))]
    sweep = {**ours, "problems": [
        {"name": "forward", "dims": {"batch": batch, "features": features}, "kernels": kernels}
        for batch in (1024, 2048) for features in (128, 256)
    ]}
    (folder / "10_clifford_gp.sweep-3,0,0.json").write_text(json.dumps(sweep))
    # Of the peers of a sweep not all sizes, and one that was wrong.
    peers = [{"name": name, "role": role, "ok": name != "Triton", "ms": {"median": ms}, "tflops": 1 / ms}
             for name, role, ms in (("unfused", "baseline", 9), ("fused", "ours", 2), ("PyTorch", "peer", 8),
                                    ("torch.compile", "peer", 7), ("Triton", "peer", 1))]
    few = {**ours, "problems": [{**problem, "kernels": peers} for problem in sweep["problems"][:3]]}
    (folder / "10_clifford_gp.sweep-3,0,0.peers.json").write_text(json.dumps(few))
    mesh = json.loads((folder / "7_diffusion_fused.sweep.json").read_text())
    few = {**mesh, "problems": [{**problem, "kernels": peers} for problem in mesh["problems"][4::8]]}
    (folder / "7_diffusion_fused.sweep.peers.json").write_text(json.dumps(few))
    bars = (folder / "7_diffusion_fused.fused.svg").read_text()
    before = (folder / "6_gating_fused.fused.svg").read_text()
    assert plot().returncode == 0
    after = (folder / "6_gating_fused.fused.svg").read_text()
    assert after != before
    # The text is drawn as outlines, and the text itself stands beside them as a comment.
    assert "<!-- a peer -->" in after and "<!-- a peer -->" not in before
    maps = (folder / "10_clifford_gp.sweep-3,0,0.svg").read_text()
    assert "<!-- 5.0 -->" in maps and "<!-- 3.5 -->" in maps and "Triton" not in maps
    curves = (folder / "7_diffusion_fused.svg").read_text()
    assert "<!-- torch.compile -->" in curves and "<!-- Triton -->" not in curves
    assert (folder / "7_diffusion_fused.fused.svg").read_text() == bars
