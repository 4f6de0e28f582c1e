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
# A macro that stands for such a pragma, as nvcc lets it.
_PRAGMA_MACRO = re.compile(
    r"^([ \t]*#[ \t]*define[ \t]+\w+)[ \t]+#[ \t]*pragma[ \t]+(?:unroll|nounroll)\b[^\n]*", re.MULTILINE
)
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_NOINLINE = re.compile(r"(?<!\(\()\b__noinline__\b")


class TranslationError(Exception):
    """The source has something that cannot be translated; the message names file and line."""


def translate(text: str, path: str) -> str:
    """Returns the C++ for the CUDA C++ `text`, which `path` names in messages and debuggers."""
    return _Translation(text, path).result()


def translate_foreign(text: str, path: str, through_call=frozenset(), kernels=frozenset(), known=False,
                      global_kernels=frozenset()) -> str:
    """The same of what others have written, who know more forms than our own sources have: several
    __shared__ variables in a statement, and launches that need a call as C++ has it, of the kernels
    that `through_call` names (templates whose arguments are deduced, overloads, default arguments).
    `kernels` are the names of all kernels of the program. known: it launches kernels by their address
    alone. global_kernels: those that a launch names with :: before them, since a library may have
    functions of the same name."""
    return _ForeignTranslation(text, path, through_call, kernels, known, global_kernels).result()


def code_of(text: str) -> str:
    """The text without comments and strings, of the same length."""
    return _NOT_CODE.sub(_blank, text)


def kernels_of(text: str):
    """(the names of the kernels in it, those of them that only a call as C++ has it can launch)."""
    code = code_of(text)
    names, special = {}, set()
    for match in _KERNEL.finditer(code):
        name = match["name"]
        end = _closing(code, match.end() - 1)
        parameters = " ".join(code[match.end() : end].split())
        if match["template"] is not None or "=" in parameters:
            special.add(name)
        if names.setdefault(name, parameters) != parameters:
            before, now = (each.count(",") for each in (names[name], parameters))
            if before != now or _types(names[name]) != _types(parameters):
                special.add(name)
    for name in names:  # a function of the host with the name of a kernel is one more overload
        if len(re.findall(rf"\bvoid\s+{name}\s*\(", code)) > len(re.findall(
                rf"__global__[^;{{}}()]*(?:\([^;{{}}]*?\)[^;{{}}()]*)?\bvoid\s+{name}\s*\(", code)):
            special.add(name)
    return set(names), special


def global_kernels_of(text: str):
    """The names of the kernels in it that are in no namespace, and of those that are in one."""
    code = code_of(text)
    flat = _without_directives(code)
    outside, inside = set(), set()
    for match in _KERNEL.finditer(code):
        before = flat[: match.start()]
        (inside if before.count("{") > before.count("}") else outside).add(match["name"])
    return outside, inside


def kernel_heads(code: str):
    """(name, template parameters, parameters) of each kernel in code without comments."""
    for match in _KERNEL.finditer(code):
        template = re.search(r"<(.*)>", match["template"] or "", re.DOTALL)
        yield match["name"], template[1] if template else "", code[match.end() : _closing(code, match.end() - 1)]


def _without_directives(code):
    """The code with nothing where the preprocessor has its lines."""
    return re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", _blank, code, flags=re.MULTILINE)


_KERNEL = re.compile(
    r"(?P<template>\btemplate\s*<[^;{}]*>\s*)?(?:(?:static|inline|extern|__host__|void)\s+)*"
    r"__global__\s+(?:[\w\s]|\w+\s*\([^()]*(?:\([^()]*\)[^()]*)*\))*?\bvoid\s+"
    r"(?:[A-Z_]\w*\s+)*(?:[A-Z_]\w*\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)*(?P<name>\w+)\s*\("
)


