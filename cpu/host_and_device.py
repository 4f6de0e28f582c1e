"""Which functions and variables of a program are the host's, and which are the device's, and where they are mixed up, so
that nvcc refuses the program, or warns that another variable is reached.

It goes by the text, and says nothing where that is not clear: of what a macro declares, of templates of the host, and of
functions for both.
"""

from functools import cache
import re

from cu2cpp import _at_commas, _closing, _without_directives

# What a kernel finds in no library of the GPU's.
HOST_ONLY = re.compile(
    r"\bthrow\b|\bstd\s*::\s*(?:vector|string|map|set|list|deque|queue|stack|unordered_map|unordered_set|cout|cerr|endl"
    r"|unique_ptr|shared_ptr|make_unique|make_shared|function|mutex|thread|to_string)\b")
# What only kernels may call.
OF_DEVICE = re.compile(r"(?:__syncthreads\w*|__syncwarp|__threadfence\w*|__(?:shfl\w*|ballot|any|all|match_\w+|reduce_\w+)_sync"
                       r"|atomic(?:Add|Sub|Exch|Min|Max|Inc|Dec|CAS|And|Or|Xor)\w*)$")
# A variable, or an element of it, that is written or read.
_ELEMENT = r"(?<![\w.>:&])(?<!& )\b([A-Za-z_]\w*)((?:\s*\[[^\[\]]*\])*(?:\s*\.\s*\w+)*)\s*"
_WRITTEN = re.compile(_ELEMENT + r"(?:[-+*/|^%]?=(?!=)|&=|<<=|>>=|\+\+|--)")
_VALUE = re.compile(r"(?:(?<==)|(?<=[+\-*/])|(?<=\breturn))\s*\b([A-Za-z_]\w*)\s*(?=[;+\-*/),])")
_READ = re.compile(r"(?:(?<=[=+\-*/<>(,])|(?<=\breturn))\s*" + _ELEMENT.replace(")*(?:", ")+(?:", 1) + r"(?!\s*[\[=])")
_MACROS = re.compile(r"^[ \t]*#[ \t]*define.*", re.MULTILINE)
_NAMED = re.compile(r"(?<![:~\w])([A-Za-z_]\w*)\s*\(\)\s*(?:const\s*|noexcept\s*)*$")


