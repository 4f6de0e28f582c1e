"""Which of the backend's sources are compiled together: those of a folder, as their headers take most of the time."""

import hashlib
from pathlib import PurePath

APART = "c"  # names functions anew, which the others call, and has what is another for ./try
# GCC warns of types in a namespace without a name where a file is included, as others might include it, too.
QUIET = """#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#endif
"""
# In these folders is what a kernel runs in; the others need not be fast.
OF_KERNELS = ("execution", "hopper", "library", "warps")


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


def made_of(root):
    """What the backend is made of: its sources, and its headers."""
    patterns = ("cpu/*/*.cpp", "cpu/*/*.h", "cpu/*/*/*.h", "cpu/include/cuda/*")
    return [root / "cpu/units.py", *(file for pattern in patterns for file in sorted(root.glob(pattern)))]


def state_of(root, objects):
    """What no longer is the same when an object or what the backend is made of has changed."""
    state = hashlib.sha256()
    for file in [*made_of(root), *map(root.joinpath, objects)]:
        state.update(hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()


STATE = "build/cpu/obj/cpu/state"  # what SConscript has found last


def ready(root, names):
    """{name: its object} of those units that `scons` has compiled for the lessons, if nothing has changed since."""
    objects = {name: f"build/cpu/obj/cpu/{name}.o" for name in sorted(names) if not name.startswith(f"{APART}/")}
    try:
        same = (root / STATE).read_text() == state_of(root, objects.values())
    except OSError:
        same = False
    return {name: root / each for name, each in objects.items()} if same else {}
