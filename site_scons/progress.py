"""What the build prints: a line a file, with how far it is."""

import threading

from SCons.Node.Alias import default_ans as aliases
from SCons.Script import BUILD_TARGETS, Action, Entry, Progress

_wanted, looked_at = set(), set()  # nodes
_printing = threading.Lock()


def show(command, target, source, env):
    """Prints an action, and how many of the files that were asked for have been looked at so far."""
    with _printing:  # several threads do
        _print_with_count(command)


def _print_with_count(command):
    nodes = [] if _wanted else [
        aliases.lookup(each) or Entry(each) if isinstance(each, str) else each
        for each in BUILD_TARGETS
    ]
    while nodes:
        node = nodes.pop()
        if node.has_builder() and node not in _wanted:
            _wanted.add(node)
            nodes += [*(node.sources or []), *(node.depends or [])]  # None: is up to date
    count = max(1, len(_wanted & looked_at))
    print(f"[{count:{len(str(len(_wanted)))}}/{len(_wanted)}] {command}", flush=True)


def start():
    Progress(looked_at.add)


def says(short, command, verbose):
    """The action, shown as `short`; or as what it is."""
    return Action(command) if verbose else Action(command, short)