class HostAndDevice:
    """The codes of a program's files: `codes` without comments, the `sources` among them, the names of all kernels, and
    the files of `libraries`, of which less is asked."""

    def __init__(self, codes, sources, kernels, libraries):
        self.codes, self.sources, self.kernels = codes, sources, kernels
        self.own = {file: code for file, code in codes.items() if file not in libraries}
        self.functions = {file: functions_of(code) for file, code in codes.items()}
        self.host, self.device = {}, {}
        for code in self.own.values():
            for known, found in zip((self.host, self.device), variables_of(code)):
                known |= found
        for name in self.host.keys() & self.device.keys():  # of two namespaces, say
            del self.host[name], self.device[name]
        self.device_only = set().union(*map(device_only_functions, self.own.values())) - set().union(
            *(self.functions[file][0] for file in self.own)) - kernels
        self.macros = "\n" + "\n".join(line for code in self.own.values() for line in _MACROS.findall(code))

    def mistakes(self):
        """(file, position, what is wrong) of all that is found."""
        for file, code in self.codes.items():
            for name, head, begin, end in device_bodies(code):
                for position, what in self._calls_of_host(file, head, begin, end):
                    yield file, position, f"{name} runs on the GPU, and {what}"
                if file in self.own:
                    for position, what in self._variables_of_host(code, head, begin, end):
                        yield file, position, f"{name} runs on the GPU, and {what}"
        for file, code in self.own.items():
            for name, head, begin, end in host_bodies(code):
                # Where there is a function of the device in it, or what the host does not compile, more is allowed.
                if not re.search(r"__device__|__CUDA_ARCH__", code[begin:end]):
                    for position, what in self._device_on_host(code, head, begin, end):
                        yield file, position, f"{name} runs on the host, {what}"

    def _calls_of_host(self, file, head, begin, end):
        code = self.codes[file]
        macros = "\n" + "\n".join(_MACROS.findall(code))
        devices = set().union(*(names for _, names in self.functions.values()))
        hosts = self.functions[file][0].union(*(self.functions[each][0] for each in self.codes if each not in self.sources))
        if match := HOST_ONLY.search(code, begin, end):
            what = "throws an exception" if match[0] == "throw" else f"uses {''.join(match[0].split())}"
            yield match.start(), f"{what}, which only the host has"
        for match in re.finditer(r"(?<![\w.:>])(\w+)\s*\(", code[begin:end]):
            called = match[1]
            if called in hosts - devices - self.kernels and not is_declared(called, code[head:end] + macros):
                yield begin + match.start(), f"calls {called}(), which is a function of the host: it needs __device__"

    def _variables_of_host(self, code, head, begin, end):
        whole = code[head:end] + self.macros
        for match in re.finditer(r"(?<![\w.>:])[A-Za-z_]\w*\b(?!\s*\()", code[begin:end]):
            before = code[begin : begin + match.start()]
            if match[0] in self.host and not is_declared(match[0], whole) and not re.search(
                    r"(?:sizeof|decltype)\s*\(?\s*$", before[-20:]):
                yield begin + match.start(), (f"uses {match[0]}, which is a variable of the host: it needs __device__ or"
                                              " __constant__, or is given to the kernel as an argument")
        for match in _WRITTEN.finditer(code, begin, end):
            if "__constant__" in self.device.get(match[1], "") and not is_declared(match[1], whole):
                yield match.start(1), f"writes {match[1]}, which is __constant__: kernels can only read it"

    def _device_on_host(self, code, head, begin, end):
        whole = code[head:end] + self.macros
        for match in re.finditer(r"(?<![\w.:>])(\w+)\s*\(", code[begin:end]):
            called = match[1]
            if (called in self.device_only or OF_DEVICE.match(called)) and not is_declared(called, whole):
                yield begin + match.start(), f"and calls {called}(), which only the GPU has"
        for match in re.finditer(r"(?<![\w.>:])(threadIdx|blockIdx|blockDim|gridDim)\s*\.", code[begin:end]):
            if match[1] not in self.host and not is_declared(match[1], whole):
                yield begin + match.start(), f"where there is no {match[1]}"
        for pattern, does in ((_WRITTEN, "writes"), (_READ, "reads"), (_VALUE, "reads")):
            for match in pattern.finditer(code, begin, end):
                name = match[1]
                if name not in self.device or is_declared(name, whole):
                    continue
                if pattern is _VALUE and re.search(rf"\b{name}\s*\[", self.device[name]):
                    continue  # its address
                statement = code[max(code.rfind(each, begin, match.start(1)) for each in ";{}") + 1 : match.start(1)]
                if not re.search(r"Symbol|sizeof", statement):
                    yield match.start(1), (f"and {does} {name}, which is the GPU's: cudaMemcpyToSymbol() and"
                                           " cudaMemcpyFromSymbol() reach it. nvcc only warns, and what is reached is"
                                           " another variable")


@cache
def _definitions(code):
    """(name, what stands before it, where its head begins, where its body begins and ends) of each function outside of
    classes."""
    flat = _without_directives(code)
    found = []
    depth = begin = 0
    for each in re.finditer(r"[;{}]", flat):
        head = flat[begin : each.start()]
        if each[0] == "{":
            namespace = depth == 0 and re.search(r"\bnamespace\b[\w\s:]*$|\bextern\s*$", head)
            if depth == 0 and not namespace:
                short = _without_arguments(head)
                if named := _NAMED.search(short):
                    found.append((named[1], short[: named.start(1)], begin, each.end(),
                                  _closing(flat, each.start(), "{}")))
            depth += not namespace
        elif each[0] == "}":
            depth = max(0, depth - 1)
        begin = each.end()
    return found


def functions_of(code: str):
    """(the functions of the host alone, the functions of the device). A template, or what has a word in capitals
    before its name, which may be a macro, is not one of the host alone."""
    hosts, devices = set(), set(re.findall(r"__device__[^;{}()]*?\b(\w+)\s*\(", code))
    for name, before, _, _, _ in _definitions(code):
        if re.search(r"__device__|__global__|\b(?:constexpr|template)\b|\b[A-Z][A-Z0-9_]+\b", before):
            devices.add(name)
        elif re.search(r"\w", before):
            hosts.add(name)
    return hosts, devices


def device_bodies(code: str):
    """(name, where its head begins, begin, end) of the body of each kernel, and of each function for the device
    alone."""
    for name, before, head, begin, end in _definitions(code):
        if re.search(r"\b__(?:global|device)__\b", before) and "__host__" not in before and not re.search(
                r"\b[A-Z][A-Z0-9_]+\b", before):
            yield name, head, begin, end


