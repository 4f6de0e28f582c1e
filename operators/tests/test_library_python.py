"""The package operators/python/fused_kernels declares what the header declares, is installed by pip, and tests itself.
(operators/tests/gpu has the functions of tensors.)"""

import ctypes
import importlib
import importlib.util
import re
import shutil
import sys
import types

import pytest

from conftest import NO_GPU, ROOT, execute
from test_library import BINDING, HEADER, LIBRARY, fused_kernels, library

TEXT = re.sub(r"/\*.*?\*/|^#.*?$", "", (HEADER / "fused_kernels.h").read_text(), flags=re.DOTALL | re.MULTILINE)
TYPES = {"size_t": ctypes.c_size_t, "int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float,
         "const char*": ctypes.c_char_p, "void": None, **fused_kernels.STRUCTS}
PRINTS_THE_ERROR_OF = """
import fused_kernels
try:
    fused_kernels.{}
except (ImportError, RuntimeError) as error:
    print(error)
"""


def structs():
    """Of each struct of the header its fields: (name, type)."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", TEXT, re.DOTALL):
        found[name] = [(field.strip(), TYPES[kind]) for kind, names in re.findall(r"(\w+) ([^;]+);", body)
                       for field in names.split(",")]
    return found


def of_argument(words):
    return ctypes.c_void_p if "*" in words else TYPES[words.rsplit(" ", 1)[0]]


def functions_of_header():
    found = {}
    for result, name, words in re.findall(r"FK_API (.*?)\b(fk_\w+)\((.*?)\);", TEXT, re.DOTALL):
        arguments = [] if words == "void" else [of_argument(" ".join(each.split())) for each in words.split(",")]
        found[name] = TYPES[result.strip()], arguments
    return found


def test_structs():
    assert {name: each._fields_ for name, each in fused_kernels.STRUCTS.items()} == structs()


def test_functions():
    assert fused_kernels.FUNCTIONS == functions_of_header()


def test_constants():
    constants = {name: int(value) for name, value in re.findall(r"\b(FK_\w+) = (\d+)", TEXT)}
    constants["FK_VERSION"] = int(re.search(r"#define FK_VERSION (\d+)", (HEADER / "fused_kernels.h").read_text())[1])
    assert len(constants) == 32
    assert {name: value for name, value in vars(fused_kernels).items() if name.startswith("FK_")} == constants


def test_sizes_and_offsets(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    lines, expected = [], []
    for name, struct in fused_kernels.STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(struct, field).offset)
    source = tmp_path / "sizes.c"
    source.write_text('#include <stdio.h>\n#include "fused_kernels.h"\n'
                      f"int main(void) {{ {' '.join(lines)} return 0; }}\n")
    built = execute(["gcc", f"-I{HEADER}", source, "-o", tmp_path / "sizes"])
    assert built.rc == 0, built.stderr
    assert list(map(int, execute([tmp_path / "sizes"]).stdout.split())) == expected


class Cell:
    """What a tensor with one element is to Python: another value may be written to it, and as a key it is itself."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)

    def __bool__(self):
        return bool(self.value)

    def __index__(self):
        return int(self.value)


class Operand:
    """Of a tensor what a plan is found by."""
    shape, dtype = (8, 2, 4), "float32"

    def get_device(self):
        return 0

    def stride(self):
        return (8, 4, 1)

    def is_contiguous(self):
        return True

    def data_ptr(self):
        return 0


@pytest.fixture
def planned(monkeypatch):
    """What the functions of tensors plan, each time that they do: the arguments that are no tensors."""
    found = []

    def plan(*arguments):
        found.append([each for each in arguments if not isinstance(each, Operand)])
        return types.SimpleNamespace(outputs=((), ()))

    for name in [name for name in vars(fused_kernels) if name.startswith("_plan_")]:
        monkeypatch.setattr(fused_kernels, name, plan)
    monkeypatch.setattr(fused_kernels, "_plans", {})
    monkeypatch.setattr(fused_kernels, "_current_device", lambda: 0, raising=False)
    monkeypatch.setattr(fused_kernels, "_empty", lambda *layout: Operand(), raising=False)
    monkeypatch.setattr(fused_kernels, "_launch", lambda *arguments: None)
    return found


