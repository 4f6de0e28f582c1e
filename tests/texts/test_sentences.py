"""The numbers inside sentences: what results/sentences.txt says of them holds, and of each number it says something."""

import json
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "results"))

import sentences
import update_readme
from record import Mistake

PAGES = update_readme.pages()
ENTRIES = update_readme.entries_of_pages()


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_number_is_held(page):
    assert not sentences.unheld(PAGES[page].read_text(), update_readme.MARKER, ENTRIES[page])


@pytest.fixture
def checked(tmp_path):
    """checked(page, text, entries): what --check says of a page of this text, where sentences.txt has these entries."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    script = tmp_path / "results" / "update_readme.py"

    def run(page, text, entries, *arguments):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(text)
        (tmp_path / "results" / "sentences.txt").write_text(f"[{page}]\n\n{entries}\n")
        result = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
        assert "Traceback" not in result.stderr
        return result.returncode, result.stderr

    return run


ENTRY = "the kernel takes {} ms.\n    value h200/6_gating_fused layer: tensor cores | ms"


@pytest.mark.parametrize("page", ["README.md", "docs/tables.md", "slides/talk.md"])
def test_a_wrong_number_is_found(checked, tmp_path, page):
    text = "Here the kernel\n  takes 77 ms. More follows."
    rc, said = checked(page, text, ENTRY, "--check")
    assert rc == 1 and said.startswith(f"{page}, line 2, is not what the records give:   takes ")
    assert checked(page, text, ENTRY) == (0, "")
    record = json.loads((ROOT / "results/h200/6_gating_fused.json").read_text())
    row = next(k for k in record["problems"][0]["kernels"] if k["name"] == "tensor cores")
    new = (tmp_path / page).read_text()
    assert new.startswith("Here the kernel\n  takes ") and new.endswith(" ms. More follows.")
    assert float(new.split()[4]) == pytest.approx(row["ms"]["median"], rel=0.005)
    assert checked(page, new, ENTRY, "--check") == (0, "")


def test_words_that_are_not_there_or_twice(checked):
    for text, times in (("A kernel takes 77 ms.", 0), ("So the kernel takes 7 ms. And the kernel takes 9 ms.", 2),
                        ("Of the kernel takes 7 ms.5", 0), ("<!-- table h200/1_matmul_basic square -->\n"
                        "the kernel takes 7 ms.\n<!-- end -->", 0)):
        rc, said = checked("README.md", text, ENTRY, "--check")
        assert rc == 2 and said == (f"error: results/sentences.txt, line 3, for README.md: its words stand {times} times "
                                    "on the page: the kernel takes {} ms.\n")


def test_a_number_that_nothing_holds(checked):
    held = "It is 5.1 times the bound.\n    chosen"
    rc, said = checked("README.md", "It is 5.1 times the bound.\n\nIt is 5.1 times as fast.", held, "--check")
    assert rc == 1 and said.startswith("README.md, line 3: results/sentences.txt does not say what this number is: ")
    assert checked("README.md", "It is 5.1 times the bound.", held, "--check") == (0, "")


@pytest.mark.parametrize("text, found", [
    ("takes 5 ms, 6.5 us or 7 ns", ["5", "6.5", "7"]),
    ("gets 3\nTB/s, **40** % and 1.5x, for 8.05 GB and 17 GFLOP", ["3", "40", "1.5", "8.05", "17"]),
    ("1.2 times as fast, lesson 3 times nothing", ["1.2", "3"]),
    ("128 rows of 16 KB, in lesson 8\n\n% is a sign; N5 ms", []),
    ("`sleep 5 ms`", []),
    ("```text\n5 ms\n```", []),
    ("| kernel | N | ms | % of limit |\n|---|--:|--:|--:|\n| a | 64 | 1.5 | **77** |\n", ["1.5", "77"]),
])
def test_what_looks_measured(text, found):
    places = sentences.looks_measured(sentences.blanked(text, sentences.CODE))
    assert [text[start:end] for start, end in places] == found


@pytest.mark.parametrize("source, said", [
    ("value h200/1_matmul_basic square: no row | ms", 'the record has no kernel "no row"'),
    ("value h200/1_matmul_basic square | stones", "there is no 'stones'"),
    ("value h200/1_matmul_basic square", "cannot be filled in"),
    ("value no_gpu/1_matmul_basic square | GFLOP", "results/no_gpu/1_matmul_basic.json: No such file or directory"),
    ("formula h200/1_matmul_basic square | 1 +", "invalid syntax"),
    ("formula h200/1_matmul_basic square | hope", "name 'hope' is not defined"),
    ("ratio h200/1_matmul_basic square: uncoalesced", "cannot be filled in"),
    ('count h200/1_matmul_basic | ms["no row"] > 1', "there is no 'no row'"),
    ("count h200/1_matmul_basic | hope > 1", "name 'hope' is not defined"),
    ("repeated h200 | hope | d", "there is no 'hope'"),
    ("repeated no_gpu | rows | d", "cannot be filled in"),
    ("guess h200/1_matmul_basic square", 'there is no kind of number "guess"'),
])
def test_an_entry_that_cannot_be_filled_in_is_named(checked, source, said):
    for arguments in ("--check",), ():
        rc, text = checked("docs/page.md", "It takes 5 ms.", f"takes {{}} ms.\n    {source}", *arguments)
        assert rc == 2 and text.count("\n") == 1
        assert text.startswith("error: results/sentences.txt, line 3, for docs/page.md: cannot be filled in: ")
        assert said in text


@pytest.mark.parametrize("entries, said", [
    ("takes {} and {} ms\n    value a | ms", "2 numbers, but 1 lines"),
    ("takes long\n    one\n    two", "0 numbers, but 2 lines"),
    ("takes long", "0 numbers, but 0 lines"),
])
def test_an_entry_says_as_much_as_it_has_numbers(entries, said):
    with pytest.raises(Mistake, match=said):
        sentences.entries(f"[README.md]\n{entries}\n")


def test_an_entry_of_no_page(checked):
    rc, text = checked("README.md", "A page.", "[docs/page.md]\nsome words\n    a reason", "--check")
    assert rc == 2 and text == "error: results/sentences.txt, line 4, for docs/page.md: there is no such page\n"
