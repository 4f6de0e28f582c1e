"""What README.md and the pages beside it tell a reader to do can be done, and what they name is there."""

import json
import re
import shlex
import shutil
import sys

import book
from conftest import LESSONS, PROGRAMS, ROOT, execute, program
import pytest

sys.path.append(str(ROOT / "cpu"))
from cu2cpp import translate

README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text()
         for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))}
ALL = "\n".join(PAGES.values())
SCONS = "".join(file.read_text() for file in (ROOT / "SConstruct", *sorted((ROOT / "site_scons").glob("*.py"))))
# Commands are indented; so is the synopsis, whose options are all in brackets.
BLOCKS = re.findall(r"^ {4,}(?=\./|scons\b|ncu\b|build/)(.+(?:\n {20,}\[.*)*)", ALL, re.MULTILINE)
COMMANDS = [
    command.strip()
    for block in BLOCKS
    for command in re.split(r"&&", re.sub(r"  +#.*", "", block))
]
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def lesson_in(command):
    """(name, its part of the command) if the command runs a lesson."""
    match = re.search(r"(?:\./|build/[\w-]+/)((?:\d+|bonus)_\w+)(.*)", command, re.DOTALL)
    return (match[1], match[2]) if match else None


LESSON_COMMANDS = sorted({lesson_in(command) for command in COMMANDS if lesson_in(command)})