def test_numbers_are_no_keys_by_identity(planned):
    """Of a number that is an object the value counts, in each call."""
    q, causal, scale = Operand(), Cell(0), Cell(0.25)
    for causal.value, scale.value in ((0, 0.25), (0, 0.5), (1, 0.5), (0, 0.25)):
        fused_kernels._attention(q, q, q, causal, scale, False)
        fused_kernels._attention_backward(*[q] * 6, causal, scale)
    assert planned == [each for numbers in ([False, 0.25], [False, 0.5], [True, 0.5])
                       for each in (numbers, [*numbers, False])]
    assert {type(each) for each in sum(planned, [])} == {bool, float}


def test_in_order_is_another_plan(planned):
    for deterministic in (False, True, 1, 0):
        fused_kernels._attention_backward(*[Operand()] * 6, False, 0.25, deterministic)
    assert planned == [[False, 0.25, False], [False, 0.25, True]]


@pytest.mark.parametrize("name, operands", [("clifford", 3), ("clifford_backward", 4), ("clifford_connected", 3),
                                            ("clifford_connected_backward", 4)])
def test_numbers_of_a_product_of_multivectors_are_no_keys_by_identity(planned, name, operands):
    normed, p = Cell(1), Cell(3)
    for normed.value, p.value in ((1, 3), (0, 3), (0, 2), (1, 3)):
        getattr(fused_kernels, f"_{name}")(*[Operand()] * operands, [p, 0, 0], normed)
    assert planned == [[(3, 0, 0), True], [(3, 0, 0), False], [(2, 0, 0), False]]


def test_every_entry_point_is_called_with_shapes_in_turn():
    names = {f"fk_{kind.NAME}" for module in ("", "_softmax", "_gradients", "_meshes", "_clifford")
             for kind, _ in importlib.import_module(f"test_library{module}").IN_TURN}
    computing = {name.removesuffix("_forward") for name in fused_kernels.FUNCTIONS
                 if name.endswith(("_forward", "_backward"))}
    assert names == computing


def test_the_library_is_loaded(library):
    assert library.fk_version() == fused_kernels.FK_VERSION


def test_what_is_missing_is_said(tmp_path):
    program = PRINTS_THE_ERROR_OF.format("library()")
    path = tmp_path / "none.so"
    result = execute([sys.executable, "-c", program],
                     env={"FUSED_KERNELS_LIBRARY": str(path), "PYTHONPATH": str(BINDING)})
    assert result.rc == 0, result.stderr
    assert result.stdout.startswith(f"there is no {path}; build it with `scons library`")


def test_without_pytorch_its_functions_say_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    program = PRINTS_THE_ERROR_OF.format("product(1, 2)")
    result = execute([sys.executable, "-c", program], env={"PYTHONPATH": f"{tmp_path}:{BINDING}"})
    assert result.rc == 0, result.stderr
    assert "PyTorch, which is not installed" in result.stdout


# ---- Installed, and testing itself --------------------------------------------------------------------------------

