"""What differs between host and device in a program's own functions.

nvcc compiles a source twice: for the host, where __CUDA_ARCH__ is not defined, and for the device. Here it is compiled
once, with __CUDA_ARCH__. So the body of a function that asks for it is compiled without it if the function is the
host's; that of a function for both becomes two, and where the function is called decides which of them runs. Where
macros are defined in both ways, such as

    #ifdef __CUDA_ARCH__
    #define PLACE "device"
    #else
    #define PLACE "host"
    #endif

the host's bodies get the definitions of the host. The lines keep their numbers.

Declarations outside of functions are those of the device.
"""

import re

from cu2cpp import _closing, code_of

_ARCH = "__CUDA_ARCH__"
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif)\b((?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_LAMBDA = re.compile(r"\[[^\[\]]*\](?P<before>[^()\[\]{};]*)(?:\((?:[^()]|\([^()]*\))*\)[^()\[\]{};]*)?$")
_CONTROL = re.compile(r"(?:[\w\s]*:(?!:)\s*)?(?:else\b|do\b|try\b|(?:else\s+)?(?:if|for|while|switch|catch)\b|$)")
_CLASS = re.compile(r"(?:template\s*<[^{}]*>\s*)?(?:typedef\s+|inline\s+|static\s+)*"
                    r"(?:namespace|class|struct|union|enum|extern)\b[^()]*$")


class Passes:
    """What of all texts of a program depends on whether the host's code is compiled, or the device's."""

    def __init__(self, texts):
        codes = [code_of(text) for text in texts]
        defines = [match.groups() for code in codes for match in _DEFINE.finditer(code)]
        self.both = _standing_for(defines, r"__host__") & _standing_for(defines, r"__device__")
        self.device = _standing_for(defines, r"__device__") - self.both
        self.groups = [text[begin:end] for text, code in zip(texts, codes) for begin, end in _groups(code)]
        self.names = {match[1] for group in self.groups for match in _DEFINE.finditer(code_of(group))}
        known = None
        while known != self.names:
            known = set(self.names)
            self.names |= {name for name, body in defines if known & set(re.findall(r"\w+", body))}
        self.words = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted({_ARCH, *self.names})))})\b")

    def apart(self, text: str, path: str) -> str:
        """The text, in which functions of the host, and those for both, have the bodies of their pass."""
        code = code_of(text)
        if not self.words.search(code):
            return text
        flat = _DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), code)
        edits = {}
        groups = _groups(code)
        for match in self.words.finditer(code):
            if any(begin <= match.start() < end for begin, end in groups):
                continue
            if (found := self._body(flat, match.start())) and _is_whole(code[found[0] : found[1]]):
                edits[found[0]] = found
        for begin, end in groups:  # which of them the compiler has come to
            if text[begin:end] in self.groups:
                edits[end] = (end, end, text[begin:end])
        pieces, done = [], 0
        for start, (begin, end, where) in sorted(edits.items()):
            if start < done:
                continue  # in a body that is already two
            pieces.append(text[done:start])
            if where in self.groups:
                pieces.append(f"\n#define CUDA_CPU_BOTH_{self.groups.index(where)}{_line(text, end, path)}")
            else:
                pieces.append(self._bodies(text, begin, end, where, path))
            done = end
        return "".join(pieces) + text[done:]

    def _bodies(self, text, begin, end, where, path):
        body = text[begin:end]
        names = [_ARCH]
        again = []
        if self.names & set(re.findall(r"\w+", code_of(body))):
            for number, group in enumerate(self.groups):
                own = [match[1] for match in _DEFINE.finditer(code_of(group))]
                names += own
                again += [f"#ifdef CUDA_CPU_BOTH_{number}", group, "#endif"]
        names = list(dict.fromkeys(names))
        host = "\n".join(["", *(f'#pragma push_macro("{name}")\n#undef {name}' for name in names), *again])
        back = "\n".join(["", *(f'#pragma pop_macro("{name}")' for name in names)])
        host = f"{host}{_line(text, begin, path)}{body}{back}{_line(text, end, path)}"
        if where == "host":
            return host
        return f" if (CUDA_CPU_IN_KERNEL) {{{body}}} else {{{host}}} "

    def _body(self, flat, position):
        """(begin, end, whose it is) of the body of the function around a position; None if it is the device's, or
        outside of all functions."""
        opened = []
        for brace in re.finditer(r"[{}]", flat[:position]):
            if brace[0] == "{":
                opened.append(brace.start())
            elif opened:
                opened.pop()
        for opening in reversed(opened):
            head = flat[max(flat.rfind(character, 0, opening) for character in ";{}") + 1 : opening].strip()
            words = set(re.findall(r"\w+", head))
            both = words & self.both or {"__host__", "__device__"} <= words or "constexpr" in words or any(
                re.search(r"HOST_DEVICE|HOSTDEVICE", word) for word in words)
            device = {"__device__", "__global__"} & words or words & self.device
            if _LAMBDA.search(head):
                if not both and not device:
                    continue  # it is whose the function around it is
            elif head.count("(") != head.count(")") or _CONTROL.match(head) or _CLASS.match(head) or "(" not in head or (
                    re.search(r"(?:=|\breturn|[(,])\s*$", head)):
                continue
            if device and not both:
                return None
            return opening + 1, _closing(flat, opening, "{}"), "both" if both else "host"
        return None


def _standing_for(defines, words):
    """The macros in whose text one of the words is, or another such macro."""
    names, known = set(), None
    while known != names:
        known = set(names)
        names |= {name for name, body in defines
                  if re.search(rf"\b(?:{words})\b", body) or known & set(re.findall(r"\w+", body))}
    return names


def _groups(code):
    """Where conditions on __CUDA_ARCH__ begin and end that have only definitions of macros in them."""
    found, opened = [], []
    for match in _CONDITION.finditer(code):
        if match[1] in ("if", "ifdef", "ifndef"):
            opened.append((match.start(), _ARCH in match[2]))
        elif opened and match[1] == "elif":
            opened[-1] = (opened[-1][0], opened[-1][1] or _ARCH in match[2])
        elif opened and match[1] == "endif":
            begin, asks = opened.pop()
            lines = code[begin : match.end()]
            if asks and _DEFINE.search(lines) and "include" not in lines and not _DIRECTIVE.sub("", lines).strip():
                found = [each for each in found if each[0] < begin] + [(begin, match.end())]
    return found


def _is_whole(body):
    """Whether all conditions that begin in it end in it, and it has no label, of which there can be only one."""
    words = [match[1] for match in _CONDITION.finditer(body)]
    depth = 0
    for word in words:
        depth += word.startswith("if") - (word == "endif")
        if depth < 0:
            return False
    return depth == 0 and not re.search(r"\bgoto\b", body)


def _line(text, position, path):
    name = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'\n#line {text.count(chr(10), 0, position)} "{name}"\n'
