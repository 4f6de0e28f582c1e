#!/usr/bin/env python3
"""What each page of docs/ ends with: the way to the page before it and to the next, in the order of docs/README.md.

    tests/texts/book.py --write    writes the last lines of all pages
"""

import argparse
import os
from pathlib import Path
import re

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOOT = re.compile(r"\n*<!-- book -->\n.*\Z", re.DOTALL)


def pages():
    """[(title, path from docs/)] in the order of the index."""
    return re.findall(r"^\d+\. \[(.*?)\]\((.*?)\)$", (DOCS / "README.md").read_text(), re.MULTILINE)


def foot(number, order):
    """The last lines of the page of that number."""
    def link(to, says):
        return f"[{says}]({os.path.relpath(DOCS / to, (DOCS / order[number][1]).parent)})"

    before = link(*reversed(order[number - 1])) if number else link("../README.md", "The walkthrough")
    ways = [f"← {before}", link("README.md", "All pages")]
    if number + 1 < len(order):
        ways.append(f"{link(*reversed(order[number + 1]))} →")
    return "\n\n<!-- book -->\n---\n\n" + " ·\n".join(ways) + "\n"


def written():
    """{page: its text with the right last lines}."""
    order = pages()
    return {DOCS / path: FOOT.sub("", (DOCS / path).read_text()).rstrip("\n") + foot(number, order)
            for number, (_, path) in enumerate(order)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    for page, text in written().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
