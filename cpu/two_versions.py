"""Two versions of each function of a program that ./try builds: with hooks, and quick.

The compiler calls a hook before each load and store of the first one (cpu/watch/hooks.h), which costs several times
what the access does, and is optimized less. The second one is what -O2 makes of the same source. A function of the
first version begins with a jump to that of the second one, unless the calling thread counts (hook_use). So what the
host does is quick, and so is a kernel that is no longer counted.

Both are put together in assembly language, as two object files. Variables are the first one's. A function's address is
that of its first version, wherever it is taken.

Where the program's own variables begin is marked, for cpu/watch/repeats.cpp: in the first source.
"""

import re

_TYPE = re.compile(r"^\t\.type\t(\S+), @(function|object|gnu_unique_object)$", re.MULTILINE)
_COMMON = re.compile(r"^\t\.comm\t([^,\s]+),", re.MULTILINE)
_GLOBAL = re.compile(r"^\t\.(?:globl|weak)\t(\S+)$", re.MULTILINE)
_LOCAL = re.compile(r"^\t\.local\t(\S+)$", re.MULTILINE)
_LABEL = re.compile(r"^([A-Za-z_$][\w.$]*):", re.MULTILINE)
_SET = re.compile(r"^\t\.set\t([^,\s]+),\s*(\S+)$", re.MULTILINE)
_NAME = re.compile(r"(?<![\w.%@])[A-Za-z_$][\w.$]*")
_JUMP = re.compile(r"\t(?:call|j[a-z]+)\t\s*([A-Za-z_$][\w.$]*)")
_COMDAT = re.compile(r"(?<=,)([^,\s]+)(?=,comdat)")
_HOOK = re.compile(r"\tcall\t__tsan_(?:unaligned_)?(?:read|write)\d+(?:@PLT)?$")
_WAITS = re.compile(r"__tsan_(?:unaligned_)?volatile_read")
_MARKS = ["\t.weak\tcuda_cpu_data_begins, cuda_cpu_bss_begins", "\t.data", "cuda_cpu_data_begins:", "\t.bss",
          "cuda_cpu_bss_begins:", "\t.text"]
_USE = "%fs:_ZN8cuda_cpu8hook_useE@tpoff"  # 1: all is counted, 2: nothing is


class _Names:
    """What a piece of assembly language defines."""

    def __init__(self, text):
        types = dict(_TYPE.findall(text))
        labels, sets = set(_LABEL.findall(text)), dict(_SET.findall(text))
        commons = set(_COMMON.findall(text))
        self.aliases = sets
        self.functions = {name for name, kind in types.items() if kind == "function" and name in labels | sets.keys()}
        # A constructor outside of its class has two names, and only the first one has a type.
        while more := {name for name, of in sets.items() if of in self.functions} - self.functions:
            self.functions |= more
        self.objects = commons | {name for name, kind in types.items() if kind != "function" and name in labels}
        self.globals = set(_GLOBAL.findall(text)) | (commons - set(_LOCAL.findall(text)))


def _renamed(line, names):
    """The line, with other names for some symbols."""
    if line.startswith(("\t.string", "\t.ascii", "\t.file", "\t.ident")):
        return line
    begin = 0
    if line.startswith("\t") and not line.startswith("\t."):  # what an instruction is called is no symbol
        begin = line.find("\t", 1) + 1 or len(line)
    return line[:begin] + _NAME.sub(lambda match: names.get(match[0], match[0]), line[begin:])


def _waiting(lines, names):
    """Functions with loads of volatile variables, and those that call them. Such a load lets other threads go on, so
    they have only the first version."""
    calls, waits, current = {}, set(), None
    for line in lines:
        if (label := _LABEL.match(line)) and label[1] in names.functions:
            current = label[1].removesuffix(".cold")
        elif current and _WAITS.search(line):
            waits.add(current)
        elif current and (jump := _JUMP.match(line)):
            calls.setdefault(jump[1], set()).add(current)
    for alias, name in names.aliases.items():
        calls.setdefault(name, set()).add(alias)
    new = set(waits)
    while new:
        new = {caller for name in new for caller in calls.get(name, ())} - waits
        waits |= new
    return waits


def two_versions(hooked: str, quick: str, unit: str) -> tuple:
    """The assembly language for x86-64 of a source with hooks and without, as two that are linked together. `unit` is
    a word that no other source of the program has."""
    first, second = _Names(hooked), _Names(quick)
    # Clones that the optimizer makes, such as f.part.0, are each version's own.
    functions = {name for name in first.functions & second.functions if "." not in name}
    objects = {name for name in first.objects & second.objects if "." not in name}
    own = {name: f"{name}..{unit}" for name in (functions | objects) - first.globals}
    lines = hooked.splitlines()
    waiting = _waiting(lines, first)
    jumps = (functions & set(_LABEL.findall(hooked))) - waiting

    result, current, number = [*_MARKS, *(f"\t.globl\t{name}\n\t.hidden\t{name}" for name in own.values())], None, 0
    for line in lines:
        if line.startswith("\t.local\t") and line[8:] in own:
            continue
        label = _LABEL.match(line)
        if label and label[1] in first.functions:
            current = label[1].removesuffix(".cold")
        if current in waiting and _HOOK.match(line):
            number += 1
            line = f"\tcmpb\t$1, {_USE}\n\tjne\t.Lno_hook_{number}\n{line}\n.Lno_hook_{number}:"
        result.append(_renamed(line, own))
        if label and label[1] in jumps:
            result.append(f"\tcmpb\t$2, {_USE}\n\tje\t{own.get(label[1], label[1])}..quick")

    def quick_name(name):
        return f"{own.get(name, name)}..quick"

    called = {name: quick_name(name) for name in second.functions if name not in waiting}
    called |= {name: own.get(name, name) for name in second.functions & waiting}
    defined = {name: quick_name(name) for name in second.functions}
    taken = {name: own.get(name, name) if name in functions else quick_name(name) for name in second.functions}
    for names in (called, defined, taken):
        names.update({name: new for name, new in own.items() if name in objects})
    defined_objects = {name: f"{name}..unused" for name in objects}
    other = [f"\t.globl\t{quick_name(name)}\n\t.hidden\t{quick_name(name)}" for name in own if name in functions]
    starts_up = False
    for line in quick.splitlines():
        if line.startswith("\t.section\t"):
            starts_up = line.startswith(("\t.section\t.init_array", "\t.section\t.fini_array"))
            other.append(_COMDAT.sub(r"\1..quick", line))
            continue
        if line in ("\t.text", "\t.data", "\t.bss"):
            starts_up = False
        if starts_up and line.startswith("\t.quad"):
            continue
        words = re.split(r"[\t ,]+", line.strip(), maxsplit=2)
        if words[0] in (".globl", ".weak", ".type", ".size", ".local", ".comm", ".hidden") and words[1] in objects:
            continue
        if label := _LABEL.match(line):
            new = {**defined, **defined_objects}.get(label[1], label[1])
            other.append(new + line[label.end(1) :])
        elif _JUMP.match(line):
            other.append(_renamed(line, called))
        elif words[0] in (".globl", ".weak", ".type", ".size", ".local", ".hidden", ".set"):
            other.append(_renamed(line, defined))
        else:
            other.append(_renamed(line, taken))
    return "\n".join(result) + "\n", "\n".join(other) + "\n"
