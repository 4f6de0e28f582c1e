"""Builds a reader's own CUDA program for the CPU backend, runs it, and says what its kernels ask of
memory, where it is wrong, and where it is wrong only sometimes. `./try` is its command line."""

import argparse
import fcntl
from functools import cache
import hashlib
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import identities
from check import OPTIONS, Files, _bounds, _line, _race, _waits, started, with_lines
from ptx import has_asm, translate_preprocessed
from cu2cpp import (TranslationError, _closing, code_of, global_kernels_of, kernel_heads, kernels_of,
                    translate_foreign)
from host_and_device import HostAndDevice
from two_passes import Passes
from two_versions import two_versions
from unasked import with_unasked
from units import made_of, ready, runs_kernels, text_of, units

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "try"
SECONDS = 60
SANITIZERS = {"address": "stray access", "thread": "race"}  # what each finds; in the order of the runs
# A program of more files has a library of templates in it. Its checks for what C++ leaves undefined would take the
# compiler a quarter of an hour, and 9 GB.
MANY_FILES = 100
PAGE = "docs/cpu.md"
WITHOUT_ENDED = "A barrier in"  # how the only mistake begins that does not spoil what comes after it
# How the backend begins when threads wait for memory that others than this launch may write, and what is said then.
FOR_OTHERS = "it may be for others: "
DEADLOCK = "A deadlock: threads wait for something that nobody will do."
WAITS_FOR_OTHERS = ("Not known: whether these threads would go on. The host, or a kernel in another stream, may write what they"
                    " wait for. But here a kernel ends before the host goes on, and before the next kernel begins.")
NOT_LOOKED_AT = ("    Not looked at: the order of the nodes of a graph; what libraries do; other inputs, and other orders of the"
                 f" blocks. {PAGE} says more.")
CXX = "g++"
CC = "gcc"
FLAGS = ["-g1", "-w", "-Wno-psabi", "-fno-strict-aliasing", "-fno-lifetime-dse", "-DCUDA_CPU_STACK=512"]
STANDARDS = ["c++17", "c++20"]  # of programs; the first one is what nvcc takes, too, if none is said
BACKEND_STANDARD = "-std=c++20"
# A thread that waits for a volatile variable lets others go on.
VOLATILE = ["--param=tsan-distinguish-volatile=1"]
# As SConstruct has them for lessons.
COUNTING = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-tree-sra",
            "-finline-functions", "-finline-small-functions", "-DCUDA_CPU_COUNTS", *VOLATILE]
