"""Which commit a build or a record is of."""
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _git(*words):
    """What git prints, or None if it is not there or fails."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_of(*paths):
    """HEAD, with -dirty if these paths differ from it; "unknown" where this folder is not the top of a
    repository: it may have been unpacked inside of another one."""
    if _git("rev-parse", "--show-prefix") != "":
        return "unknown"
    head = _git("rev-parse", "HEAD")
    return head + ("-dirty" if _git("status", "--porcelain", "--", *paths) else "") if head else "unknown"
