#!/usr/bin/env python3
"""How long a newcomer waits: the README's commands, timed in fresh clones of this repository's HEAD.

    tests/first_minutes.py [FOLDER]

The clones are made, used and deleted in FOLDER (default: the system's folder for such things).
install.sh should have run once before, so that nothing is downloaded; what it installed may be there.
Every output goes to FOLDER/first_minutes.log. Nothing is tested: a machine may be busy.
"""

import argparse
from pathlib import Path
import shutil
import subprocess
import tempfile
import time

ROOT = Path(__file__).resolve().parents[1]
# What, the command, and the most minutes that it should take on two cores.
COMMANDS = [
    ("install.sh with nothing to do", "./install.sh all", 1 / 60),
    ("clone to the first table", "./install.sh && scons && ./6_gating_fused 4096", 3),
    ("the same, built for a GPU, too", "./install.sh && scons arch=90a && ./6_gating_fused 4096", 5),
    ("clone to passed tests", "./install.sh all && scons test", 8),
]


def seconds_of(command, folder, log):
    """Clones, then runs the command there; returns how long both took."""
    start = time.monotonic()
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    print(f"$ {command}", file=log, flush=True)
    subprocess.run(command, shell=True, check=True, cwd=clone, stdout=log, stderr=log)
    seconds = time.monotonic() - start
    shutil.rmtree(clone)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()), metavar="FOLDER")
    folder = parser.parse_args().folder.resolve()
    if not folder.is_dir():
        parser.error(f"{folder} is no folder")
    with open(folder / "first_minutes.log", "w") as log:
        for what, command, limit in COMMANDS:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                seconds = seconds_of(command, Path(place), log)
            print(f"{seconds:7.1f} s of {60 * limit:3.0f}  {what}: {command}", flush=True)


if __name__ == "__main__":
    main()
