"""Translates CUDA C++ into C++ for the CPU backend (cuda_runtime.h next to this file).

    cu2cpp.py in.cu out.cc

Only what is not C++ changes, and every line keeps its number:

    kernel<<<grid, block, bytes>>>(a)    kernel->*cuda_cpu::launch(grid, block, bytes)(a)
    __shared__ float tile[32][33];       float (&tile)[32][33] = cuda_cpu::static_shared(...);
    extern __shared__ float buffer[];    float *const buffer = cuda_cpu::dynamic_shared();
    __global__ void f(int n) {           __global__ void f(int n) { if (cuda_cpu::describe_kernel(
                                             its __cluster_dims__ and __launch_bounds__)) return;
    __noinline__                         __attribute__((noinline))
    #pragma unroll, #pragma nv_...       (left out)

The output starts with a #line directive, so that compilers and debuggers show the original file.
"""

import argparse
import re
import sys
from pathlib import Path

_NOT_CODE = re.compile(
    r"""
    //(?:[^\\\n]|\\.|\\\n)*            # line comment
  | /\*.*?\*/                          # block comment
  | R"(?P<delimiter>[^()\s\\]*)\(.*?\)(?P=delimiter)"
  | "(?:[^"\\\n]|\\.|\\\n)*"
  | (?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:[^'\\\n]|\\.)+'   # not the separators in 1'000
    """,
    re.VERBOSE | re.DOTALL,
)
_LAUNCH_END = re.compile(r">>>\s*\(")
_SHARED = re.compile(
    r"\b(?:(?:extern|static)\s+|(?:alignas|__align__)\s*\((?:[^(){};]|\([^(){};]*\))*\)\s*)*"
    r"__shared__\b[^;{}]*;"
)
_QUALIFIER = re.compile(r"\b(?:extern|static|__shared__)\b")
_ALIGNMENT = re.compile(r"\b(?:alignas|__align__|__attribute__)\s*\(")
_DECLARATION = re.compile(
    r"(?P<type>.*?[\s>&*])(?P<name>[A-Za-z_]\w*)\s*(?P<extents>(?:\[.*\])?)\s*$", re.DOTALL
)
_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+(?:unroll|nounroll|nv_\w+)\b[^\n]*", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_NOINLINE = re.compile(r"(?<!\(\()\b__noinline__\b")


class TranslationError(Exception):
    """The source has something that cannot be translated; the message names file and line."""


def translate(text: str, path: str) -> str:
    """Returns the C++ for the CUDA C++ `text`, which `path` names in messages and debuggers."""
    return _Translation(text, path).result()


def with_headers(text: str, *headers: str) -> str:
    """The source with the text of these headers (as their #include names them; what includes others
    comes first) in the place of the #include: for who changes a piece of a header, in one source."""
    for header in headers:
        body = (Path(__file__).resolve().parents[1] / header).read_text().replace("#pragma once\n", "")
        before, include, after = text.partition(f'#include "{header}"\n')
        if not include:
            raise TranslationError(f"the source does not include {header}")
        text = before + body + after.replace(f"\n{include}\n", "\n").replace(include, "")
    for header in _INCLUDE.findall(text):
        if twice := _included(header) & set(headers):
            raise TranslationError(f"{header} includes {', '.join(twice)} again: it has to be named, too")
    return text


def _included(header):
    """The headers of ours that this one includes, and those that they do."""
    try:
        text = (Path(__file__).resolve().parents[1] / header).read_text()
    except FileNotFoundError:
        return set()  # one of the compiler's, or of a library's
    return {each for name in _INCLUDE.findall(text) for each in (name, *_included(name))}


class _Translation:
    def __init__(self, text, path):
        self.text = text
        self.path = str(path)
        self.code = _NOT_CODE.sub(_blank, text)
        self.edits = []

    def result(self):
        for match in re.finditer("<<<", self.code):
            self._launch(match.start())
        for match in _SHARED.finditer(self.code):
            self._shared(match)
        for match in re.finditer(r"\b__global__\b", self.code):
            self._kernel(match.end())
        for match in _PRAGMA.finditer(self.code):
            self._replace(match.start(), match.end(), "")
        for match in _NOINLINE.finditer(self.code):
            self._replace(match.start(), match.end(), "__attribute__((noinline))")
        name = self.path.replace("\\", "\\\\").replace('"', '\\"')
        pieces = [f'#line 1 "{name}"\n']
        end = 0
        for start, stop, replacement in sorted(self.edits):
            pieces += [self.text[end:start], replacement]
            end = stop
        return "".join(pieces) + self.text[end:]

    def _replace(self, start, stop, replacement):
        lost = self.text.count("\n", start, stop) - replacement.count("\n")
        self.edits.append((start, stop, replacement + "\n" * lost))

    def _fail(self, position, problem):
        line = self.text.count("\n", 0, position) + 1
        raise TranslationError(f"{self.path}:{line}: {problem}")

    def _launch(self, start):
        position = start + 3
        depth = 0
        while position < len(self.code):
            if depth == 0 and (end := _LAUNCH_END.match(self.code, position)):
                self._replace(start, start + 3, "->*cuda_cpu::launch(")
                self._replace(position, end.end(), ")(")
                return
            character = self.code[position]
            depth += (character in "([{") - (character in ")]}")
            if depth < 0 or character == ";":
                break
            position += 1
        self._fail(start, "<<< without >>>( in the same statement")

    def _kernel(self, position):
        """Lets the kernel's body say first what its attributes are."""
        cluster = bounds = ""
        while match := re.compile(r"(\w*)\s*([({;])").search(self.code, position):
            if match[2] == ";":
                return  # only a declaration
            if match[2] == "{":
                head = f"cuda_cpu::cluster_dims({cluster}), cuda_cpu::launch_bounds({bounds})"
                self._replace(match.end(), match.end(), f" if (cuda_cpu::describe_kernel({head})) return;")
                return
            position = _closing(self.code, match.end() - 1) + 1
            inside = " ".join(self.code[match.end() : position - 1].split())
            if match[1] in ("__cluster_dims__", "HOPPER_CLUSTER"):
                cluster = inside
            elif match[1] == "__launch_bounds__":
                bounds = inside

    def _shared(self, match):
        start, stop = match.span()
        if _depth(self.code, start) == 0:
            self._fail(start, "__shared__ is only supported inside of functions")
        dynamic = re.match(r".*\bextern\b", match.group().split("__shared__")[0], re.DOTALL)
        declaration = _QUALIFIER.sub("", match.group()[:-1])
        while alignment := _ALIGNMENT.search(declaration):
            end = _closing(declaration, alignment.end() - 1)
            declaration = declaration[: alignment.start()] + declaration[end + 1 :]
        if "," in _outside_brackets(declaration):
            self._fail(start, "declare one __shared__ variable per statement")
        if "=" in _outside_brackets(declaration):
            self._fail(start, "a __shared__ variable cannot be initialized")
        parts = _DECLARATION.match(declaration.strip())
        if not parts:
            self._fail(start, "cannot read this __shared__ declaration")
        type_, name, extents = (" ".join(parts[k].split()) for k in ("type", "name", "extents"))
        first = re.match(r"\[\s*\]", extents)
        if dynamic:
            if not first:
                self._fail(start, "extern __shared__ needs an array of unknown size: name[]")
            rest = extents[first.end() :]
            pointer = f"(*const {name}){rest}" if rest else f"*const {name}"
            new = f"{type_} {pointer} = cuda_cpu::dynamic_shared();"
        else:
            if first:
                self._fail(start, "a __shared__ array of unknown size must be extern")
            reference = f"(&{name}){extents}" if extents else f"& {name}"
            new = f"{type_} {reference} = cuda_cpu::static_shared([] {{}});"
        self._replace(start, stop, new)


def _blank(match):
    """Spaces of the same length, so that positions and lines stay the same."""
    return re.sub(r"[^\n]", " ", match.group())


def _depth(code, position):
    """How many braces are open at `position`, not counting those of namespaces."""
    opened = []
    for brace in re.finditer(r"(?:\b(namespace\b[\w\s:]*|extern\s*))?\{|\}", code[:position]):
        if brace.group() != "}":
            opened.append(brace[1] is None)
        elif opened:
            opened.pop()
    return sum(opened)


def _closing(code, opening):
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(code)):
        depth += (code[position] == "(") - (code[position] == ")")
        if depth == 0:
            return position
    return len(code) - 1


def _outside_brackets(declaration):
    """The declaration without what is in <>, () or []."""
    inner = re.compile(r"<[^<>()\[\]]*>|\([^<>()\[\]]*\)|\[[^\[\]]*\]")
    while inner.search(declaration):
        declaration = inner.sub("", declaration)
    return declaration


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("target", metavar="TARGET")
    arguments = parser.parse_args()
    try:
        result = translate(Path(arguments.source).read_text(encoding="utf-8"), arguments.source)
        Path(arguments.target).write_text(result, encoding="utf-8")
    except (TranslationError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