SANITIZED = ["-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
BUILDS = {
    "": ["-O1", *COUNTING],
    "quick": ["-O2", "-DCUDA_CPU_COUNTS"],  # the second version of its functions
    "thread": ["-O1", "-fsanitize=thread", *VOLATILE, *SANITIZED],
    "address": ["-O1", "-fsanitize=address,undefined", *SANITIZED],
}
RUNS_THREADS = ("cuda_cpu.cpp", "fences.cpp", "hopper.cpp", "counting.cpp", "ledger.cpp", "tsan_identities.cpp")
PRINTS = ("printf", "__printf_chk", "puts", "putchar")  # what cpu/watch/repeats.cpp has to know of
HEAP = ("malloc", "free", "_Znwm", "_Znam", "_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZdaPvm")  # and cpu/c/heap.cpp
IDENTITIES = identities.link_flags(CXX)  # of the thread sanitizer
# Where the program asks for memory. What the backend itself asks for while a kernel runs is nobody's heap.
_HEAP = re.compile(rf"^(\s+(?:call|jmp)\s+)({'|'.join(HEAP)})(?=(?:@PLT)?$)", re.MULTILINE)
_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_OPENMP = re.compile(r"^[ \t]*#[ \t]*(?:pragma[ \t]+omp\b|include[ \t]*<omp\.h>)", re.MULTILINE)
# A macro that stands for words of CUDA, which the translation has to see.
_WORDS = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+((?:(?:static|inline|extern|void|const)[ \t]+)*__(?:global|shared)__"
                    r"(?:[ \t]+(?:static|inline|void|const))*)[ \t]*$", re.MULTILINE)
# What a program reads its standard input by. Of one that has none of it nothing is taken from a terminal or a pipe.
_READS = re.compile(r"\b(?:cin|stdin|v?scanf|getchar(?:_unlocked)?|gets|read|readv|STDIN_FILENO)\b"
                    r"|/dev/(?:stdin|fd|tty)|self/fd")
# The same for the bounds of a kernel.
_BOUNDS = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(?:\(([\w ,]*)\))?[ \t]+(__(?:launch_bounds|cluster_dims)__[ \t]*"
                     r"\([^\n]*\))[ \t]*$", re.MULTILINE)
_USES_STD = re.compile(r"\busing\s+(?:namespace\s+)?(?:::\s*)?std\b")
# Functions of the C library that return nothing, as kernels do.
OF_C = {"abort", "bcopy", "bzero", "clearerr", "exit", "free", "perror", "qsort", "rewind", "setbuf", "srand", "swab", "sync",
        "sincos", "sincosf", "tzset"}
_BY_ADDRESS = re.compile(r"\bcudaKernelNodeParams\b|\bcudaLaunch(?:KernelExC|Kernel|CooperativeKernel)\s*\(")
# What the CPU backend has not, by the header that says so, or by a word of the program.
MISSING_HEADERS = [
    (r"curand", "curand"), (r"cufft", "cufft"),
    (r"cusparse", "cusparse"), (r"cusolver", "cusolver"), (r"cudnn", "cudnn"), (r"nccl", "nccl"),
    (r"cute/|cutlass/", "CUTLASS"),
    (r"texture_", "textures"), (r"helper_(?:cuda|functions|string|timer|image)\.h", "the helper headers of NVIDIA's"
                                " samples: give their folder with -I"),
]
# Of what the toolkit has, where it is installed, or where another folder has it.
PACKAGES = [(r"(?:thrust|cub|cuda|nv)/", "cuda-cccl"), (r"curand_\w+\.h", "libcurand-dev")]
# What is taken from the toolkit, where it is installed: headers of device functions that are C++.
OF_TOOLKIT = re.compile(r"(?:curand\w*\.h|nv/(?:target|detail/\w+))$")
# NVIDIA's C++ library, which is taken as it is, as headers of the system. What it does to memory of the device the host
# does, see cpu/foreign/thrust/.
CCCL = re.compile(r"(?:thrust|cub|cuda|nv)/")
CCCL_TRIED = (1, 15), (3, 4)  # the first version, and the last one
# Of it what kernels call is translated, and the functions of cub for the whole device are ours, in FOREIGN.
CUB = re.compile(r"cub/(?!detail/(?:launcher|nvtx))")
CUB_OF_DEVICE = re.compile(r"cub/(?:device/|agent/|iterator/tex_obj)")
FOREIGN = ROOT / "cpu/foreign"
# What the compiler includes by itself, and some programs once more: all of it is in cuda_runtime.h.
OF_COMPILER = re.compile(r"(?:sm_\d\d_\w+|(?:crt/)?(?:device_functions|math_functions|host_defines|common_functions)"
                         r"|device_atomic_functions|device_double_functions|cuda_device_runtime_api|builtin_types|"
                         r"cuda_surface_types|host_config)\.h$")
# What nvcc refuses, since a warp's threads no longer go on together: what has taken its place.
OF_OLD = re.compile(r"__(?:shfl(?:_up|_down|_xor)?|any|all|ballot)$")
MISSING_WORDS = [
    (r"\btexture\s*<|\btex[123]D(?:fetch)?\s*[<(]|\bcudaTextureObject_t\b|\bcudaCreateTextureObject\b", "textures"),
    (r"\b(?:surf[123]D(?:read|write)|cudaSurfaceObject_t)\b", "surfaces"),
    (r"\bcudaGraph(?:KernelNodeGetParams|AddNode|AddMemAllocNode|AddEvent\w+|ConditionalHandle\w*)\b",
     r"\g<0>"),
]


# What a mistake can be that nobody looks for here, where the program has such code.
NEVER_LOOKED_AT = [
    (r"\b__shared__\b", "whether a kernel reads shared memory that nobody has written"),
    (r"\bvirtual\b", "whether a kernel calls a virtual function of an object that the host has made, which only works here"),
]


# Of a file that has test() in its place: see common/try.h.
MAIN = """
#include "common/try.h"
int main(int count, char** words) { return common::run_tests(test, count, words); }
"""


class Refusal(Exception):
    """What stands in the way, in a sentence, and the exit code."""

    def __init__(self, text, code=2):
        super().__init__(text)
        self.code = code


def say(text=""):
    print(text, flush=True)


# ---- Sources ---------------------------------------------------------------------------------------


class Sources:
    """The program's files, and the headers of its own that they include, translated. Without a main() of theirs they
    get the one of common/try.h."""

    def __init__(self, files, folders, needs_main=False, options=()):
        self.files, self.needs_main, self.options = files, needs_main, options
        toolkits = [folder for folder in folders if is_toolkit(folder)]  # nvcc needs no -I for it, but some give one
        self.folders = [folder for folder in folders if folder not in toolkits]
        self.toolkit = [folder for include in toolkits + installed_toolkits() for folder in (include, include / "cccl")
                        if folder.is_dir()]
        self.base = files[0].parent
        self.texts = {}
        self.cccl = None  # the folder of NVIDIA's C++ library, if the program uses it
        waiting = list(files)
        while waiting:
            file = waiting.pop(0)
            if file in self.texts:
                continue
            self.texts[file] = text = read(file)
            for match in _INCLUDE.finditer(text):
                name = match[2] or match[3]
                if not self.cccl and self._of_cccl(name) and (file in files or not name.startswith("cuda/")):
                    self.cccl = next((each for each in self.folders + self.toolkit if (each / name).is_file()
                                      and (not name.startswith("cuda/") or holds_libcudacxx(each))), None)
                    if self.cccl:
                        self._refuse_version(file, text, match)
                if found := self.find(file, name, bool(match[2])):
                    waiting.append(found)
                elif self.cccl and CUB_OF_DEVICE.match(name):
                    self.refuse(file, text, match.start(), name)
        for file, text in self.texts.items():
            self._refuse_missing(file, text)
        self._expand_words()
        # A launch that does not say which types the parameters have.
        self.by_address = any(_BY_ADDRESS.search(code_of(text)) for text in self.texts.values())
        self.has_asm = any(map(has_asm, self.texts.values()))
        # A source in C that has nothing of CUDA is compiled as C, as nvcc does.
        self.in_c = {file for file in files if file.suffix == ".c" and not re.search(
            r"<<<|\bcuda|__global__|__device__|__host__", code_of(self.texts[file]))}
        # nvcc needs an option for OpenMP on the host, which those who wrote the program gave.
        self.openmp = ["-fopenmp"] if any(map(_OPENMP.search, self.texts.values())) else []
        self.kernels, self.special = set(), set()
        for text in self.texts.values():
            names, special = kernels_of(text)
            self.special |= special | (self.kernels & names if len(self.files) == 1 else set())
            self.kernels |= names
        self.global_kernels = set()
        self._tell_kernels_from_libraries()
        self._refuse_nested_launches()
        self._refuse_as_nvcc()

    def name(self, file):
        """As reports name it: from the folder of the first file, or as an #include names it."""
        for folder in (FOREIGN, self.cccl):
            if folder and file.is_relative_to(folder):
                return str(file.relative_to(folder))
        return os.path.relpath(file, self.base)

    def _tell_kernels_from_libraries(self):
        """A kernel's name may be that of a function of a library, too, which the launch must not find."""
        self.special |= self.kernels & OF_C
        if any(map(_USES_STD.search, self.texts.values())):
            outside, inside = zip(*map(global_kernels_of, self.texts.values()))
            inside = set().union(*inside)
            self.global_kernels = set().union(*outside) - inside
            self.special |= inside

    def _expand_words(self):
        """Writes __global__, __shared__ and a kernel's bounds where the program has a macro that stands for them."""
        words = {match[1]: match[2].strip() for text in self.texts.values() for match in _WORDS.finditer(text)}
        bounds = {match[1]: match.groups()[1:] for text in self.texts.values() for match in _BOUNDS.finditer(text)}
        if not words and not bounds:
            return
        arguments = r"[ \t]*\(((?:[^()\n]|\([^()\n]*\))*)\)"
        use = re.compile("|".join([*(rf"\b{name}\b" for name in words), *(
            rf"\b{name}\b{arguments if parameters is not None else ''}" for name, (parameters, _) in bounds.items())]))

        def expanded(match):
            name, _, given = match[0].partition("(")
            name = name.strip()
            if name in words:
                return words[name]
            parameters, body = bounds[name]
            values = dict(zip((parameters or "").replace(" ", "").split(","), given[:-1].split(",")))
            return re.sub(r"\w+", lambda word: values.get(word[0], word[0]), body)

        for file, text in self.texts.items():
            if use.search(text):
                self.texts[file] = "".join(line if line.lstrip().startswith("#") else use.sub(expanded, line)
                                           for line in text.splitlines(keepends=True))

    def libraries(self):
        """The names of the headers that are in a folder of -I in which the program is not, or in the toolkit's: it uses
        a part of them."""
        folders = [folder for folder in [*self.folders, *self.toolkit, FOREIGN] if not self.base.is_relative_to(folder)]
        return {self.name(file) for file in self.texts if any(map(file.is_relative_to, folders))}

    def library_options(self):
        """Where the compiler finds libcu++: that of the toolkit, or what we have of it."""
        return ["-isystem", only_cccl(self.cccl)] if self.cccl else ["-I", FOREIGN / "std"]

    def _refuse_version(self, file, text, include):
        name = include[2] or include[3]
        version = cccl_version(self.cccl)
        first, last = CCCL_TRIED
        # Where libcu++ is alone there is no version of thrust and cub.
        if first <= version <= last or (version == (0, 0) and name.startswith("cuda/")):
            return
        first, last, which = ("{}.{}".format(*each) for each in (first, last, version))
        if version == (0, 0):
            which = "of a time when they did not say their version"
        where = f"{self.name(file)}:{line_of(text, include.start())}"
        raise Refusal(f"{where}: {self.cccl} has thrust and cub {which}; ./try takes {first} to {last}."
                      f" -I names the folder of another copy. {PAGE} says more.", 1)

    def find(self, file, name, quoted):
        if self._of_cccl(name) and not name.startswith("cuda/"):
            return self._find_cub(name)
        for folder in [file.parent] * quoted + self.folders + self.toolkit * bool(OF_TOOLKIT.match(name)):
            path = Path(os.path.normpath(folder / name))
            # A program may have a folder cuda/ of its own.
            if path.is_file() and not (name.startswith("cuda/") and holds_libcudacxx(folder)):
                return path
        return None

    def _of_cccl(self, name):
        """Whether it is a header of that library that has no other one of ours in its place."""
        if name.startswith("nv/"):  # curand's headers need it, too
            return self.cccl is not None
        own = [FOREIGN, ROOT / "cpu/include", *([] if self.cccl else [FOREIGN / "std"])]
        return CCCL.match(name) and not (name.startswith("cuda/") and any((each / name).is_file() for each in own))

    def _find_cub(self, name):
        """The file that is translated; None of a header that is taken as it is."""
        if not self.cccl or not CUB.match(name):
            return None
        own = [FOREIGN, *([] if CUB_OF_DEVICE.match(name) else [self.cccl])]
        return next((folder / name for folder in own if (folder / name).is_file()), None)

    def _is_cub(self, file):
        return file.is_relative_to(FOREIGN) or (self.cccl is not None and file.is_relative_to(self.cccl))

    def _refuse_missing(self, file, text):
        if self._is_cub(file):
            return
        code = code_of(text)
        for pattern, what in MISSING_WORDS:
            for match in re.finditer(pattern, code):
                if self.is_compiled(file, match.start()):
                    self.refuse(file, text, match.start(), match.expand(what))

    def is_compiled(self, file, position):
        """Whether the compiler sees this place, or the preprocessor leaves it out."""
        lines = self._compiled_lines()
        return lines is None or (file, line_of(self.texts[file], position)) in lines

    @cache
    def _compiled_lines(self):
        """(file, line) of all that the preprocessor leaves; None: it stopped, as where a header is missing."""
        seen = set()
        for source in self.files:
            done = compiler([*flags_of("quick"), "-include", FOREIGN / "prelude.h", *self.options, *self.library_options(),
                             *(word for each in [self.base, *self.folders] for word in ("-I", each)), "-x", "c++", "-E",
                             source])
            if done.returncode:
                self._refuse_missing_header(done.stderr)
                return None
            file, number = None, 0
            for line in done.stdout.splitlines():
                if marker := re.match(r'# (\d+) "(.*)"', line):
                    file, number = Path(os.path.normpath(marker[2])), int(marker[1])
                else:
                    if line.strip():
                        seen.add((file, number))
                    number += 1
        return seen

    def _refuse_missing_header(self, printed):
        """A header that is nowhere comes before all that would be said of a program that cannot be read."""
        missing = re.search(r"fatal error: (.*): No such file or directory", printed)
        if missing and not self._of_cccl(missing[1]) and not OF_COMPILER.match(missing[1]) and not any(
                (folder / missing[1]).is_file() for folder in self.toolkit if OF_TOOLKIT.match(missing[1])):
            for file in self.texts:
                printed = printed.replace(f"{file}:", f"{self.name(file)}:")
            raise Refusal(compile_error(printed, self), 1)

    def refuse(self, file, text, position, what):
        where = f"{self.name(file)}:{line_of(text, position)}"
        raise Refusal(f"{where}: the CPU backend does not have {what}. {PAGE} lists what it has.", 1)

    def _refuse_nested_launches(self):
        for file, text in self.texts.items():
            code = code_of(text)
            for match in re.finditer(r"\b__global__\b[^;{]*\{", code):
                end = _closing(code, match.end() - 1, "{}")
                if (launch := code.find("<<<", match.end(), end)) >= 0 and self.is_compiled(file, launch):
                    self.refuse(file, text, launch, "launches from a kernel (dynamic parallelism)")

    def _refuse_as_nvcc(self):
        """What is the host's in a kernel, and what is the device's on the host."""
        codes = {file: code_of(text) for file, text in self.texts.items()}
        apart = HostAndDevice(codes, set(self.files), self.kernels, {
            file for file in codes if self._is_cub(file) or any(map(file.is_relative_to, self.toolkit))})
        for file, position, what in apart.mistakes():
            if self.is_compiled(file, position):
                line = line_of(self.texts[file], position)
                code = self.texts[file].splitlines()[line - 1].strip()
                raise Refusal(f"{what}.\n    {self.name(file)}:{line}: {code}", 1)

    def write(self, folder):
        """Translates all into `folder`; returns the sources to compile."""
        written = {}
        for number, file in enumerate(self.texts):
            suffix = ".cc" if file in self.files else ".h"
            written[file] = folder / f"{number}_{re.sub(r'[^A-Za-z0-9_]', '_', file.stem)}{suffix}"
        passes = Passes([text for file, text in self.texts.items() if not self._is_cub(file)])
        for file, text in self.texts.items():
            def include(match):
                name = match[2] or match[3]
                found = self.find(file, name, bool(match[2]))
                if not found and OF_COMPILER.match(name):
                    return ""
                if self.cccl and self._of_cccl(name) and not self._is_cub(file) and (not found or self._is_cub(found)):
                    own = folder / f"cccl_{re.sub(r'[^A-Za-z0-9]', '_', name)}.h"
                    what = f'"{written[found]}"' if found in written else f"<{name}>"
                    own.write_text(f'#include "{ROOT}/cpu/foreign/thrust/detail/begin.h"\n#include {what}\n'
                                   f'#include "{ROOT}/cpu/foreign/thrust/detail/end.h"\n')
                    return f'{match[1]}"{own}"'
                return f'{match[1]}"{written[found]}"' if found in written else match[0]

            text = _INCLUDE.sub(include, text if self._is_cub(file) else with_unasked(text))
            try:
                new = translate_foreign(text, self.name(file), self.special, self.kernels,
                                        self.by_address, self.global_kernels)
            except TranslationError as error:
                raise Refusal(f"{error}. {PAGE} lists what the CPU backend can do.", 1) from None
            if not self._is_cub(file):
                new = passes.apart(new, self.name(file))
            if self.needs_main and file == self.files[0]:
                new += MAIN
            written[file].write_text(new, encoding="utf-8", errors="surrogateescape")
        return [written[file] for file in self.files]


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def holds_libcudacxx(folder):
    return (folder / "cuda/std").is_dir()


def only_cccl(folder):
    """A folder that has CCCL and nothing else: before CUDA 13 it is among all headers of the toolkit, or of the system."""
    if not is_toolkit(folder) and not (folder / "stdio.h").is_file():
        return folder
    own = CACHE / f"cccl-{digest(folder)}"
    own.mkdir(parents=True, exist_ok=True)
    for name in ("thrust", "cub", "cuda", "nv"):
        with suppress(FileExistsError):
            (own / name).symlink_to(folder / name)
    return own


def cccl_version(folder):
    """(major, minor) of thrust and cub in a folder, (0, 0) if they do not say it."""
    for name, macro in (("thrust/version.h", "THRUST_VERSION"), ("cub/version.cuh", "CUB_VERSION")):
        if (folder / name).is_file() and (number := re.search(rf"define[ \t]+{macro}[ \t]+(\d+)", read(folder / name))):
            return int(number[1]) // 100000, int(number[1]) // 100 % 1000
    return 0, 0


def read(file):
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise Refusal(f"{file}: {error.strerror}") from None
    if "\0" in text:
        raise Refusal(f"{file}: this is not a text file")
    return text.replace("\r\n", "\n")


# ---- Building --------------------------------------------------------------------------------------


def digest(*texts):
    return hashlib.sha256("\0".join(map(str, texts)).encode(errors="surrogateescape")).hexdigest()[:16]


def compiler(arguments, cwd=None):
    return subprocess.run([CXX, *map(str, arguments)], capture_output=True, text=True, errors="replace", cwd=cwd)


def backend(build, lock=threading.Lock()):
    """The folder with the backend's objects, as an archive, and its headers for this build: made once."""
    sources = sorted(ROOT.glob("cpu/*/*.cpp"))
    key = digest(*(file.read_text() for file in made_of(ROOT)), BUILDS[build], FLAGS, IDENTITIES, __file__)
    folder = CACHE / f"backend{'-' + build if build else ''}-{key}"
    if (folder / "done").exists():
        return folder
    with lock:
        say(f"    (The CPU backend is built{' for the ' + build + ' sanitizer' if build else ''}, once.)")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"lock-{build}", "w") as file:  # of several at a time one builds it, and the others wait
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            build_backend(build, sources, folder)
    return folder


