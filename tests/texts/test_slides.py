"""The talk: it builds, its pages hold what is on them, and what it includes is there."""

import importlib.util
import itertools
import json
import re
import shutil
import sys
import zlib

from conftest import ROOT, execute
import pytest

spec = importlib.util.spec_from_file_location("slides", ROOT / "slides" / "build.py")
slides = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slides)

TALK = (ROOT / "slides" / "talk.md").read_text()
HEAD = "---\nmarp: true\ntheme: talk\n---\n"
NOTES = "\n::: notes\nSay it.\n:::\n"


def expand(page):
    return slides.expand(HEAD + page + NOTES)


@pytest.fixture
def build(tmp_path):
    """build(text, *arguments): the folder with the slides of that Markdown."""
    for program in ("node", "npm"):
        if not shutil.which(program):
            pytest.skip(f"there is no {program}")
    if int(execute(["node", "--version"]).stdout[1:].split(".")[0]) < 18:
        pytest.skip("there is no Node.js 18")
    if not slides.browser():
        pytest.skip("there is no Chromium or Chrome")

    def run(text, *arguments):
        source = tmp_path / "talk.md"
        source.write_text(text)
        command = [sys.executable, ROOT / "slides" / "build.py", "--source", source]
        result = execute([*command, "--out", tmp_path / "out", *arguments], timeout=300)
        assert result.rc == 0, result.stderr
        return tmp_path / "out"

    return run


def mistakes(folder):
    """What is outside of its page, a line each."""
    script = ROOT / "slides" / "check.mjs"
    result = execute(["node", script, folder / "pages.html"], env=slides.environment())
    assert result.rc == bool(result.stdout) and not result.stderr, result.stderr
    return result.stdout.splitlines()


def pages_of(path):
    """How many pages a PDF has: its objects are in compressed streams."""
    objects = b""
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", path.read_bytes(), flags=re.S):
        try:
            objects += zlib.decompress(stream)
        except zlib.error:  # a picture
            pass
    return len(re.findall(rb"/Type\s*/Page\b", objects))


def test_what_the_talk_includes_is_there():
    """Marp and a browser are for the extensive tests; a line of code that has moved shows here."""
    assert "<!-- code " in TALK and "<!-- code " not in slides.expand(TALK)


@pytest.mark.extensive
def test_talk_builds_and_fits_its_pages(build):
    folder = build(TALK)
    assert mistakes(folder) == []
    count = len(re.findall(r"^---$", TALK, flags=re.M)) - 1
    html = (folder / "slides.html").read_text()
    assert html.count('class="bespoke-marp-note"') == count  # every slide's
    # Self-contained: nothing is fetched when it is shown.
    assert not re.search(r"""(src|href)=["'](?!data:|#)|url\((?!["']?(data:|#))""", html)
    assert pages_of(folder / "slides.pdf") == count


OVERFULL = {
    "long": "\n\n".join(["A line."] * 14),
    "wide": "<div style='white-space: nowrap'>" + "wide " * 60 + "</div>",
    "code": "<pre style='width: 400px'><code>" + "code " * 30 + "</code></pre>",
    "table": "|" + " cell |" * 40 + "\n|" + "--|" * 40 + "\n|" + " cell |" * 40,
    "small": "<span style='font-size: 11px'>Who can read this?</span>",
    "image": "<img alt='' src='no-such-file.png'>",
}


@pytest.mark.extensive
def test_overfull_slides_are_caught(build):
    pages = ["# Fine", *(f"# Not\n\n{page}\n" for page in OVERFULL.values())]
    folder = build(HEAD + "\n---\n".join(page + NOTES for page in pages), "--no-pdf")
    found = mistakes(folder)
    wrong = {int(re.match(r"slide (\d+): ", line)[1]) for line in found}
    assert wrong == set(range(2, 2 + len(OVERFULL))), found


def pages():
    """Each slide of the talk: its heading, the minutes that it takes, and its notes after them."""
    for page in re.split(r"^---\n", TALK, flags=re.M)[2:]:
        minutes, text = re.search(r"^::: notes\n([\d.]+) min(.+?)^:::$", page, flags=re.M | re.S).groups()
        yield re.search("^# (.+)$", page, flags=re.M)[1], float(minutes), text


def test_slides_leave_time_for_questions_in_45_minutes():
    assert 35 <= sum(minutes for _, minutes, _ in pages()) <= 40


