"""What is recorded under results/, and what the README says of it."""
import json
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
    assert all(kernel["ok"] for problem in record["problems"] for kernel in problem["kernels"])
    assert not any("not_run" in problem for problem in record["problems"])


def test_readme_agrees_with_the_records():
    command = [sys.executable, ROOT / "results" / "update_readme.py", "--check"]
    assert subprocess.run(command).returncode == 0


def test_readme_check_can_fail(tmp_path):
    (tmp_path / "results").mkdir()
    script = tmp_path / "results" / "update_readme.py"
    script.write_text((ROOT / "results" / "update_readme.py").read_text())
    (tmp_path / "README.md").write_text("<!-- table h200/x square -->1.0 ms<!-- end -->")
    assert subprocess.run([sys.executable, script, "--check"], capture_output=True).returncode != 0
