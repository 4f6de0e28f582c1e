"""What is recorded under results/, and what the README says of it."""
import json
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, check_record, execute

sys.path.insert(0, str(ROOT / "results"))

import update_readme

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


def test_counts_of_problems_and_of_repeated_rows(tmp_path, monkeypatch):
    """In records of two problems and two kernels: two runs of one commit, and two of different commits."""

    def write(name, commit, *problems):
        rows = [{"name": f"problem {i}", "dims": {"N": i}, "kernels": [
            {"name": "a", "ms": {"median": a}}, {"name": "b", "ms": {"median": b}, "way": way}]}
            for i, (a, b, way) in enumerate(problems)]
        run = {"lesson": "1", "commit": commit, "device": {"name": "G"}, "problems": rows}
        (tmp_path / "results" / "gpu" / f"{name}.json").write_text(json.dumps(run))

    (tmp_path / "results" / "gpu").mkdir(parents=True)
    write("1", "c0", (1, 2, "x"), (3, 2, "x; y"))
    write("1.peers", "c0", (2, 2.2, "x"), (3, 9, "y"))  # the second way is another one: three pairs
    write("2", "c0", (1, 1, "x"))
    write("2.peers", "c1", (5, 5, "x"))
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    assert update_readme.count('gpu/1 | ms["a"] < ms["b"]') == "1"
    assert update_readme.count('gpu/1 | "x" in way["b"] and way["a"] == ""') == "2"
    assert update_readme.repeated("gpu | rows | d") == "3"
    assert [update_readme.repeated(f"gpu | {which} | .2f") for which in ("median", "largest")] == ["1.10", "2.00"]


def test_limits_of_other_gpus_are_computed():
    """2 x 4096^3 operations at an A100's 312 TFLOP/s; a 4090 multiplies fp16 at half of that."""
    text = update_readme.limits_table("h200/3_matmul_tensorcore square")
    assert re.search(r"^\| A100 .* \| 0\.44 \|$", text, re.M) and re.search(r"^\| RTX 4090 .* \| 0\.83 \|$", text, re.M)


def test_cells_of_answers():
    record = json.loads((ROOT / "results" / "h200" / "questions" / "stages.json").read_text())
    expected = next(row for row in record["rows"] if row[0].startswith("double buffering"))
    assert update_readme.cell(f"h200/questions/stages | {expected[0]} | 3 stages | .4f") == f"{expected[2]:.4f}"
    with pytest.raises(update_readme.Mistake, match='no row "nothing"'):
        update_readme.cell("h200/questions/stages | nothing | 3 stages | .4f")


def test_additions_are_a_table_once_they_are_recorded(monkeypatch, tmp_path):
    """The longest of a row's three launches is the one that adds; 1,000 sectors of 32 bytes are 3.2e-05 GB."""
    sys.path.insert(0, str(ROOT / "results" / "questions"))
    import bounds

    def profile(program, arguments, metrics, keep):
        ranges = (f"<default domain>:bf16 full: {form}:none" for form in bounds.FORMS for _ in range(3))
        rows = [{"thread Domain:Push/Pop_Range:PL_Type": of, **dict.fromkeys(metrics, "1,000")} for of in ranges]
        for longest in rows[1::3]:
            longest[bounds.TIME] = "2,000,000"
        return {"device": {"name": "G"}, "commit": "0123456789"}, rows

    monkeypatch.setattr(bounds, "profile", profile)
    monkeypatch.setattr(bounds.answers, "need_programs", lambda *_: None)
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    path = tmp_path / "results" / "g" / "additions.json"
    marker = "<!-- answer g/additions if recorded -->\n<!-- end -->"
    assert update_readme.MARKER.sub(update_readme.render, marker) == marker
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["bounds.py", "--additions", str(path)])
    assert bounds.main() == 0
    table = update_readme.MARKER.sub(update_readme.render, marker)
    assert "| d = 64, deterministic | 3.2e-05 | 3.2e-05 | 1000 | 2 | 0.002 |\n" in table


def test_the_copy_with_other_stages_fits_the_lesson():
    sys.path.insert(0, str(ROOT / "results" / "questions"))
    import stages

    copy = stages.copy_of((ROOT / f"{stages.LESSON}.cu").read_text())
    assert copy.count("add_small_mma<") == len(stages.SMALL)
    assert copy.count("  add_mma<") == len(stages.LARGE) and "wgmma<" not in copy[copy.index("int main"):]