def test_the_times_to_steer_by_are_those_of_the_notes():
    passed, ends = 0, {}
    for heading, minutes, text in pages():
        passed += minutes
        if recorded := re.match(r"`\./(\d+)_", heading):
            ends[int(recorded[1])] = passed
    _, _, text = next(pages())
    assert int(re.search(r"take (\d+) minutes", text)[1]) == pytest.approx(passed, abs=0.5)
    said = re.findall(r"lesson (\d+)\s+(?:ends\s+)?at (\d+)", text)
    assert len(said) == 6
    for lesson, minute in said:
        assert int(minute) == pytest.approx(ends[int(lesson)], abs=0.5), lesson


def test_notes_fit_their_minutes():
    """At 105 words a minute, and a quarter of a minute for a program that runs. What is said comes first."""
    for heading, minutes, text in pages():
        said = re.sub(r"<!--.*?-->", "", text).rpartition("Say: ")[2]
        said = re.split(r"\nIf asked|\n\*Before the talk:", said)[0].lstrip(".").split()
        need = len(said) / 105 + 0.25 * ("Run `./" in text)
        assert minutes == 0 or minutes >= need, heading


def test_fused_against_unfused_is_the_first_demo_within_five_minutes():
    first = next(re.search("^# (.+)$", page, flags=re.M)[1] for page in re.split(r"^---\n", TALK, flags=re.M)
                 if "<!-- _class: live -->" in page)
    before = itertools.takewhile(lambda heading: heading != first, (heading for heading, _, _ in pages()))
    passed = sum(minutes for _, minutes, _ in list(pages())[: len(list(before))])
    assert first == "Fused against unfused" and passed < 5


@pytest.mark.parametrize("minutes", [5, 20])
def test_cuts_are_slides_in_their_order_and_fit(minutes):
    _, _, text = next(pages())
    names = re.findall(r'"(.+?)"', re.search(rf"^In {minutes} minutes: (.+?)\.$", text, flags=re.M | re.S)[1])
    time_of = {heading.replace("<br>", " "): time for heading, time, _ in pages()}
    order = list(time_of)
    assert [order.index(name) for name in names] == sorted(order.index(name) for name in names)
    assert minutes - 1 <= sum(time_of[name] for name in names) <= minutes


def test_no_slide_has_more_than_twelve_lines_of_code():
    for page in re.split(r"^---\n", slides.expand(TALK), flags=re.M)[2:]:
        for block in re.findall(r"^```cpp\n(.*?)\n```$", page, flags=re.M | re.S):
            assert len(block.splitlines()) <= 12, block


def test_the_recorded_race_is_in_the_exercise():
    """The two lines that the report names, which are broken on the slide; their numbers change with the lesson."""
    (page,) = re.findall(r"^# `\./exercise right_by_luck --where`\n(.+?)^:::", TALK, flags=re.M | re.S)
    lesson = " ".join((ROOT / "3_matmul_tensorcore.cu").read_text().split())
    found = re.findall(r"in line \d+: (.+?;)$", page, flags=re.M | re.S)
    assert len(found) == 2
    for line in found:
        assert " ".join(line.split()) in lesson, line


def broken_lines(page):
    """The lines of prose of a slide that go on in the next line."""
    shown = re.sub(r"^(::: notes|```).*?^(:::|```)$", "", page, flags=re.M | re.S)
    starts = re.compile(r"$|[|#!<]|`[^`]+`$|- |\d\. ")  # of what is no prose, or not the rest of a line
    lines = shown.splitlines()
    return [line for line, after in zip(lines, lines[1:])
            if (not starts.match(line) or re.match(r"- |\d\. ", line)) and not starts.match(after)]


def test_a_paragraph_is_one_line():
    """Marp breaks a line where the source does."""
    assert broken_lines("`a` is\nb.") and broken_lines("1. a\n   b") and broken_lines("a\nb")
    assert not broken_lines("`a = b`\n`c = d`\n\n1. a\n2. b\n\n| a |\n|---|")
    assert broken_lines(TALK[TALK.index("\n---\n"):]) == []


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((\.\./results/.+?\.svg)\)", TALK))))
def test_letters_of_plots_are_large_enough(path):
    """A plot's letters are outlines, which slides/check.mjs cannot measure."""
    text = (ROOT / "slides" / path).read_text()
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    page = min(1150 / width, 548 / height)  # see .plot in slides/theme.css
    sizes = [100 * float(size) for size in re.findall(r"scale\(([\d.]+) -", text)]
    assert sizes and round(min(sizes) * page) >= 16


