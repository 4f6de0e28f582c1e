"""Builds the slides: talk.md -> build/slides.html and build/slides.pdf, by Marp.

    slides/build.py [--source FILE] [--out FOLDER] [--no-pdf]

talk.md is Markdown for Marp, and four things more:

    <!-- code FILE | FROM -->         the lines of FILE from the one that contains FROM to the end
                                      of that function: the next line that starts with }
    <!-- code FILE | FROM | TO -->    to the line within it that contains TO
    <!-- code FILE | IN | FROM | TO -->   FROM is looked for from the line with IN on, in its function
    ![...](FILE.svg)                  becomes a part of the page
    ::: notes ... :::                 the speaker's notes, which every slide needs

FROM, or IN, occurs on one line of FILE, and what is looked for after it on one line from there to the
end of the function; otherwise nothing is built. What results/update_readme.py writes stays, its markers go.
What is to be recorded shows as that.
"""
import argparse
import base64
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
FONTS = (
    ("Inter", 400, "inter/files/inter-latin-400-normal.woff2"),
    ("Inter", 700, "inter/files/inter-latin-700-normal.woff2"),
    ("JetBrains Mono", 400, "jetbrains-mono/files/jetbrains-mono-latin-400-normal.woff2"),
)
# In pixels: the room for code on a page, and its letters.
WIDTH, HEIGHT, LARGEST, SMALLEST = 1152, 590, 25, 18


class Mistake(Exception):
    """What is wrong with talk.md."""


def only_line(where, lines, text):
    """The number of the only line that contains `text`; `where` says in a mistake what the lines are."""
    found = [number for number, line in enumerate(lines) if text in line]
    if len(found) != 1:
        raise Mistake(f"{where}: {len(found)} lines contain '{text}'")
    return found[0]


def snippet(path, *places):
    """Lines of a file, between two places or from one to the end of its function (see above); not
    their common indentation."""
    if not 1 <= len(places) <= 3:
        raise Mistake(f"{path}: a marker of code needs its first line, too: FILE | FROM")
    lines = (ROOT / path).read_text().splitlines()
    lines = lines[only_line(path, lines, places[0]) :]
    # Of the function: up to the first unindented }, or to the end of the file.
    end = next((i for i, line in enumerate(lines) if line.startswith("}")), len(lines) - 1) + 1
    lines, where = lines[:end], f"{path}, from '{places[0]}'"
    if len(places) == 3:
        lines = lines[only_line(where, lines, places[1]) :]
    if len(places) > 1:
        lines = lines[: only_line(where, lines, places[-1]) + 1]
    return textwrap.dedent("\n".join(lines))


FENCE = re.compile(r"^```\w+\n(.*?)\n```$", re.M | re.S)


def size_code(page):
    """The page with its code blocks as large as its longest line and all their lines allow."""
    blocks = FENCE.findall(page)
    if not blocks:
        return page
    lines = [line for block in blocks for line in block.splitlines()]
    columns = max(map(len, lines))
    room = HEIGHT - 50 * len(blocks)  # around each
    size = min(LARGEST, WIDTH / (0.6 * columns), room / (1.36 * len(lines)))
    if size < SMALLEST:
        raise Mistake(f"{len(lines)} lines of up to {columns} columns of code: too many to be read")
    style = f'class="code" style="font-size: {int(2 * size) / 2:g}px"'
    return FENCE.sub(lambda fence: f"<div {style}>\n\n{fence[0]}\n\n</div>", page)


def picture(alt, path):
    """A drawing as a part of the page; a plot, whose text is outlines, as an image."""
    text = path.read_text()
    if path.parent in (HERE, ROOT / "docs" / "pictures"):
        text = re.sub(r"\s*<title>.*?</title>", "", text)  # `alt` says it
        text = re.sub(r'\s*<text [^>]*class="aside".*?</text>', "", text)  # for who reads
        text = text.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)
        return re.sub(r"\n\s*", "\n", text).strip()
    data = base64.b64encode(text.encode()).decode()
    return f'<img class="plot" alt="{alt}" src="data:image/svg+xml;base64,{data}">'