NO_OTHER = {**NO_GPU, "FUSED_KERNELS_LIBRARY": "", "FUSED_KERNELS_CAPABILITY": "", "PYTHONPATH": ""}
# Of two functions one does nothing, and the other confuses its operands.
FAULTS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int fk_softmax_forward() { return 0; }
int fk_clifford_forward(void* of, void* x, void* y, void* w, void* out, void* workspace, size_t bytes, void* stream) {
  int (*right)(void*, void*, void*, void*, void*, void*, size_t, void*) = dlsym(RTLD_NEXT, "fk_clifford_forward");
  return right(of, y, x, w, out, workspace, bytes, stream);
}
"""


def self_test(python, folder, **environment):
    return execute([python, "-m", "fused_kernels"], cwd=folder, env={**NO_OTHER, **environment})


def verdicts(output):
    """{"fk_gating_forward": {"ok"}, ...}"""
    found = {}
    for name, step, verdict in re.findall(r"^(\w+) +(forward|backward) +\w+ +(\S+)", output, re.MULTILINE):
        found.setdefault(f"fk_{name}_{step}", set()).add(verdict)
    return found


def test_wheel_is_installed_and_tests_itself(library, tmp_path):
    """In a new environment, outside of the repository, and without a compiler: by nothing but the wheel."""
    if not importlib.util.find_spec("pip"):
        pytest.skip("there is no pip")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    built = execute([*pip, "wheel", ROOT, "--no-index", "--wheel-dir", tmp_path, "--config-settings", "cuda=no",
                     "--config-settings", "scons=no"])
    assert built.rc == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("fused_kernels-*.whl")
    python = tmp_path / "environment" / "bin" / "python"
    assert execute([sys.executable, "-m", "venv", "--without-pip", python.parents[1]]).rc == 0
    installed = execute([*pip, "--python", python, "install", "--no-index", wheel])
    assert installed.rc == 0, installed.stdout + installed.stderr
    result = self_test(python, tmp_path, PATH="")
    assert result.rc == 0, result.stdout + result.stderr
    version, path = re.match(r"fused_kernels (\d+), (.*)", result.stdout).groups()
    assert int(version) == fused_kernels.FK_VERSION and path.startswith(f"{python.parents[1]}/")
    page = (ROOT / "docs/library.md").read_text()
    (transcript,) = re.findall(r"<!-- transcript -->\n```\n\$ .*?\n(.*?)```", page, re.DOTALL)
    assert re.fullmatch(re.escape(transcript).replace(r"\.\.\.", ".*"), result.stdout, re.DOTALL)
    assert verdicts(result.stdout) == {name: {"ok"} for name in fused_kernels.FUNCTIONS
                                       if name.endswith(("_forward", "_backward"))}
    assert not re.search(r"NEEDED +lib(stdc\+\+|gcc)", execute(["objdump", "-p", path]).stdout)


@pytest.mark.parametrize("needed, newest, tag", [
    (["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"], ["2.2.5", "2.9", "2.28"], "manylinux_2_28"),
    (["libc.so.6"], ["2.2.5", "2.14"], "manylinux_2_17"),  # older than any of that name
    (["libc.so.6", "libstdc++.so.6"], ["2.28"], "linux"),
    ([], [], "linux"),  # where there is no objdump
])
def test_wheel_says_what_it_needs(monkeypatch, needed, newest, tag):
    make_wheel = importlib.import_module("make_wheel")
    said = [f"  NEEDED               {each}" for each in needed] + [f"    0x0 0x00 05 GLIBC_{each}" for each in newest]
    monkeypatch.setattr(make_wheel, "output_of", lambda *command: "\n".join(said))
    assert re.fullmatch(rf"{tag}_[^\d]\w+", make_wheel.platform_of(["library"]))


def test_faults_are_found(library, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    source, faulty = tmp_path / "faults.c", tmp_path / "faults.so"
    source.write_text(FAULTS)
    built = execute(["gcc", "-shared", "-fPIC", source, "-o", faulty, "-Wl,--no-as-needed", LIBRARY,
                     f"-Wl,-rpath,{LIBRARY.parent}", "-ldl"])
    assert built.rc == 0, built.stderr
    result = self_test(sys.executable, BINDING, FUSED_KERNELS_LIBRARY=str(faulty))
    assert result.rc == 1, result.stderr
    wrong = {name for name, verdict in verdicts(result.stdout).items() if verdict != {"ok"}}
    # The gradients of softmax are computed from its result.
    assert wrong == {"fk_softmax_forward", "fk_softmax_backward", "fk_clifford_forward"}
    assert re.search(r"^softmax +forward +fp32 +WRONG +nan ", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("is_there", [False, True])
def test_no_library_is_one_sentence(tmp_path, is_there):
    """Nor is a file that is none."""
    path = tmp_path / "none.so"
    if is_there:
        path.write_text("no library\n")
    result = self_test(sys.executable, BINDING, FUSED_KERNELS_LIBRARY=str(path))
    assert result.rc == 1 and result.stdout == ""
    assert re.fullmatch(rf"error: [^\n]*{re.escape(str(path))}[^\n]*\n", result.stderr)


def test_cpu_library_has_no_functions_of_tensors(library, monkeypatch):
    monkeypatch.setattr(fused_kernels, "library", lambda: library)
    monkeypatch.setenv("FUSED_KERNELS_LIBRARY", str(LIBRARY))
    with pytest.raises(RuntimeError, match="is the CPU's library, and tensors are on a GPU"):
        fused_kernels._Plan("fk_gating_forward", fused_kernels.fk_gating(), ())