def test_every_live_demo_has_a_recorded_slide():
    classes = re.findall(r"^<!-- _class: (.+) -->$", TALK, flags=re.M)
    demos = [each for each in classes if each != "title"]
    assert re.fullmatch("(live (recorded )+)+", " ".join([*demos, ""]))


def test_a_picture_is_without_what_is_for_readers():
    picture = (ROOT / "docs/pictures/fragment.svg").read_text()
    page = expand("![lanes](../docs/pictures/fragment.svg)")
    assert "B is spread by columns" in picture and "B is spread by columns" not in page
    assert "Four neighbouring lanes" in page


def test_snippet_is_what_the_source_says():
    page = expand("<!-- code 1_matmul_basic.cu | void matmul_coalesced( | const int col = -->")
    lines = (ROOT / "1_matmul_basic.cu").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if "void matmul_coalesced(" in line)
    assert "\n".join(["```cpp", *lines[start : start + 3], "```"]) in page


def test_snippet_ends_with_its_function():
    page = expand("<!-- code 1_matmul_basic.cu | void matmul_coalesced( -->")
    code = re.search(r"```cpp\n(.*?)\n```", page, flags=re.S)[1]
    assert code.splitlines()[-1] == "}"
    assert "int main" not in code


def test_snippet_of_a_function():
    code = "2_matmul_sharedmem.cu | matmul_async(const float* A, | auto start_copies = | copy_async_commit();"
    page = expand(f"<!-- code {code} -->")
    assert "\n".join(["```cpp", "const auto start_copies = [&](int step) {"]) in page
    assert "\n".join(["copy_async_commit();", "```"]) in page


@pytest.mark.parametrize("page, mistake", [
    ("<!-- code 1_matmul_basic.cu | no such line -->", "0 lines contain 'no such line'"),
    ("<!-- code 1_matmul_basic.cu | float sum = 0 -->", "2 lines contain 'float sum = 0'"),
    ("<!-- code 1_matmul_basic.cu | void matmul_coalesced( | int main -->",
     "0 lines contain 'int main'"),
    ("<!-- code 1_matmul_basic.cu | void matmul_coalesced( | const int -->",
     "2 lines contain 'const int'"),
    ("<!-- code 1_matmul_basic.cu | void matmul_coalesced( | int main | return -->",
     "0 lines contain 'int main'"),
    ("<!-- code 1_matmul_basic.cu | void matmul_coalesced( | const int | return -->",
     "2 lines contain 'const int'"),
    ("<!-- code no_such_file.cu | main -->", "No such file"),
    ("![a plot](no_such_plot.svg)", "No such file"),
    ("```cpp\n" + 200 * "x" + "\n```", "200 columns of code: too many"),
    ("```cpp\n" + 30 * "x\n" + "```", "30 lines"),
    ("::: notes\nTwice.\n:::\n", "2 blocks of notes"),
])
def test_mistakes_stop_the_build(page, mistake):
    with pytest.raises(slides.Mistake, match=f"slide 1: .*{re.escape(mistake)}"):
        expand(page)


def test_build_tells_of_a_mistake(tmp_path):
    source = tmp_path / "talk.md"
    source.write_text(HEAD + "<!-- code 1_matmul_basic.cu | no such line -->" + NOTES)
    command = [sys.executable, ROOT / "slides" / "build.py", "--source", source, "--no-pdf"]
    if not shutil.which("npm"):
        pytest.skip("there is no npm")
    result = execute([*command, "--out", tmp_path / "out"], timeout=300)
    assert result.rc == 1
    assert "error: slide 1: 1_matmul_basic.cu: 0 lines contain 'no such line'" in result.stderr


def test_what_is_to_be_recorded_shows():
    assert "to be recorded</div>" in expand("<!-- to be recorded: output h200/x y -->")


def test_markers_of_numbers_do_not_become_notes():
    page = expand("<!-- table h200/x y -->\n| 1.5 |\n<!-- end -->")
    assert page.count("<!--") == 1 and "| 1.5 |" in page


def test_versions_are_pinned():
    package = json.loads((ROOT / "slides" / "package.json").read_text())
    lock = json.loads((ROOT / "slides" / "package-lock.json").read_text())
    for name, version in package["dependencies"].items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