def host_bodies(code: str):
    """The same of each function for the host alone that is no template."""
    for name, before, head, begin, end in _definitions(code):
        if not re.search(r"__(?:global|device)__|\b(?:constexpr|template)\b|\b[A-Z][A-Z0-9_]+\b", before):
            yield name, head, begin, end


def device_only_functions(code: str):
    """The functions that are the device's wherever they are declared or defined, and never the host's."""
    flat = _without_directives(code)
    device, others = set(), set()
    for name in set(re.findall(r"__device__[^;{}()]*?\b(\w+)\s*\(", flat)):
        for match in re.finditer(rf"\b{name}\s*\(", flat):
            before = flat[max(flat.rfind(character, 0, match.start()) for character in ";{}") + 1 : match.start()]
            if re.search(r"[\w>*&][\s*&]*$", before) and not re.search(r"[=(,.]|\breturn\b|\belse\b", before):
                own = "__device__" in before and not re.search(r"__host__|\b[A-Z][A-Z0-9_]+\b|\bconstexpr\b", before)
                (device if own else others).add(name)
    return device - others


def variables_of(code: str):
    """(the host's, those in __constant__ or __device__ memory) of the variables outside of functions and classes, as
    {name: its declaration}. Constants are left out, of which both have a value, and what a macro declares."""
    flat = _without_directives(code)
    host, device = {}, {}
    depth = begin = 0
    for each in re.finditer(r"[;{}]", flat):
        head = flat[begin : each.start()].strip()
        if depth == 0 and (each[0] == ";" or (each[0] == "{" and head.endswith("="))):
            _note_variables(head, host, device)
        if each[0] == "{":
            depth += not (depth == 0 and re.search(r"\bnamespace\b[\w\s:]*$|\bextern\s*$", head))
        elif each[0] == "}":
            depth = max(0, depth - 1)
        begin = each.end()
    return host, device


def _note_variables(declaration, host, device):
    if re.match(r"(?:typedef|using|template|struct|class|enum|union|namespace|friend|static_assert|return|__asm__)\b|$",
                declaration) or re.search(r"\b(?:constexpr|auto|operator|__managed__|__shared__|texture)\b", declaration):
        return
    pieces = _at_commas(declaration)
    first = re.match(r"(?P<type>(?:[A-Za-z_][\w:]*(?:\s*<[^()=]*>)?[\s*&]+)+)(?P<name>[A-Za-z_]\w*)\s*(?P<rest>\[|=|$)",
                     pieces[0].strip())
    if not first or re.search(r"\b[A-Z][A-Z0-9_]{2,}\b", first["type"]):
        return
    array = first["rest"] == "["
    names = [first["name"]] + [match[1] for each in pieces[1:] if (match := re.match(r"[\s*&]*([A-Za-z_]\w*)\s*(?:\[|=|$)",
                                                                                  each))]
    words = set(re.findall(r"\w+", first["type"]))
    if words & {"__device__", "__constant__"}:
        if "const" not in words:
            device.update(dict.fromkeys(names, declaration))
    elif "const" not in words or array:
        host.update(dict.fromkeys(names, declaration))


def is_declared(name: str, code: str) -> bool:
    """Whether the code, of a function with its head, declares a parameter or a variable of this name, as far as its text
    shows: in doubt it does."""
    type_ = r"(?:(?!return\b|else\b|case\b|goto\b|delete\b|new\b|throw\b)[A-Za-z_][\w:]*(?:\s*<[^;{}]*>)?[\s*&]+)+"
    for match in re.finditer(rf"(?<![\w.])(?<!->){name}\b", code):
        before = code[: match.start()]
        statement = before[max(map(before.rfind, ";{}(")) + 1 :]
        if any(re.fullmatch(rf"\s*{type_}", each) for each in (
                statement, statement.rpartition(",")[2], statement.rpartition("<")[2])):
            return True
        if "," in statement and re.match(rf"\s*{type_}\w+\s*[=,\[]", statement) or re.search(r"\(\s*\*\s*$", before[-20:]):
            return True
    return re.search(rf"^[ \t]*#[ \t]*define[ \t]+{name}\b", code, re.MULTILINE) is not None


def _without_arguments(head):
    """The head of a function, with nothing between its parentheses."""
    inner = re.compile(r"\([^()]+\)")
    while inner.search(head):
        head = inner.sub(lambda match: "()" if match.start() == 0 or head[match.start() - 1] not in "(," else "", head)
    return re.sub(r"\(\(\)\)", "()", head)