def _types(parameters):
    """The types of parameters, as far as the text shows them."""
    return [re.sub(r"\b(?:const|__restrict__|__restrict)\b|\s|\w+$", "", each) for each in parameters.split(",")]


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
        for match in _PRAGMA_MACRO.finditer(self.code):
            self._replace(match.start(), match.end(), match[1])
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
        if self._only_a_word(position):
            return
        if result := re.match(r"\s*(?:(?:static|inline|extern|const|unsigned|signed)\s+)*((?:int|float|double|bool|char|long"
                              r"|short|unsigned|size_t)\b[\s*]*|\w+\s*\*+\s*)\w+\s*\(", self.code[position:]):
            self._fail(position, f"a kernel returns void, and nothing else; nvcc refuses {' '.join(result[1].split())}, too")
        while match := re.compile(r"(\w*)\s*([({;])").search(self.code, position):
            if match[2] == ";":
                return  # only a declaration
            if match[2] == "{":
                head = f"cuda_cpu::cluster_dims({cluster}), cuda_cpu::launch_bounds({bounds})"
                new = f" if (cuda_cpu::describe_kernel({head})) return;{self._known(match.start())}"
                self._replace(match.end(), match.end(), new)
                return
            position = _closing(self.code, match.end() - 1) + 1
            inside = " ".join(self.code[match.end() : position - 1].split())
            if match[1] in ("__cluster_dims__", "HOPPER_CLUSTER"):
                cluster = inside
            elif match[1] == "__launch_bounds__":
                bounds = inside

    def _only_a_word(self, position):
        """Whether this is in a macro that stands for __global__ and other words, and is no kernel."""
        start = self.code.rfind("\n", 0, position) + 1
        line = re.compile(r"(?:[^\n\\]|\\.|\\\n)*", re.DOTALL).match(self.code, start)[0]
        return re.match(r"[ \t]*#[ \t]*define\b", line) is not None and "{" not in line

    def _known(self, body):
        """What makes the kernel known whose body begins there, for launches by its address alone."""
        return ""

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