# ---- Scripts that are given what they cannot use ---------------------------------------------------

# Every script that takes arguments, by its path.
SCRIPTS = [
    *(f"results/{name}.py" for name in ("count_clifford", "counters", "plot", "record", "update_readme")),
    "cpu/cu2cpp.py", "docs/functions.py", "docs/steps.py", "docs/pictures/draw.py",
    *(f"peers/{name}.py" for name in ("clifford_layers", "compare", "multivector_products")), "slides/build.py",
    "tests/texts/book.py", "tests/texts/closure.py", "tests/first_minutes.py", "tests/lessons/hopper_mutants.py",
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with all of them, and with what they would write to."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in ("cpu", "docs", "exercises", "peers", "results", "site_scons", "slides", "tests"):
        left_out = shutil.ignore_patterns("node_modules", "build", "my", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for path in ROOT.glob("*.cu"):
        shutil.copy(path, folder)
    shutil.copy(ROOT / "README.md", folder)
    return folder


@pytest.fixture
def refused(scripts):
    """refused(script, *arguments, rc): what it says in place of a traceback; it has written nothing."""

    def contents():
        return {path: path.read_bytes() for path in scripts.rglob("*")
                if path.is_file() and path.suffix != ".pyc"}

    def run(script, *arguments, rc=2):
        before = contents()
        result = execute([sys.executable, scripts / script, *arguments], cwd=scripts)
        assert result.rc == rc, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        assert contents() == before
        return result.stderr

    return run


def test_these_are_all_scripts():
    """Those with a main; `./exercise` has tests of its own."""
    folders = ("cpu", "docs", "docs/pictures", "peers", "results", "slides", "tests", "tests/lessons", "tests/texts")
    found = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.py") if '\nif __name__ == "__main__":' in path.read_text()}
    assert found == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_a_mistyped_option_change_nothing(refused, script):
    if script == "results/plot.py":
        pytest.importorskip("matplotlib")
    refused(script, "--help", rc=0)
    text = refused(script, "--chekc")
    assert "unrecognized arguments: --chekc" in text or "the following arguments are required" in text


@pytest.mark.parametrize("script, arguments, said", [
    ("results/record.py", ["no_such_lesson"], "no runs no_such_lesson"),
    ("results/record.py", ["1_matmul_basic:no_such_run"], "no runs 1_matmul_basic:no_such_run"),
    ("results/record.py", ["1_matmul_basic"], "build/cuda has no program 1_matmul_basic: build it first"),
    ("results/record.py", ["--bin", "/dev/null"], "has no program 10_clifford_gp, nor "),
    ("results/counters.py", ["4_matmul_cublas"], "nothing to count of 4_matmul_cublas: choose of "),
    ("results/counters.py", ["1_matmul_basic"], "build/cuda has no program 1_matmul_basic: build it first"),
    ("results/count_clifford.py", ["3,0"], "3,0: choose three numbers of basis vectors"),
    ("results/count_clifford.py", ["9,9,9"], "9,9,9: choose three numbers of basis vectors"),
    ("results/count_clifford.py", ["--nvcc", "/dev/null"], "error: "),  # or there is no SymPy
    ("peers/compare.py", ["no_such_lesson"], "no peers of no_such_lesson: choose of "),
    ("peers/compare.py", ["--seconds", "nan"], "--seconds and --budget"),
    ("docs/steps.py", ["1_matmul_basic", "matmul_coalesced"], "no kernel comes after matmul_coalesced"),
    ("tests/first_minutes.py", ["/does/not/exist"], "/does/not/exist is no folder"),
    ("tests/lessons/hopper_mutants.py", ["1_matmul_basic"], "invalid choice: '1_matmul_basic'"),
])
def test_unknown_names_and_missing_programs(refused, script, arguments, said):
    text = refused(script, *arguments)
    assert said in text and text.splitlines()[-1].count(": ") >= 1


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "no problems": lambda text: '{"device": {"name": "G"}}',
    "no times": lambda text: text.replace('"median"', '"mean"'),
    "text in place of numbers": lambda text: re.sub(r'"tflops": [\d.e+-]+', '"tflops": "fast"', text),
    "not text": lambda text: "\udcff",
}


@pytest.mark.parametrize("script, damage", [
    *(("results/update_readme.py", damage) for damage in DAMAGES),
    *(("results/plot.py", damage) for damage in ("cut", "no problems", "text in place of numbers")),
])
def test_a_damaged_record_is_named(refused, scripts, script, damage):
    if script == "results/plot.py":
        pytest.importorskip("matplotlib")
    # The one that is drawn first, or the one of README's first table.
    name = "h100-80gb-hbm3/10_clifford_gp"
    if script.endswith("update_readme.py"):
        name = re.search(r"<!-- table (\S+)", (scripts / "README.md").read_text())[1]
    path = scripts / "results" / f"{name}.json"
    whole = path.read_text()
    path.write_text(DAMAGES[damage](whole), errors="surrogateescape")
    try:
        text = refused(script)
    finally:
        path.write_text(whole)
    assert text.startswith("error: ") and text.count("\n") == 1
    assert re.search(rf"{name}|h100-80gb-hbm3/roofline.svg|(README|docs/\w+)\.md, line \d+|sentences.txt, line", text)


@pytest.mark.parametrize("marker, said", [
    ("table no_gpu/1_matmul_basic square", "results/no_gpu/1_matmul_basic.json: No such file or directory"),
    ("table h200/1_matmul_basic round", 'the record has no problem "round"'),
    ("full h200/1_matmul_basic round", 'the record has no problem "round"'),
    ("rows h200/1_matmul_basic square: no row", 'the record has no kernel "no row"'),
    ("rows h200/1_matmul_basic square", "cannot be filled in"),
])
def test_a_marker_that_cannot_be_filled_in_is_named(refused, scripts, marker, said):
    page = scripts / "docs" / "page.md"
    page.write_text(f"A page\n<!-- {marker} -->\n1\n<!-- end -->\n")
    try:
        text = refused("results/update_readme.py", "--check")
        assert refused("results/update_readme.py") == text
    finally:
        page.unlink()
    assert text.startswith("error: docs/page.md, line 2, cannot be filled in: ") and said in text
    assert text.count("\n") == 1


def test_a_program_that_writes_no_record(refused, tmp_path):
    """Nothing is recorded of it, and what there was stays."""
    program = tmp_path / "1_matmul_basic"
    program.write_text('#!/bin/sh\nfor last; do :; done\necho "{}" > "$last"\n')
    program.chmod(0o755)
    text = refused("results/record.py", "--bin", tmp_path, "1_matmul_basic")
    assert "run.json is damaged: it has no device or no problems" in text
    (tmp_path / "out").touch()
    text = refused("results/record.py", "--bin", tmp_path, "--out", tmp_path / "out", "1_matmul_basic")
    assert text.startswith("error: ") and text.count("\n") == 1


@pytest.fixture
def plot(tmp_path):
    """plot(*arguments): plot.py in a copy of the results of the H200; skips where matplotlib is another one."""
    matplotlib = pytest.importorskip("matplotlib")
    drawn_by = re.search(r"Matplotlib v([\d.]+)", (ROOT / "results/h200/ladder.svg").read_text())[1]
    if matplotlib.__version__ != drawn_by:
        pytest.skip(f"matplotlib {drawn_by} drew the plots, this is {matplotlib.__version__}")
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("h100*"))

    def run(*arguments):
        command = [sys.executable, tmp_path / "results" / "plot.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def test_plots_are_what_the_records_give(plot, tmp_path):
    for card in ROOT.glob("results/h100*"):
        shutil.copytree(card, tmp_path / "results" / card.name)
    result = plot("--check")
    assert result.returncode == 0, result.stderr


def test_numbers_of_dots_lie_apart(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "results")
    import plot

    figure, axes = plot.plt.subplots()
    plot.number_dots(axes, [(0.5, 0.5, "6"), (0.5, 0.5, "B"), (0.9, 0.5, "7")], size=18)
    six, bonus, seven = (text.xyann for text in axes.texts if text.get_text())  # a line to a dot has none
    assert six == seven == (0, 0)
    assert (bonus[0] ** 2 + bonus[1] ** 2) ** 0.5 > 18
    plot.plt.close(figure)


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
