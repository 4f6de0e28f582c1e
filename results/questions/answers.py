"""What the scripts of this folder have in common: records with one small table each.

A record is {"device": {"name": ...}, "commit": ..., "caption": how it was measured, "columns": [...], "rows": [[name,
number, ...], ...]}. results/update_readme.py makes a table of it (`answer RECORD`). A cell that is None stays empty.
The commit is that of the program that measured, or of this folder; or, where this is no clone, what COMMIT says.
"""
import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "results"))
from commit import commit_of  # noqa: E402
from record import as_text, load_run, need_programs, write_whole  # noqa: E402,F401


def parser_of(description):
    """A parser with what all of these scripts take: --bin, the programs' folder, and --json, the record's file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "cuda",
                        help="instead of build/cuda")
    parser.add_argument("--json", type=pathlib.Path, help="write the record to this file")
    return parser


def finish(path, device, commit, caption, columns, rows, **more):
    """Prints the table, and writes the record if there is a path, with what else is named."""
    print(f"{device}. {caption}")
    width = max(len(row[0]) for row in rows)
    print(f"{'':{width}}", *(f"{column:>14.14}" for column in columns[1:]))
    for name, *cells in rows:
        shown = ["" if cell is None else cell if isinstance(cell, str) else f"{cell:.5g}" for cell in cells]
        print(f"{name:{width}}", *(f"{cell:>14}" for cell in shown), flush=True)
    if path:
        commit = commit or os.environ.get("COMMIT") or commit_of(".")
        record = {"device": {"name": device}, "commit": commit, "caption": caption, "columns": columns, "rows": rows}
        write_whole(path, as_text(record | more, width=100))
