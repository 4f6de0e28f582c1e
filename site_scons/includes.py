"""Who includes whom: what a program is made of, as SConstruct links it and as a test holds it to the rule."""

import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".cu", ".cpp")


def sources_of(*folders, suffixes=SOURCES):
    """The files below some folders, by name from the root."""
    return sorted(str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*")
                  if file.suffix in suffixes)


@lru_cache(maxsize=None)
def included_by(file):
    """The files of ours that `file` (a name from the root) includes itself; none if it is not there."""
    path = ROOT / file
    text = path.read_text(errors="replace") if path.exists() else ""
    names = re.findall(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', text, re.MULTILINE)
    return tuple(name for name in dict.fromkeys(names) if (ROOT / name).exists())


def closure(*files):
    """These files, and all that they include, in the order in which they are met."""
    met, waiting = {}, list(files)
    while waiting:
        file = waiting.pop(0)
        if file not in met:
            met[file] = True
            waiting += included_by(file)
    return list(met)


@lru_cache(maxsize=None)
def beside(header):
    """The sources of ours that stand beside a header."""
    sources = [str(Path(header).with_suffix(suffix)) for suffix in SOURCES] if header.endswith(".h") else []
    return tuple(source for source in sources if not source.startswith("cpu/") and (ROOT / source).exists())


def linked_sources(program):
    """What `program` (a source) is linked with: the source beside each header that is included."""
    linked, files = [], [program]
    while True:
        headers = closure(*files)
        new = [source for header in headers for source in beside(header) if source not in files]
        if not new:
            return linked
        linked += dict.fromkeys(new)
        files = [program, *linked]