class _ForeignTranslation(_Translation):
    def __init__(self, text, path, through_call, kernels, known, global_kernels):
        super().__init__(text, path)
        self.global_kernels = global_kernels
        self.known = known
        self.through_call = through_call
        self.kernels = kernels

    def result(self):
        for name in self.kernels:  # cudaLaunchCooperativeKernel((void*)kernel, ...) needs its type
            for match in re.finditer(rf"\(\s*(?:const\s+)?void\s*\*\s*\)\s*&?(?={name}\b)", self.code):
                self._replace(match.start(), match.end(), "")
        self._all_shared()
        return super().result()

    def _launch(self, start):
        position, depth = start + 3, 0
        while position < len(self.code):
            if depth == 0 and (end := _LAUNCH_END.match(self.code, position)):
                break
            depth += (self.code[position] in "([{") - (self.code[position] in ")]}")
            if depth < 0 or self.code[position] == ";":
                self._fail(start, "<<< without >>>( in the same statement")
            position += 1
        else:
            self._fail(start, "<<< without >>>( in the same statement")
        first = self._start_of_kernel(start)
        kernel = self.code[first:start].strip()
        close = _closing(self.code, end.end() - 1)
        arguments = list(_arguments(self.code, end.end(), close))
        simple = re.fullmatch(r"(?:\w+::)*\w+(?:\s*<.*>)?", kernel, re.DOTALL)
        name = re.sub(r"<.*", "", kernel, flags=re.DOTALL).strip().rpartition("::")[2]
        macro = any("__VA_ARGS__" in self.code[a:b] for a, b in arguments)
        outer = "::" if name in self.global_kernels and re.match(rf"{name}\b", kernel) and not self._is_local(
            name, first) else ""
        if simple and name in self.through_call and not macro:
            config = self.text[start + 3 : position].replace("\n", " ")
            captured, passed = [], []
            for k, (a, b) in enumerate(arguments):
                argument = self.text[a:b].strip()
                if re.fullmatch(r"NULL|nullptr|-?[\d.]\w*|true|false|\{.*\}", argument, re.DOTALL):
                    passed.append(argument)
                elif argument.endswith("..."):  # the pieces of a parameter pack
                    captured.append(f", ...cuda_cpu_{k} = cuda_cpu::argument({argument[:-3]})")
                    passed.append(f"cuda_cpu_{k}...")
                else:
                    captured.append(f", cuda_cpu_{k} = cuda_cpu::argument({argument})")
                    passed.append(f"cuda_cpu_{k}")
            own = outer + self.text[first:start].strip()
            self._replace(first, close + 1, (
                f"cuda_cpu::call(cuda_cpu::launch({config}), [={''.join(captured)}] "
                f"{{ {own}({', '.join(passed)}); }})"))
            return
        if outer:
            self._replace(first, first, f" {outer}")
        self._replace(start, start + 3, "->*cuda_cpu::launch(")
        self._replace(position, end.end(), ")(")
        for a, b in arguments:
            if self.code[a:b].strip() in ("0", "NULL"):
                self._replace(a, b, "cuda_cpu::Zero()")

    def _is_local(self, name, position):
        """Whether the function around `position` has a parameter or a variable of this name."""
        depth, begin = 0, 0
        for brace in re.finditer(r"[;{}]", self.code[:position]):
            if brace[0] == "}":
                depth -= 1
            if depth == 0:
                begin = brace.end() if brace[0] != "{" else begin
            depth += brace[0] == "{"
        return re.search(rf"[\w>]\s*[\s&*]\s*{name}\s*[,)=;{{]|\(\s*\*\s*{name}\s*\)",
                         self.code[begin:position]) is not None

    def _known(self, body):
        heads = [match for match in _KERNEL.finditer(_without_directives(self.code)) if match.end() <= body]
        if not self.known or not heads:
            return ""
        head = heads[-1]
        parameters = self.code[head.end() : _closing(self.code, head.end() - 1)]
        parameters = ", ".join(re.sub(r"=.*", "", each, flags=re.DOTALL) for each in _at_commas(parameters))
        arguments = []
        template = re.search(r"<(.*)>", head["template"] or "", re.DOTALL)
        for each in _at_commas(template[1]) if template else []:
            name = re.search(r"(\.\.\.)?\s*\b(\w+)\s*(?:=.*)?$", each.strip(), re.DOTALL)
            if not name or re.fullmatch(r"(?:typename|class|int|bool|unsigned|size_t)", name[2]):
                return ""  # a parameter without a name
            arguments.append(name[2] + (name[1] or ""))
        own = f"&{head['name']}" + (f"<{', '.join(arguments)}>" if template else "")
        return f" (void)&cuda_cpu::Known<static_cast<void (*)({' '.join(parameters.split())})>({own})>::is;"

    def _start_of_kernel(self, position):
        """Where the expression begins that stands before <<<."""
        code = self.code
        while True:
            while position > 0 and code[position - 1].isspace():
                position -= 1
            if position > 0 and code[position - 1] == ">":
                depth = 0
                while position > 0:
                    position -= 1
                    depth += (code[position] == ">") - (code[position] == "<")
                    if depth == 0:
                        break
                continue
            name = re.search(r"(?:\w+\s*::\s*)*\w+$", code[max(0, position - 300) : position])
            return position - len(name[0]) if name else position

    def _shared(self, match):
        """The plain forms are among those that _all_shared() finds."""

    def _all_shared(self):
        done = 0
        flat = _without_directives(self.code)
        for match in re.finditer(r"\b__shared__\b", flat):
            if match.start() < done:
                continue
            start = max(flat.rfind(c, 0, match.start()) for c in ";{}") + 1
            label = re.match(r"\s*(?:case\b[^:]*|default\s*|public\s*|private\s*):", flat[start : match.start()])
            start += label.end() if label else 0
            start += len(flat[start:]) - len(flat[start:].lstrip())
            if start > match.start():
                continue
            stop, depth = match.end(), 0
            while stop < len(flat) and (flat[stop] != ";" or depth):
                depth += (flat[stop] in "{(") - (flat[stop] in "})")
                stop += 1
            done = stop
            self._declaration(start, stop + 1, self.code[start:stop])

    def _declaration(self, start, stop, declaration):
        dynamic = re.search(r"\bextern\b", declaration)
        file_scope = _depth(self.code, start) == 0
        declaration = re.sub(r"\b(?:extern|static|__shared__|volatile(?=\s+__shared__))\b", "", declaration)
        while alignment := _ALIGNMENT.search(declaration):
            end = _closing(declaration, alignment.end() - 1)
            declaration = declaration[: alignment.start()] + declaration[end + 1 :]
        before = ""
        if "{" in declaration:  # the type is defined in place
            opening = declaration.index("{")
            closing = _closing(declaration, opening, "{}")
            head = declaration[:opening].split()
            if head[:1] not in (["struct"], ["union"]):
                self._fail(start, "a __shared__ variable cannot be initialized")
            tag = head[1] if len(head) > 1 else f"cuda_cpu_shared_{start}"
            before = f"{head[0]} {tag} {' '.join(declaration[opening : closing + 1].split())}; "
            declaration = f"{tag} {declaration[closing + 1 :]}"
        if "=" in _outside_brackets(declaration):
            self._fail(start, "a __shared__ variable cannot be initialized")
        pieces = _at_commas(declaration)
        first = _DECLARATION.match(pieces[0].strip())
        if not first:
            self._fail(start, "cannot read this __shared__ declaration")
        base = " ".join(first["type"].rstrip("*& \n\t").split())
        new = []
        for number, piece in enumerate(pieces):
            parts = first if number == 0 else _DECLARATION.match(f"{base} {piece.strip()}")
            if not parts:
                self._fail(start, "cannot read this __shared__ declaration")
            type_, name, extents = (" ".join(parts[k].split()) for k in ("type", "name", "extents"))
            unknown = re.match(r"\[\s*\]", extents)
            if dynamic and unknown:
                rest = extents[unknown.end() :]
                if file_scope:
                    new.append(f"static const cuda_cpu::DynamicArray<{type_}{rest}> {name};")
                    continue
                pointer = f"(*const {name}){rest}" if rest else f"*const {name}"
                new.append(f"{type_} {pointer} = cuda_cpu::dynamic_shared();")
            elif dynamic or unknown:
                self._fail(start, "extern __shared__ needs an array of unknown size: name[]")
            elif file_scope:
                self._fail(start, "a __shared__ array with a size stands in the kernel, not outside of functions")
            else:
                reference = f"(&{name}){extents}" if extents else f"& {name}"
                new.append(f"{type_} {reference} = cuda_cpu::static_shared([] {{}});")
        self._replace(start, stop, before + " ".join(new))


def _arguments(code, start, end):
    """Where each argument of a call begins and ends."""
    if not code[start:end].strip():
        return
    for piece in _at_commas(code[start:end]):
        yield start, start + len(piece)
        start += len(piece) + 1


def _at_commas(code):
    """The pieces between commas that are outside of all brackets, <> only where they are a pair."""
    pieces, depth, begin, k = [], 0, 0, 0
    while k < len(code):
        character = code[k]
        if character == "<" and (template := re.match(r"<[\w\s:,*&<]*>+(?=[\s:({*&]|$)", code[k:])):
            k += template.end()
            continue
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append(code[begin:k])
            begin = k + 1
        k += 1
    return [*pieces, code[begin:]]


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


def _closing(code, opening, pair="()"):
    """The position of the parenthesis, or of what `pair` names, that closes the one at `opening`."""
    depth = 0
    for match in re.compile(rf"[{re.escape(pair)}]").finditer(code, opening):
        depth += 1 if match[0] == pair[0] else -1
        if depth == 0:
            return match.start()
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
