"""The table of the library's functions in docs/library.md, made from its header: `docs/functions.py` renews it."""

import argparse
from pathlib import Path
import re

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "operators/include/fused_kernels.h"
PAGE = ROOT / "docs/library.md"
MARKS = "<!-- functions -->\n", "<!-- /functions -->"


def functions():
    """(name, the comment above it) of each function that the header declares, those of an operator together."""
    found = re.findall(r"/\*((?:(?!\*/).)*)\*/\nFK_API [^;]*?(fk_\w+)\(", HEADER.read_text(), re.DOTALL)
    operators = []  # in the order of the header, whose newest functions stand at its end
    for _, name in found:
        operators += [operator_of(name)] * (operator_of(name) not in operators)
    found.sort(key=lambda each: operators.index(operator_of(each[1])))
    return [(name, re.sub(r"\s*\n \*\s*", " ", text).strip()) for text, name in found]


def operator_of(name):
    """fk_gating of fk_gating_backward_workspace."""
    return re.sub(r"(_forward|_backward)?(_workspace)?$", "", name)


def table():
    blocks = []
    for name, text in functions():
        if name.endswith("_workspace") and name != "fk_plan_workspace":
            continue  # a sentence above the table tells of these
        first, _, _ = text.partition(". ")
        blocks.append(f"| `{name}` | {first.rstrip('.').replace('|', '/')}. |")
    return "\n".join(["| function | what it does |", "|---|---|", *blocks]) + "\n"


def page():
    """docs/library.md with the table as the header has it now."""
    before, rest = PAGE.read_text().split(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