def build_backend(build, sources, folder):
    for old in CACHE.glob(f"backend{'-' + build if build else ''}-*"):
        if re.fullmatch(r"backend(?:-\w+)?-[0-9a-f]{16}", old.name) and old.name.rpartition("-")[0] == (
                folder.name.rpartition("-")[0]):
            shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(dir=CACHE))

    def one(name, unit):
        flags = [BACKEND_STANDARD, *FLAGS, *(BUILDS[build] if build else ["-O2", "-DCUDA_CPU_HAS_HEAP"])]
        if build == "address" and not runs_kernels(unit[0]):  # half the time to compile
            flags += ["-O0"]
        if runs_threads(unit[0]):
            flags += ["-fno-sanitize=thread", "-DCUDA_CPU_TSAN=1"]
            flags += [f"-D{identities.MACRO}"] if IDENTITIES else []
        source = work / f"{name.replace('/', '_')}.cpp"
        source.write_text(text_of([file.relative_to(ROOT) for file in unit]))
        return compiler([*flags, "-I", ROOT / "cpu/include", "-I", ROOT, "-c", source, "-o", source.with_suffix(".o")])

    def precompiled(version):
        return compiler([*flags_of(version), "-x", "c++-header", work / "prelude.h", "-o",
                         work / "prelude.h.gch" / f"for{version}"])

    def runs_threads(source):
        return build == "thread" and source.name in RUNS_THREADS

    (work / "prelude.h").write_text(f'#include "{ROOT}/cpu/foreign/prelude.h"\n')
    (work / "prelude.h.gch").mkdir()
    joined = units(sources, runs_threads)
    for name, made in ({} if build else ready(ROOT, joined)).items():
        shutil.copy(made, work / f"{name.replace('/', '_')}.o")
        del joined[name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # What takes longest comes first.
        running = [pool.submit(one, name, joined[name]) for name in sorted(
            joined, key=lambda name: -sum(file.stat().st_size for file in joined[name]))]
        running += [pool.submit(precompiled, version) for version in versions(build)]
    results = [each.result() for each in running]
    for result in results:
        if result.returncode:
            raise Refusal("The CPU backend could not be built (./install.sh installs what it needs):\n"
                          + "\n".join(result.stderr.splitlines()[:5]), 3)
    subprocess.run(["ar", "rcs", work / "libbackend.a", *work.glob("*.o")], check=True)
    for file in work.glob("*.o"):
        file.unlink()
    (work / "done").touch()
    work.rename(folder)


def capability():
    played = os.environ.get("CUDA_CPU_COMPUTE_CAPABILITY", "9.0").replace(".", "")
    return f"-D__CUDA_ARCH__={played}0" if played.isdigit() else "-D__CUDA_ARCH__=900"


def versions(build):
    """What a program of a build is compiled as: the ordinary one twice, see cpu/two_versions.py."""
    return ["", "quick"] if build == "" and platform.machine() == "x86_64" else [build]


def flags_of(build):
    return [f"-std={STANDARDS[0]}", "-fconcepts", *FLAGS, *BUILDS[build], capability(), "-Wfatal-errors", "-fpermissive",
            f"-ffile-prefix-map={ROOT}=.", "-I", ROOT / "cpu/foreign", "-I", ROOT / "cpu/include", "-I", ROOT]


def build_program(build, sources, written, options, folder):
    """The program of a build; a Refusal with the compiler's first error if there is none."""
    libraries = backend(build)
    program = folder / f"program{'-' + build if build else ''}"
    # The same program is not built twice: its next run may have other arguments.
    sources_now = [*sorted(folder.glob("*_*.[ch]*")), ROOT / "common/try.h", ROOT / "cpu/ptx.py",
                   ROOT / "cpu/two_versions.py", *sorted((ROOT / "cpu/foreign/thrust").rglob("*.h"))]
    options = [*options, *sources.library_options()]
    key = digest(libraries, *map(flags_of, versions(build)), options, *(
        file.read_text(errors="surrogateescape") for file in sources_now))
    built = folder / f"built{'-' + build if build else ''}"
    if program.exists() and built.exists() and built.read_text() == key:
        return program
    built.unlink(missing_ok=True)
    standard = [each for each in options if str(each).startswith("-std=")]
    late_options = [*sources.openmp]
    if build == "address" and len(sources.texts) > MANY_FILES:
        late_options.append("-fno-sanitize=undefined")
    options = [*options, *late_options]
    own, late = {sources.name(file) for file in sources.texts}, sources.libraries()

    def compiled(version, source, *what):
        common = [*flags_of(version), f"-ffile-prefix-map={folder}=.", "-include", libraries / "prelude.h", *options,
                  *(word for each in [sources.base, *sources.folders] for word in ("-I", each))]
        flags = [*common, source]
        if sources.has_asm:  # an asm has all its text when macros have become what they stand for
            text = folder / f"{source.stem}{version}.ii"
            done = compiler([*common, "-include", ROOT / "cpu/foreign/ptx.h", "-E", "-fpch-preprocess", source, "-o",
                             text], cwd=folder)
            if done.returncode:
                return done
            try:
                text.write_text(translate_preprocessed(text.read_text(errors="surrogateescape"), own, late),
                                errors="surrogateescape")
            except TranslationError as error:
                raise Refusal(f"{error}. {PAGE} lists what the CPU backend can do.", 1) from None
            flags = [*flags_of(version), f"-ffile-prefix-map={folder}=.", *standard, *late_options, "-fpreprocessed", text]
        return compiler([*flags, *what], cwd=folder)

    def refuse_errors(results):
        for result in results:
            if result.returncode:
                raise Refusal(compile_error(result.stderr, sources), 1)

    in_c = [source for source, file in zip(written, sources.files) if file in sources.in_c]
    for source in in_c:
        done = subprocess.run([CC, "-g1", "-w", "-O2", "-x", "c", *options, "-std=gnu17",
                               *(word for each in [sources.base, *sources.folders] for word in ("-I", str(each))), "-c",
                               source, "-o", source.with_name(f"{source.stem}_c.o")], capture_output=True, text=True,
                              cwd=folder)
        if done.returncode:
            raise Refusal(compile_error(done.stderr, sources), 1)
    jobs = [(version, source) for source in written if source not in in_c for version in versions(build)]
    objects = [folder / f"{source.stem}{version}.o" for version, source in jobs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if len(versions(build)) == 1:
            refuse_errors(pool.map(lambda job, file: compiled(*job, "-c", "-o", file), jobs, objects))
        else:
            texts = [file.with_suffix(".s") for file in objects]
            refuse_errors(pool.map(lambda job, file: compiled(*job, "-S", "-o", file), jobs, texts))
            for number, pair in enumerate(zip(texts[::2], texts[1::2])):
                both = two_versions(*(text.read_text(errors="surrogateescape") for text in pair), f"unit{number}")
                for file, text in zip(pair, both):
                    file.write_text(_HEAP.sub(r"\1__wrap_\2", text), errors="surrogateescape")
            for done in pool.map(lambda file: subprocess.run(["as", file, "-o", file.with_suffix(".o")],
                                                             capture_output=True, text=True), texts):
                if done.returncode:
                    raise Refusal("The two versions of its functions cannot be put together, a mistake of the CPU"
                                  f" backend:\n{done.stderr[:600]}", 3)
    sanitizer = [flag for flag in BUILDS[build] if flag.startswith("-fsanitize")] if build else []
    sanitizer += IDENTITIES if build == "thread" else []
    gold = ["-fuse-ld=gold"] if build and shutil.which("ld.gold") else []
    # The counting build takes what both have of the C++ library from the backend: its own accesses are nobody's.
    first = [] if build else ["-Wl,--whole-archive", libraries / "libbackend.a", "-Wl,--no-whole-archive",
                              *(f"-Wl,--wrap={name}" for name in PRINTS)]
    linked = compiler([*sanitizer, *gold, *sources.openmp, *first, *objects,
                       *(source.with_name(f"{source.stem}_c.o") for source in in_c), libraries / "libbackend.a",
                       "-lboost_context", "-lpthread", "-o", program])
    if linked.returncode:
        undefined = re.search(r"undefined reference to [`'](.*?)'", linked.stderr)
        raise Refusal(f"It does not link: there is no {undefined[1]}. Is a source file missing on the command line?"
                      if undefined else "It does not link:\n" + linked.stderr[-600:], 1)
    built.write_text(key)
    return program


def compile_error(output, sources):
    error = re.search(r"^(.*?):(\d+)(?::\d+)?: (?:fatal )?error: (.*)$", output, re.MULTILINE)
    if not error:
        return "It does not compile:\n" + "\n".join(output.splitlines()[:5])
    file, number, text = error[1], int(error[2]), error[3].removesuffix(" [-Wfatal-errors]")
    texts = {sources.name(path): body.splitlines() for path, body in sources.texts.items()}
    if file not in texts:  # in a header of the backend: which of the reader's lines led there?
        for name, line in re.findall(r"^(?:In file included from )?(\S+?):(\d+)", output, re.MULTILINE):
            if name in texts:
                file, number = name, int(line)
    lines = texts.get(file, [])
    if missing := re.match(r"(.*): No such file or directory", text):
        asked = _INCLUDE.match(lines[number - 1]) if 0 < number <= len(lines) else None
        name = (asked[2] or asked[3]) if asked else missing[1]
        for pattern, package in PACKAGES:
            if re.match(pattern, name):
                return (f"{file}:{number}: there is no {name}. The CUDA toolkit's package {package} would install it; if it is"
                        f" elsewhere, -I names its folder. {PAGE} says more.")
        for pattern, what in MISSING_HEADERS:
            if re.match(pattern, missing[1]):
                return f"{file}:{number}: the CPU backend does not have {what}. {PAGE} lists what it has."
        text = f"there is no {missing[1]} beside it, nor among the CPU backend's headers ({PAGE} lists them)"
    elif missing := re.match(r".(\w+). (?:was not declared in this scope|does not name a type|has not been declared)",
                             text):
        if OF_OLD.match(missing[1]):
            text = (f"nvcc refuses {missing[1]}(), too, for GPUs since Volta: write {missing[1]}_sync(mask, ...), where the"
                    " mask has a bit for each thread of the warp that comes there, 0xffffffff for all")
        elif re.match(r"cuda|cu[A-Z]|__|tex|atomic|make_|cg$|wmma", missing[1]):
            text = f"the CPU backend does not have {missing[1]} ({PAGE} lists what it has)"
    elif missing := re.match(r"no matching function for call to .(atomic[A-Z]\w+)\((.*?)\*", text):
        type_ = {"long unsigned int": "unsigned long", "long int": "long", "long long int": "long long"}.get(
            missing[2], missing[2])
        text = f"nvcc refuses {missing[1]}() for {type_}, too: CUDA has no such function"
    return f"It does not compile: {text}\n    {file}, {_line(lines, number)}"


# ---- Running ---------------------------------------------------------------------------------------


class Input:
    """The standard input of ./try, which each run of the program reads from the start."""

    def __init__(self, sources):
        self.file = self.begin = None
        self.first = True
        with suppress(OSError):
            self.begin = os.lseek(0, 0, os.SEEK_CUR)  # of a file; others have no place to go back to
        reads = any(map(_READS.search, sources.texts.values()))
        if self.begin is None and reads:
            self.file = tempfile.TemporaryFile()  # what the first run was given

    @contextmanager
    def of_a_run(self):
        """What the next run's standard input is."""
        first, self.first = self.first, False
        if self.begin is not None:
            os.lseek(0, self.begin, os.SEEK_SET)
            yield 0
        elif self.file is None:
            yield subprocess.DEVNULL
        elif not first:
            self.file.seek(0)
            yield self.file
        else:
            with self._copied() as theirs:
                yield theirs

    @contextmanager
    def _copied(self):
        """The reading end of a pipe, into which what comes is copied meanwhile."""
        theirs, ours = os.pipe()
        ended, end = os.pipe()
        copier = threading.Thread(target=self._copy, args=(ours, ended))
        copier.start()
        try:
            yield theirs
        finally:
            os.close(theirs)  # a copier that writes sees that nobody reads
            os.write(end, b".")
            copier.join()
            os.close(ended)
            os.close(end)

    def _copy(self, ours, ended):
        with open(ours, "wb", buffering=0) as pipe, suppress(OSError):
            while ended not in (ready := select.select([0, ended], [], [])[0]):
                if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
                    time.sleep(0.1)  # in the background: what is typed is for somebody else
                elif not (piece := os.read(0, 1 << 14)):
                    return
                else:
                    self.file.write(piece)
                    self.file.flush()
                    pipe.write(piece)


def run(program, arguments, seconds, given, report=None, shown=False):
    """(exit code, or None after so many seconds; stderr; report's lines). It reads what is `given`, an Input. What it
    prints is shown, or not."""
    # Large arrays in large pages: half of the time of a program that only copies is that of getting its pages.
    pages = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"]))
    # Memory of the host from new[] that goes to free() is no stray access.
    environment = {**os.environ, **OPTIONS, "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
                   "GLIBC_TUNABLES": pages}
    if not shown:  # a sanitizer's, which does not know how OpenMP's threads of the host wait for each other
        environment["OMP_THREAD_LIMIT"] = "1"
    if report:
        environment |= {"CUDA_CPU_REPORT": str(report), "CUDA_CPU_SECONDS": str(seconds)}
    command = [str(program), *arguments]
    with tempfile.TemporaryFile() as errors:
        output = None if shown else subprocess.DEVNULL
        rc = None
        with given.of_a_run() as read_from, started(command, env=environment, stdin=read_from, stdout=output,
                                                    stderr=None if shown else errors) as process:
            try:
                rc = process.wait(seconds + 10)
            except subprocess.TimeoutExpired:
                pass
        errors.seek(0)
        printed = errors.read(8 << 20).decode(errors="replace")
    if "unexpected memory mapping" in printed and shutil.which("setarch") and program != "setarch":
        return run("setarch", ["-R", *command], seconds, given, report, shown)
    lines = []
    if report and report.exists():
        lines = [line.split("\t") for line in report.read_text(errors="replace").splitlines()]
    return rc, printed, lines


def ended_by(number):
    """What it means that a signal has ended the program, in a sentence."""
    crash = {
        signal.SIGABRT: "The program ended itself (abort()): an assertion of the host, say, whose line is above.",
        signal.SIGSEGV: "The program crashed: some thread reaches far outside of its memory.",
        signal.SIGBUS: "The program crashed: some thread reaches far outside of its memory.",
        signal.SIGFPE: "The program crashed: the host divides an integer by zero.",
        signal.SIGILL: "The program crashed: it came to no instruction of this CPU. A function without its return does.",
        signal.SIGKILL: "The program was killed (SIGKILL), which is no crash: the machine had no memory left, or somebody"
                        " ended it.",
    }
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    return crash.get(number, f"The program was ended by the signal {name}, which is no crash.")


def number(text):
    value = int(text)
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if value >= unit:
            return f"{value / (1000 if name == 'k' else unit):.3g} {name}"
    return str(value)


def short(name):
    """A kernel's name; if it is long, with "..." for the arguments of the inner templates."""
    for deepest in range(8, -1, -1):
        shown, depth = "", 0
        for character in name:
            depth -= character == ">"
            if depth <= deepest:
                shown += "<...>" if character == "<" and depth == deepest else character
                shown = shown.removesuffix(">") if character == ">" and depth == deepest else shown
            depth += character == "<"
        if len(shown) <= 80:
            break
    return shown if len(name) > 80 else name


def table(report):
    rows = [each[1:] for each in report if each[0] == "kernel"]
    if not rows:
        if any(each[0] == "end" for each in report):
            say("No kernel was launched.")
        return
    heads = ["kernel", "grid", "block", "launches", "loads", "sectors", "stores", "sectors", "shared", "conflicts",
             "atomics", "MB"]
    cells = [[short(row[0]), row[1], row[2], *map(number, row[3:11]), f"{int(row[11]) / 1e6:.3g}"] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells)]
    for cell in [heads, *cells]:
        say("  ".join(text.ljust(width) if k == 0 else text.rjust(width)
                      for k, (text, width) in enumerate(zip(cell, widths))).rstrip())
    for row in rows:
        counted = float(row[13])
        if 0 < counted < int(row[3]):
            what = (f"its first {row[13]} launches" if counted.is_integer() else
                    f"only the first {100 * counted / int(row[3]):.2g} % of its blocks")
            say(f"    {short(row[0])} takes long: {what} were counted and watched, and the others are taken to be like them.")
    for name in dict.fromkeys(row[0] for row in rows):
        launches, repeats = (sum(int(row[column]) for row in rows if row[0] == name) for column in (3, 14))
        if repeats:
            say(f"    {short(name)}: {repeats} of its {launches} launches found memory as an earlier one had found it. They were"
                " not run: what the earlier one wrote was written again.")


def worst(report, texts):
    said = set()
    for each in report:
        if each[0] != "worst":
            continue
        _, kernel, file, line, shared, store, _, per, least = each
        what = "store" if store == "1" else "load"
        code = texts.get(file, [])
        code = code[int(line) - 1].strip() if 0 < int(line) <= len(code) else ""
        if (file, line, what) in said or CUB.match(file):  # nobody changes a library
            continue
        said.add((file, line, what))
        cost = (f"{per} bank conflicts for each {what} of a warp" if shared == "1" else
                f"{per} sectors for each {what} of a warp, where {least} would do")
        say(f"    {file}:{line}: {cost}: {code}")


def places_of(texts):
    """The reader's own files, for what names a line: who looks for a mistake changes no library."""
    return Files({file: lines for file, lines in texts.items() if not CUB.match(file)})


def mistakes(rc, report, texts, seconds):
    """What the first run has found, in sentences."""
    lines = places_of(texts)
    found, refused, unasked = [], {}, {}
    for what, *rest in report:
        if what == "failed":
            message = rest[0]
            match = re.match(r"cuda_cpu: kernel launched at (.*?):(\d+) \((.*?)\), block \((.*?)\): (.*)", message)
            if match and ("deadlock: " in match[5] or " waits in " in match[5]):
                found.append(_waits(match[5].replace(FOR_OTHERS, "deadlock: "), lines).replace(DEADLOCK, (
                    WAITS_FOR_OTHERS if FOR_OTHERS in match[5] else DEADLOCK)))
            elif match:
                found.append(sentence(match, texts))
            else:
                found.append(message)
        elif what == "exited" and (match := re.match(r".*? \((.*?)\), block \((.*?)\): (.*)", rest[0])):
            found.append(_waits(match[3], lines).replace(
                DEADLOCK, f"{WITHOUT_ENDED} {short(match[1])}, block"
                f" ({match[2]}), to which a thread does not come, since it has ended. This run goes on without it, as GPUs"
                " since Volta do."))
        elif what == "host":
            found.append("A mistake: " + rest[0] + with_code(rest[0], texts))
        elif what == "refused" and rest[0]:  # without a reason: a kernel has failed before, which is said
            refused[rest[0]] = refused.get(rest[0], 0) + 1
        elif what == "unasked":
            unasked[rest[0]] = unasked.get(rest[0], 0) + 1
        elif what == "time":
            found.append(f"It did not end within {seconds} seconds: {rest[0]}. Make the problem smaller, or look for a"
                         " loop that never ends.")
    for why, times in refused.items():
        often = f" ({times} times)" if times > 1 else ""
        found.append(f"A launch failed{often}, and the program did not ask (cudaGetLastError() says so): {why}")
    for call, times in unasked.items():
        often = f" ({times} times)" if times > 1 else ""
        found.append(f"A call failed{often}, and the program did not look at what it returned: {call}"
                     + with_code(call, texts))
    if rc is None and not found:
        found.append(f"It did not end within {seconds} seconds, and no kernel was running. Make the problem smaller.")
    return found


def with_code(text, texts):
    places = re.findall(r"([^\s:,]+):(\d+)", text)
    said = []
    for file, line in dict.fromkeys(places):
        lines = texts.get(file, [])
        if 0 < int(line) <= len(lines):
            said.append(f"\n    {file}:{line}: {lines[int(line) - 1].strip()}")
    return "".join(said)


def sentence(match, texts):
    file, line, kernel, block, rest = match.groups()
    thread = re.match(r"(thread \(.*?\)):? (.*)", rest)
    who = f"block ({block}), {thread[1]}" if thread else f"block ({block})"
    text = thread[2] if thread else rest
    return f"A mistake in {short(kernel)}, {who}: {text}" + with_code(text, texts)


def not_looked_at(sources):
    """What no run has looked at, although the program has it, in phrases."""
    codes = [code_of(text) for file, text in sources.texts.items() if not CUB.match(sources.name(file))]
    for pattern, what in NEVER_LOOKED_AT:
        if any(re.search(pattern, code) for code in codes):
            yield what


def leaks(report):
    for each in report:
        if each[0] == "leak":
            _, count, size, where = each
            things = "1 allocation" if count == "1" else f"{count} allocations"
            say(f"Never freed: {things} of device memory, {number(size)} bytes"
                + (f", asked for at {where}" if where else "") + ".")


def between_streams(report):
    """Of ThreadSanitizer's report of a race: what is missing if it is not between threads of one kernel."""
    accesses = re.findall(r"^  (?:Previous )?(?:atomic )?(?:read|write) of size \d+ at \w+ by (.*?):\n(.*?)\n\n", report,
                          re.MULTILINE | re.DOTALL | re.IGNORECASE)[:2]
    streams = {stream[1] for _, stack in accesses if (stream := re.search(r"\bin_stream<(\d+)", stack))}
    if any(who.startswith("main thread") for who, _ in accesses):
        return ("\nOne of them is the host's. It has to wait before, as with cudaStreamSynchronize().")
    if len(streams) == 2:
        return "\nThey are in two streams. An event (cudaStreamWaitEvent()), or a wait of the host, has to come between them."
    return ""


def sanitizers(builds, folder, arguments, given, texts, seconds):
    """What the two other builds find, in sentences."""
    lines = places_of(texts)
    found = []
    for build, built in builds.items():
        program, what = built.result(), SANITIZERS[build]
        rc, printed, report = run(program, arguments, seconds, given, folder / f"report-{build}")
        printed = with_lines(printed, program)
        if "ThreadSanitizer: data race" in printed:
            found.append(_race(printed, lines) + between_streams(printed))
        elif bounds := _bounds(printed, lines):
            found.append(bounds)
        elif "cuda_cpu: no room" in printed or re.search("Sanitizer: Thread limit|Sanitizer failed to (?:m?map|allocate)",
                                                         printed):
            say(f"Not known: whether there is a {what}. So many threads wait for each other at the same time, each with a"
                " stack and memory of the sanitizer, that the system has no room for more of them. Take smaller blocks, or"
                " fewer of them.")
        elif any(each[0] == "time" for each in report) or rc is None:
            say(f"Not known: whether there is a {what}; that run did not end within {seconds} seconds. Make the problem"
                " smaller.")
        elif match := re.search(r"^cuda_cpu: kernel launched at (.*?):(\d+) \((.*?)\), block \((.*?)\): (.*)$", printed,
                                re.MULTILINE):
            found.append(_waits(match[5], lines) if "deadlock" in match[5] else sentence(match, texts))
        elif rc not in (0, 1) and "Sanitizer" in printed:
            found.append("It crashed under a sanitizer:\n    " + "\n    ".join(
                line for line in printed.splitlines() if "Sanitizer" in line)[:300])
        elif rc < 0:
            say(f"Not known: whether there is a {what}. {ended_by(-rc)}")
        else:
            say(f"No {what}: nothing was found by the {build} sanitizer." + (f"\n{NOT_LOOKED_AT}" if what == "race" else ""))
    return found


def nvcc_path():
    return shutil.which("nvcc") or ("/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None)


@cache
def installed_toolkits():
    """Folders of the CUDA toolkit's headers, if it is installed. Packages of Debian and Ubuntu put them to all others."""
    nvcc = nvcc_path()
    include = Path(nvcc).resolve().parents[1] / "include" if nvcc else None
    return [folder for folder in (include, Path("/usr/include")) if folder and folder.is_dir()]


def is_toolkit(folder):
    return (folder / "cuda_runtime.h").is_file() and (folder / "crt").is_dir()


def on_the_gpu(sources, arguments, given, options, folder, seconds):
    """The same files through nvcc, where there is a GPU to run them."""
    files = sources.files
    nvcc = nvcc_path()
    smi = shutil.which("nvidia-smi")
    if not nvcc or not smi or subprocess.run([smi, "-L"], capture_output=True).returncode:
        return 0
    say("\nOn the GPU:")
    if sources.needs_main:
        whole = folder / "with_main.cu"
        whole.write_text(f'#include "{files[0]}"\n{MAIN}')
        files = [whole, *files[1:]]
    several = ["-rdc=true"] if len(files) > 1 else []
    program = folder / "program-gpu"
    standard = [] if any(str(each).startswith("-std=") for each in options) else [f"-std={STANDARDS[0]}"]
    built = subprocess.run([nvcc, *standard, "-O3", "-lineinfo", "-arch=native", *several, *options,
                            *(word for each in [*sources.folders, ROOT] for word in ("-I", str(each))), "-o", str(program),
                            *map(str, files)], capture_output=True, text=True)
    if built.returncode:
        say("nvcc refuses it:\n" + "\n".join((built.stdout + built.stderr).splitlines()[:10]))
        return 1
    return run(program, arguments, seconds, given, shown=True)[0]


# ---- A file without a main() -----------------------------------------------------------------------


def skeleton(codes):
    """A test() of the last kernel in the files, as far as its parameters show what it needs: const T* is an input,
    T* a result (if all are T*: what is called so, or else the last one), a whole number the size."""
    kernels = [match for code in codes for match in kernel_heads(code)]
    name, template, parameters = kernels[-1] if kernels else ("kernel", "", "const float* x, float* y, int n")
    types = {each.split()[-1].lstrip("."): "float" if re.match(r"(?:typename|class)\b", each.strip()) else "32"
             for each in template.split(",") if each.strip()}
    lines, arguments, results, sources = [], [], [], []
    pointers = [each for each in parameters.split(",") if "*" in each or "[" in each]
    written = [each for each in pointers if not re.search(r"\bconst\b", each)]
    if len(written) == len(pointers):
        written = [each for each in pointers if re.search(r"\b\w*(?:out|dst|res)\w*\s*$", each, re.IGNORECASE)]
    for each in parameters.split(","):
        words = re.sub(r"\b(?:__restrict__|__restrict|restrict|volatile|const)\b|__grid_constant__", " ", each)
        match = re.fullmatch(r"\s*([\w:\s]+?)\s*(\*?)\s*(\w+)\s*(?:\[\s*\])?\s*(?:=.*)?", words, re.DOTALL)
        if not match:
            continue
        type_, pointer, own = " ".join(match[1].split()), match[2] or "[" in each, match[3]
        type_ = types.get(type_, type_)
        if pointer and each not in (written or pointers[-1:]):
            lines.append(f"  auto {own} = t.input<{type_}>(n);")
            sources.append(own)
        elif pointer:
            lines.append(f"  auto {own} = t.result<{type_}>(n);")
            results.append(own)
        else:
            whole = re.search(r"\b(?:int|long|short|unsigned|size_t|u?int\d+_t)\b", type_)
            own = "n" if whole else "true" if type_ == "bool" else "2.0f" if type_ == "float" else f"{type_}(2)"
        arguments.append(f"{own}.data()" if pointer and template else own)
    chosen = f"<{', '.join(types.values())}>" if types else ""
    value = f"{sources[0]}[i]" if sources else "0"
    checks = [f"  t.expect({own}, [=](int i) {{ return {value}; }}, 1e-5);  // what {own}[i] has to be" for own in results]
    return "\n".join(["", '#include "common/try.h"', "", "void test(Try& t, int n) {", *lines,
                      f'  t.run("{name}", [=] {{ {name}{chosen}<<<(n + 255) / 256, 256>>>({", ".join(arguments)}); }});',
                      *checks, "}"])


# ---- The command line ------------------------------------------------------------------------------


def parse(doc):
    words = sys.argv[1:]
    arguments = []
    if "--" in words:
        arguments = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
    parser = argparse.ArgumentParser("./try", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.cu")
    parser.add_argument("-I", action="append", default=[], metavar="DIR", help="where headers of the program are")
    parser.add_argument("-D", action="append", default=[], metavar="NAME=VALUE", help="a macro")
    parser.add_argument("-std", "--std", choices=STANDARDS, help=f"the standard of C++, {STANDARDS[0]} if it is not said")
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--quick", action="store_true", help="only run and count: without the two sanitizers")
    less.add_argument("--race", action="store_true", help="of the two sanitizers only that for races")
    parser.add_argument("--seconds", type=int, default=SECONDS, metavar="N", help="how long a run may take, %(default)s"
                        " if it is not said")
    given = parser.parse_intermixed_args(words)
    files = []
    for name in given.files:
        path = Path(name)
        if not path.is_file():
            folder = " It is a folder." if path.is_dir() else ""
            raise Refusal(f"There is no file {name}.{folder}")
        if path.suffix not in (".cu", ".cpp", ".cc", ".cxx", ".c"):
            raise Refusal(f"{name}: this is no source of a CUDA program; its name would end in .cu")
        files.append(path.resolve())
    for folder in given.I:
        if not Path(folder).is_dir():
            raise Refusal(f"-I {folder}: there is no such folder")
    if given.seconds < 1:
        raise Refusal(f"--seconds {given.seconds}: at least 1")
    options = [f"-D{each}" for each in given.D] + [f"-std={given.std}"] * bool(given.std)
    return files, [Path(folder).resolve() for folder in given.I], options, arguments, given


def main(doc):
    try:
        return tried(doc)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 3


def tried(doc):
    files, folders, options, arguments, given = parse(doc)
    if not shutil.which(CXX):
        raise Refusal("There is no g++: run ./install.sh first.", 3)
    codes = [code_of(read(file)) for file in files]
    needs_main = not any(re.search(r"\bmain\s*\(", code) for code in codes)
    if needs_main and not re.search(r"\bvoid\s+test\s*\(\s*(?:common\s*::\s*)?Try\s*&", codes[0]):
        say(skeleton(codes))
        raise Refusal(f"{files[0].name} has no main(), and no test(). A test() is above: it says what a kernel is given"
                      f" and what has to come out.\n`./try {given.files[0]} >> {given.files[0]}` writes it at the end of"
                      f" the file. {PAGE} says more.")
    sources = Sources(files, folders, needs_main, options)
    texts = {sources.name(path): body.splitlines() for path, body in sources.texts.items()}
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"{re.sub(r'[^A-Za-z0-9_]', '_', files[0].stem)}-{digest(*files)}"
    folder.mkdir(exist_ok=True)
    begin = time.monotonic()
    written = sources.write(folder)
    program = build_program("", sources, written, options, folder)
    say(f"    built in {time.monotonic() - begin:.1f} s")
    pool = ThreadPoolExecutor(1)
    names = [] if given.quick else list(SANITIZERS)[given.race :]
    builds = {name: pool.submit(build_program, name, sources, written, options, folder) for name in names}
    report_file = folder / "report"
    report_file.unlink(missing_ok=True)
    standard_input = Input(sources)
    rc, _, report = run(program, arguments, given.seconds, standard_input, report_file, shown=True)
    say()
    table(report)
    worst(report, texts)
    found = list(dict.fromkeys(mistakes(rc, report, texts, given.seconds)))
    if rc is not None and rc < 0 and not found:
        found.append(ended_by(-rc))
    elif rc == 3 and not found:
        found.append("A kernel has failed; its line is above.")
    for each in found:
        say(each)
    leaks(report)
    ended = not any(each[0] == "time" for each in report) and rc is not None
    if builds and ended and all(each.startswith(WITHOUT_ENDED) for each in found):
        more = sanitizers(builds, folder, arguments, standard_input, texts, given.seconds)
        for each in more:
            say(each)
        found += more
    else:
        for each in builds.values():
            each.cancel()
    if given.quick and not found:
        say("Not looked at: races, the order of streams, and most stray accesses (--quick).")
    pool.shutdown(cancel_futures=True)
    if rc not in (0, None) and not found:
        say(f"The program ended with exit code {rc}.")
    for each in not_looked_at(sources):
        say(f"Not looked at: {each}. {PAGE} says more.")
    gpu = on_the_gpu(sources, arguments, standard_input, options, folder, given.seconds) if not found else 0
    return 1 if found or rc or gpu else 0