def slug(heading):
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(text):
    return {slug(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


ANCHORS = anchors(README)


def test_there_is_something_to_check():
    assert {name for name, _ in LESSON_COMMANDS} == set(PROGRAMS)
    assert sum(command.startswith("scons") for command in COMMANDS) >= 4
    assert sum(command.startswith("ncu") for command in COMMANDS) >= 2


@pytest.mark.parametrize("name, arguments", LESSON_COMMANDS, ids=lambda value: value)
def test_lesson_takes_the_options(name, arguments, tmp_path):
    """What is in brackets is optional, and need not go together: its options have to exist."""
    optional = " ".join(re.findall(r"\[(.*?)\]", arguments))
    required = shlex.split(re.sub(r"\[.*?\]", "", arguments, flags=re.DOTALL))
    known = OPTION.findall(execute([program(name), "--help"]).stdout.replace(",", " "))
    assert set(OPTION.findall(optional)) <= set(known)
    result = execute([program(name), *required, "--list"], cwd=tmp_path)
    assert result.rc == 0, result.stderr


@pytest.mark.parametrize(
    "command", sorted({c for c in COMMANDS + re.findall("`(.*?)`", ALL) if c.startswith("scons ")})
)
def test_scons_takes_the_words(command):
    for word in command.split()[1:]:
        if word.startswith("-"):
            assert word == "-h"
        elif "=" in word:
            assert f'ARGUMENTS.get("{word.split("=")[0]}"' in SCONS
        elif word.startswith("build/"):
            assert (ROOT / f"{word.split('/', 2)[2]}.cu").exists()
        elif word not in (*PROGRAMS, "LESSON"):
            assert f'\ncommand("{word}"' in SCONS


def test_what_a_laptop_prints_is_shown():
    """But for the error, whose last digit is the compiler's."""
    (shown,) = re.findall(r"^\*\*Without a GPU\*\*, .*?`\./1_matmul_basic 64`.*?^```text\n(.*?)^```", README,
                          re.MULTILINE | re.DOTALL)
    printed = execute([program("1_matmul_basic"), "64", "--device", "cpu"]).stdout
    error = re.compile(r" \S+e-\d\d ok")
    assert error.sub("", shown) in error.sub("", printed)


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lesson_has_a_section(lesson):
    row = re.search(rf"^\| \[{lesson}\]\(#(.*?)\) \| \S.* \|$", README, re.MULTILINE)
    assert row and row[1] in ANCHORS
    sections = {slug(text.split("\n")[0]): text for text in README.split("\n## ")}
    section = sections[row[1]]
    assert f"\n    ./{lesson}" in section
    # Outside of the core path the questions are on the lesson's page.
    page = f"docs/lessons/{lesson}.md"
    assert "\n*To think about:*" in section or f"]({page})" in section and "\n*To think about:*" in PAGES[page]


@pytest.mark.parametrize("page", [page for page in PAGES if page == "README.md" or "/lessons/" in page])
def test_answers_are_folded_away(page):
    assert PAGES[page].count("*To think about:*") == PAGES[page].count("<details><summary>Answer")


def test_sections_stand_in_the_order_of_the_table():
    order = re.findall(r"^\| \[(\w+)\]\(#(.*?)\)", README, re.MULTILINE)
    assert [lesson for lesson, _ in order] == sorted(
        LESSONS, key=lambda name: (name.startswith("bonus"), int(re.sub(r"\D.*", "", name) or 0))
    )
    headings = [slug(heading) for heading in re.findall(r"^## (.*)", README, re.MULTILINE)]
    positions = [headings.index(anchor) for _, anchor in order]
    assert positions == sorted(positions)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        path = (ROOT / page).parent / path if path else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


def test_pictures_are_what_the_script_draws():
    result = execute([sys.executable, ROOT / "docs" / "pictures" / "draw.py", "--check"])
    assert result.rc == 0, result.stderr


def test_pictures_can_be_read_on_a_dark_page():
    """A file of their own, on a background of their own; plots have theirs by matplotlib."""
    pictures = {path for page, text in PAGES.items()
                for path in re.findall(r"^!\[.+?\]\((\S+\.svg)\)", text, re.MULTILINE)
                if "results/" not in path}
    assert len(pictures) > 10
    for path in {*(ROOT / "slides").glob("*.svg"), *(ROOT / "docs" / "pictures").glob("*.svg")}:
        text = path.read_text()
        assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"'), path
        width, height = re.search(r' width="(\d+)" height="(\d+)"', text).groups()
        assert re.search(r'<rect (?:x="-\d+" y="-\d+" )?width="\d+" height="\d+" fill="#fff"/>', text), path
        assert float(width) <= 1150 and float(height) <= 520, path


def test_readme_leads_to_every_page():
    for page in PAGES:
        assert page == "README.md" or re.search(rf"\]\({re.escape(page)}[#)]", README), page


def test_pages_are_a_book():
    """The index has every page by its title, and each page ends with the way to its neighbours."""
    titles = {path: text.split("\n")[0].removeprefix("# ") for path, text in PAGES.items()}
    of_docs = {path.removeprefix("docs/"): title for path, title in titles.items()
               if path.startswith("docs/") and path != "docs/README.md"}
    assert {path: title for title, path in book.pages()} == of_docs
    for page, text in book.written().items():
        assert page.read_text() == text, f"{page.name}: tests/texts/book.py --write"


def test_tables_are_narrow():
    """A page of a browser shows so many columns."""
    for line in README.splitlines():
        assert not line.startswith("|") or line.count("|") <= 9, line  # 8 columns


def test_readme_is_for_one_evening():
    """What goes further than a first reading stands on a page of its lesson."""
    assert len(README.splitlines()) <= 1100


def test_lines_fit():
    """But for those that cannot be broken: tables, their markers, and what a table begins with."""
    for page, text in PAGES.items():
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= 120 or re.match(r" *(\||NVIDIA |<!-- |h\d00\S*/)", line), (page, number)


def test_core_path_is_marked():
    """In the list of lessons, and in the sections that it names."""
    core = re.findall(r"^\| \[(\w+)\]\(#(.*?)\) \| .* \| core", README, re.MULTILINE)
    assert [lesson.split("_")[0] for lesson, _ in core] == ["1", "2", "3", "5", "6", "7"]
    sections = {slug(text.split("\n")[0]): text for text in README.split("\n## ")}
    for anchor in (*(anchor for _, anchor in core), "cuda-c-in-one-page", "the-roofline"):
        assert re.search(r"^\*Core path(, kernels .*?)?\.\* ", sections[anchor], re.MULTILINE), anchor


def test_program_of_the_one_page_compiles(tmp_path):
    """On the CPU backend, as the lessons are."""
    (code,) = re.findall(r"^```cpp\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert max(len(line) for line in code.splitlines()) <= 120
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    source = tmp_path / "scale.cc"
    source.write_text(translate(code, "scale.cu"))
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-result"]
    result = execute([*command, f"-I{ROOT / 'cpu' / 'include'}", f"-I{ROOT}", source])
    assert result.rc == 0, result.stderr


def test_files_that_are_named_exist():
    names = set(re.findall(r"`(\w[/\w.-]*\.(?:cu|cuh|h|py|md|sh|json|ipynb))`", ALL))
    names |= set(re.findall(r"`((?:common|primitives|operators|problems|cpu|exercises|docs|results|tests|notebooks|slides|peers)/[\w./-]*)`", ALL))
    assert len(names) >= 10
    for name in names - {"11_name.cu", "scale.cu", "slides/build/slides.html", "exercises/my/"}:
        assert (ROOT / name).exists(), name


EXPLAINED = re.findall(
    r"^\| `(.*?)`.* \|$", PAGES["docs/trouble.md"], re.MULTILINE
)


def explained(message, text):
    """Whether the table of errors has this message, and the program prints it; ... stands for more."""
    assert message in EXPLAINED
    return re.search(re.escape(message).replace(r"\.\.\.", ".*"), text)


@pytest.mark.parametrize(
    "message, name, arguments, rc",
    [
        ("No usable GPU: running on the CPU backend with N = ...", "1_matmul_basic", ["8"], 0),
        ("error: --device cuda: this is the CPU build", "1_matmul_basic", ["--device", "cuda"], 3),
        ("error: N = ... needs ... of device memory ..., ... are free", "1_matmul_basic",
         ["200000", "--device", "cpu"], 3),
        ("needs a GPU of compute capability 9.0", "3_matmul_tensorcore", ["8"], 0),
        ("needs 102 KB of shared memory a block", "bonus_clifford_fully_connected",
         ["8", "--features", "12"], 0),
        ("FAILED (tolerance ...)", "tests/lessons/broken_kernels", ["8", "--samples", "1"], 1),
        ("error: ... (see --help)", "1_matmul_basic", ["--size", "8"], 2),
    ],
)
def test_message_is_explained(message, name, arguments, rc):
    result = execute([program(name), *arguments], env={"CUDA_CPU_COMPUTE_CAPABILITY": "86"})
    assert result.rc == rc
    assert explained(message, result.stdout + result.stderr)


def test_messages_of_the_build_are_explained():
    (least,) = re.findall(r"LEAST_CUDA, .* = \((\d+, \d+)\)", SCONS)
    least = least.replace(", ", ".")
    assert f"the CUDA toolkit ({least} or newer)" in README
    text = SCONS.replace("{dotted(release)}", "12.2").replace("{dotted(LEAST_CUDA)}", least)
    assert explained(f"... is CUDA 12.2; the lessons need {least} or newer", text)
    assert explained("... knows no compute capability 6.1", SCONS.replace("{number / 10}", "6.1"))
    assert explained("the lessons need compute capability 7.5", SCONS.replace("{LEAST_GPU / 10}", "7.5"))
    message = "install.sh knows Debian and Ubuntu only"
    assert explained(message, (ROOT / "install.sh").read_text())


def test_glossary_explains_what_is_used():
    glossary = PAGES["docs/glossary.md"]
    text = ALL.replace(glossary, "")
    terms = [
        term for line in re.findall(r"^- (.*?): ", glossary, re.MULTILINE)
        for bold in re.findall(r"\*\*(.*?)\*\*", line) for term in bold.split(", ")
    ]
    assert len(terms) > 30
    text = " ".join(text.lower().split())
    for term in terms:
        assert term.lower() in text, term


@pytest.fixture
def update_readme(tmp_path, monkeypatch):
    """results/update_readme.py, for records of one run with easy numbers."""
    monkeypatch.syspath_prepend(ROOT / "results")
    import update_readme

    kernel = {"name": "a = b", "ms": {"median": 4.0}, "tflops": 50.0, "gbps": 200.0,
              "percent_of_limit": 25.0}
    problem = {"name": "two words", "dims": {"M": 8, "K": 2}, "flops": 600.0, "min_bytes": 3.0,
               "limit_ms": 1.5, "kernels": [kernel]}
    run = {"lesson": "5_x", "device": {"sms": 7}, "problems": [problem]}
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    (tmp_path / "results" / "gpu" / "5_x.json").write_text(json.dumps(run))
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    return update_readme


@pytest.mark.parametrize(
    "what, text",
    [
        (" | 2 * (M + 3 * K) * device.sms", "196.0"),
        (" | flops / min_bytes | .0f", "200"),
        (" | limit_ms", "1.500"),
        (": a = b | ms", "4.000"),
        (": a = b | 2 * ms | .0f", "8"),
        (": a = b | 1e2 * tflops / percent_of_limit", "200.0"),
    ],
)
def test_formula(update_readme, what, text):
    assert update_readme.number_of(f"formula gpu/5_x two words{what}") == text


@pytest.mark.parametrize("formula", ["N", "open('x')", "__import__('os')", "tflops"])
def test_formula_names_only_what_is_recorded(update_readme, formula):
    with pytest.raises(NameError):
        update_readme.formula(f"gpu/5_x two words | {formula}")


TIMED = {"ms": {"median": 4.0, "mode": "cold", "samples": 9}, "speedup": 1.0, "error": 1e-6,
         "memory_bytes": 2e6, "tflops": 50.0, "gbps": 200.0, "percent_of_limit": 25.0,
         "resources": {"threads": 64, "registers": 99, "local_bytes": 16, "blocks_per_sm": 3}}


@pytest.fixture
def recorded(update_readme):
    """The same with all that a table shows, and two kernels."""
    path = update_readme.ROOT / "results" / "gpu" / "5_x.json"
    run = json.loads(path.read_text())
    run |= {"commit": "0123456789", "device": {"name": "G"}}
    slow = {"name": "slow", **TIMED, "ms": {**TIMED["ms"], "median": 8.0}}
    run["problems"][0] |= {"kernels": [slow, {"name": "a = b", **TIMED}], "limit": "memory", "dtype": "fp32"}
    path.write_text(json.dumps(run))
    return update_readme


@pytest.mark.parametrize("memory, left_out", [(2e6, 3), (None, 2)])
def test_table_has_8_columns(recorded, memory, left_out):
    path = recorded.ROOT / "results" / "gpu" / "5_x.json"
    run = json.loads(path.read_text())
    for kernel in run["problems"][0]["kernels"]:
        kernel["memory_bytes"] = memory
    path.write_text(json.dumps(run))
    short, full = (
        [line.split(" | ") for line in recorded.MARKER.sub(
            recorded.render, f"<!-- {kind} gpu/5_x two words -->\n<!-- end -->").splitlines()[3:]]
        for kind in ("table", "full")
    )
    assert len(short[0]) == 8 == len(full[0]) - left_out
    assert short[0][0] == "| kernel" and short[0][-1] == "warps/SM |" == full[0][-1]
    assert short[2][-1] == full[2][-1] == "6 |"
    assert "spilled, B" in full[0] and "spilled, B" not in short[0]


def test_table_has_no_bytes_of_another_way_than_the_timed_one(recorded):
    path = recorded.ROOT / "results" / "gpu" / "5_x.json"
    run = json.loads(path.read_text())
    for kernel, way in zip(run["problems"][0]["kernels"], ("wide", "narrow")):
        kernel["way"] = way
    path.write_text(json.dumps(run))
    for kernel in run["problems"][0]["kernels"]:
        kernel |= {"way": "wide", "counts": {"dram_read_bytes": 3e9, "dram_write_bytes": 1e9, "l2_bytes": 7e9}}
    (recorded.ROOT / "results" / "g" / "counts").mkdir(parents=True)
    (recorded.ROOT / "results" / "g" / "counts" / "5_x.moved.json").write_text(json.dumps(run))
    page = recorded.MARKER.sub(recorded.render, "<!-- full gpu/5_x two words -->\n<!-- end -->")
    assert re.search(r"^\| slow .* \| 4\.000 \| 2\.50 \| 7\.000 \|$", page, re.M)
    assert re.search(r"^\| a = b .* \|  \|  \|  \|$", page, re.M)


def test_rows_marker(recorded):
    marker = "<!-- rows gpu/5_x two words: a = b\ngpu/5_x two words: slow -->"
    page = recorded.MARKER.sub(recorded.render, f"{marker}\n<!-- end -->")
    assert "G, M = 8, K = 2. Cold L2 cache, median of 9; commit 012345678.\n" in page
    assert "| a = b | 4.000 | 50.00 | 200.0 | 1.500 | 25.0 | 1.0e-06 |\n| slow | 8.000 |" in page


def test_sizes_marker(recorded):
    marker = "<!-- sizes before | after\ngpu/5_x two words: slow | a = b -->"
    page = recorded.MARKER.sub(recorded.render, f"{marker}\n<!-- end -->")
    assert "G. Cold L2 cache, median of 9; commit 012345678.\n\n| problem | limit | before | after | before / after |\n" in page
    assert "| two words, M = 8, K = 2 | 1.500 ms | 8.000 ms | 4.000 ms | 2.00x |\n" in page


def test_sizes_that_were_timed_in_different_ways(recorded):
    """Small problems in graphs, others not; other numbers of samples, another commit."""
    path = recorded.ROOT / "results" / "gpu" / "5_x.json"
    run = json.loads(path.read_text())
    run["commit"] = "abcdefabcd"
    run["problems"][0]["limit_ms"] = 0.5
    for kernel in run["problems"][0]["kernels"]:
        kernel["ms"] |= {"mode": "graph", "samples": 5}
    path.with_name("5_small.json").write_text(json.dumps(run))
    marker = "<!-- sizes a\ngpu/5_x two words: slow\ngpu/5_small two words: slow -->"
    page = recorded.MARKER.sub(recorded.render, f"{marker}\n<!-- end -->")
    assert ("G. 20 calls in a CUDA graph, per call; the longer ones with a cold L2 cache, median of 5 to 9; "
            "commits 012345678, abcdefabc.\n") in page


@pytest.mark.parametrize(
    "name, dims, text",
    [
        ("bf16 full", {"batch": 16, "S": 1}, "bf16 full, batch = 16, S = 1"),
        ("TF32 64x128x10", {"B": 64, "D": 128, "C": 10}, "TF32 64x128x10"),
        ("TF32 64x128x10", {"B": 64, "D": 128, "C": 1}, "TF32 64x128x10, B = 64, D = 128, C = 1"),
    ],
)
def test_no_dim_is_left_out_of_a_name(update_readme, name, dims, text):
    """A dim's digits may occur in a name that does not tell the dim, as 16 does in bf16."""
    assert update_readme.name_with_dims({"name": name, "dims": dims}) == text


def test_points_marker(update_readme):
    marker = "<!-- points\ngpu/5_x two words: a = b\ngpu/5_x two words: a = b -->"
    page = update_readme.MARKER.sub(update_readme.render, f"{marker}\n<!-- end -->")
    assert page.count("| 5 | two words | a = b | 250.0 | 50.00 | 200.0 |\n") == 2
    assert page.endswith("|\n<!-- end -->")


def test_python_marker(update_readme):
    kernels = [{"name": name, "ms": {"median": ms}} for name, ms in (("PyTorch", 0.3), ("compiled", 0.15), ("ours", 0.1))]
    folder = update_readme.ROOT / "results" / "gpu" / "python"
    folder.mkdir()
    (folder / "times.json").write_text(json.dumps({
        "device": {"name": "A GPU"}, "pytorch": "2.11", "problems": [{"name": "gated layer", "kernels": kernels}]}))
    page = update_readme.MARKER.sub(update_readme.render, "<!-- python gpu/python/times -->\n<!-- end -->")
    assert "A GPU, PyTorch 2.11.\n" in page
    assert "| gated layer | 300.0 us | 150.0 us | 100.0 us | 3.00x | 1.50x |\n" in page


def test_choice_marker(update_readme):
    """A function beside which there is no library has cells without a number."""
    folder = update_readme.ROOT / "results" / "gpu" / "python"
    folder.mkdir()
    own = {"shapes": 200, "geometric_mean": 1.0123, "above_1.1": 0.025, "worst": 1.333}
    beside = {"library_shapes": 150, "library_geometric_mean": 1.5, "library_below_0.95": 0.1, "library_worst": 0.8}
    flash = {"flash_shapes": 9, "flash_geometric_mean": 1.25, "flash_below_0.95": 0.0, "flash_worst": 0.96}
    named = {"named": {"197 queries": own | beside}}
    (folder / "choice.json").write_text(json.dumps({
        "device": {"name": "A GPU"}, "pytorch": "2.11", "functions": {
            "gated layer": own, "product": own | beside, "attention": own | beside | flash | named}}))
    page = update_readme.MARKER.sub(update_readme.render, "<!-- choice gpu/python/choice -->\n<!-- end -->")
    assert "A GPU, PyTorch 2.11.\n" in page
    assert "| gated layer | 200 | 1.012 | 2.5% | 1.33 |  |  |  |\n" in page
    assert "| product | 200 | 1.012 | 2.5% | 1.33 | 1.50 | 10% | 0.80 |\n" in page
    assert "| attention, beside FlashAttention | 9 |  |  |  | 1.25 | 0% | 0.96 |\n" in page
    assert "| attention, 197 queries | 200 | 1.012 | 2.5% | 1.33 | 1.50 | 10% | 0.80 |\n" in page


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_read_by_who_edits_it(page):
    """A comment is a line of its own, or lines; inside a sentence or a table's row there is none."""
    for number, line in enumerate(PAGES[page].splitlines(), 1):
        assert "<!--" not in line.removeprefix("<!-- "), number
        assert "-->" not in line or re.match(r" *(<!-- |h\d00\S*/).* -->$", line), number


def test_workflow_runs_the_command_of_the_readme():
    (command,) = re.findall(r"^    (\./install\.sh all && scons test)\s", README, re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    for line in (command, "scons test-all"):
        assert re.search(rf"^      - run: {re.escape(line)}$", workflow, re.MULTILINE)
    assert re.search(r"^ +- uses: actions/checkout@v\d+\.\d+\.\d+$", workflow, re.MULTILINE)
    assert re.search(r"^ +runs-on: ubuntu-\d\d\.\d\d$", workflow, re.MULTILINE)
    assert re.search(r"^on:\n  push:\n  pull_request:\n", workflow, re.MULTILINE)
