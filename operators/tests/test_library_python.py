"""operators/python/fused_kernels.py declares what the header declares. (operators/tests/gpu has the functions of tensors.)"""

import ctypes
import importlib
import re
import shutil
import sys
import types

import pytest

from conftest import execute
from test_library import BINDING, HEADER, fused_kernels, library

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
    assert len(constants) == 31
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
    assert planned == [[False, 0.25], [False, 0.5], [True, 0.5]]
    assert {type(each) for each in planned[0]} == {bool, float}


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
