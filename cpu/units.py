"""Which of the backend's sources are compiled together: those of a folder, as their headers take most of the time."""

from pathlib import PurePath

APART = "c"  # names functions anew, which the others call
# GCC warns of types in a namespace without a name where a file is included, as others might include it, too.
QUIET = """#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#endif
"""
# In these folders is what a kernel runs in; the others need not be fast.
OF_KERNELS = ("execution", "hopper", "library")


def runs_kernels(source):
    return PurePath(source).parent.name in OF_KERNELS


def units(sources, runs_threads):
    """{name: its sources}, of paths that end in FOLDER/SOURCE. `runs_threads` says of a source whether it has the flags
    of those."""
    made = {}
    for source in sources:
        folder, threads = PurePath(source).parent.name, runs_threads(source)
        name = f"{folder}/{PurePath(source).stem if folder == APART else 'threads' if threads else 'all'}"
        made.setdefault(name, []).append(source)
    return made


def text_of(sources):
    """The source that is compiled."""
    return QUIET + "".join(f'#include "{source}"\n' for source in sources)