def expand(text, folder=HERE):
    """talk.md as Markdown that Marp reads; `folder` is where its pictures' paths start."""
    head, *slides = re.split(r"^---\n", text, flags=re.M)[1:] or [""]
    if not slides:
        raise Mistake("there are no slides: each begins with a line ---")
    pages = []
    for number, page in enumerate(slides, 1):
        try:
            pages.append(expand_slide(page, folder))
        except (Mistake, OSError) as error:
            raise Mistake(f"slide {number}: {error}") from error
    return "---\n" + "\n---\n".join([head, *pages])


def expand_slide(page, folder):
    page, notes = re.subn(r"^::: notes\n(.+?)\n:::$", lambda note: f"<!--\n{plain(note[1])}\n-->",
                          page, flags=re.M | re.S)
    if notes != 1:
        raise Mistake(f"{notes} blocks of notes instead of one")
    page = re.sub(r"<!-- code (.+?) -->",
                  lambda code: f"```cpp\n{snippet(*code[1].split(' | '))}\n```", page)
    page = plain(page)
    page = re.sub(r"<!-- to be recorded: .+? -->", '<div class="later">to be recorded</div>', page)
    page = size_code(page)
    return re.sub(r"!\[(.*?)\]\((\S+?\.svg)\)",
                  lambda link: picture(link[1], (folder / link[2]).resolve()), page)


def plain(text):
    """Without the markers of recorded numbers."""
    return re.sub(r"<!-- (?:(?:table|output) .+?|end) -->", "", text)


def theme():
    """theme.css with its fonts inside, so that the pages look the same everywhere."""
    faces = []
    for family, weight, path in FONTS:
        data = base64.b64encode((HERE / "node_modules/@fontsource" / path).read_bytes()).decode()
        faces.append(f"@font-face {{ font-family: '{family}'; font-weight: {weight}; "
                     f"src: url(data:font/woff2;base64,{data}) }}\n")
    return (HERE / "theme.css").read_text() + "".join(faces)


def browser():
    """The path of a Chromium or Chrome; None without one."""
    names = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
    return os.environ.get("CHROME_PATH") or next(filter(None, map(shutil.which, names)), None)


def environment():
    """With what Marp and the check of the pages need to start the browser: as root, no sandbox."""
    sandbox = {"CHROME_NO_SANDBOX": "1"} if os.geteuid() == 0 else {}
    return {**os.environ, **sandbox, "CHROME_PATH": browser() or ""}


def install():
    """node_modules as package-lock.json says, unless it is that already."""
    lock, installed = HERE / "package-lock.json", HERE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(command, cwd=HERE, check=True)
        os.utime(installed)


def build(source, out, pdf=True):
    """Writes slides.md, slides.html, pages.html (all slides in one) and slides.pdf to `out`."""
    slides = expand(source.read_text())
    install()
    out.mkdir(parents=True, exist_ok=True)
    (out / "slides.md").write_text(slides)
    (out / "theme.css").write_text(theme())
    marp = [HERE / "node_modules/.bin/marp", "--no-stdin", "--no-config-file", "--html", "--quiet",
            "--theme", "theme.css", "slides.md"]
    runs = [["-o", "slides.html"], ["--template", "bare", "-o", "pages.html"]]
    for arguments in runs + [["--pdf", "-o", "slides.pdf"]] * pdf:
        subprocess.run([*marp, *arguments], cwd=out, env=environment(), check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=pathlib.Path, default=HERE / "talk.md")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "build")
    parser.add_argument("--no-pdf", action="store_true", help="which needs a browser")
    arguments = parser.parse_args()
    for program, package in (("node", "nodejs"), ("npm", "npm")):
        if not shutil.which(program):
            return f"the slides need {program} (Debian's package {package}; see install.sh)"
    if not arguments.no_pdf and not browser():
        return "a PDF needs Chromium or Chrome (see install.sh); without one: --no-pdf"
    try:
        build(arguments.source.resolve(), arguments.out.resolve(), not arguments.no_pdf)
    except (Mistake, OSError, UnicodeDecodeError) as error:
        return f"error: {error}"
    except subprocess.CalledProcessError as error:
        return f"error: {pathlib.Path(error.cmd[0]).name} failed with exit code {error.returncode}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
