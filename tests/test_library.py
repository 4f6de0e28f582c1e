"""The library as another program calls it: through ctypes alone, built for the CPU backend."""

import ctypes
import math
import re
import shutil
import struct
import sys
import threading

from conftest import CPU_BUILD, ROOT, execute
import pytest

sys.path.insert(0, str(ROOT / "docs"))
import functions

LIBRARY = CPU_BUILD / "libfused_kernels.so"
HEADER = ROOT / "operators" / "include"
GUARD, POISON = 256, 0xAB  # bytes before and after each operand, and what is there
SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p
OK, BAD_ARGUMENT, BAD_SHAPE, BAD_ALIGNMENT, OVERLAP, BAD_WORKSPACE, BAD_DEVICE = range(7)
FLOAT16 = 1


class Gating(ctypes.Structure):
    _fields_ = [("size", SIZE), ("type", ctypes.c_int), ("rows", ctypes.c_int64), ("inputs", ctypes.c_int64),
                ("hidden", ctypes.c_int64)]


@pytest.fixture(scope="module")
def library():
    if not LIBRARY.exists():
        pytest.skip("scons library has not been run")
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.fk_last_error.restype = ctypes.c_char_p
    loaded.fk_gating_workspace.argtypes = [POINTER, POINTER]
    loaded.fk_gating_forward.argtypes = [*[POINTER] * 8, SIZE, POINTER]
    loaded.cudaMalloc.argtypes = [POINTER, SIZE]
    loaded.cudaFree.argtypes = [POINTER]
    loaded.cudaMemcpy.argtypes = [POINTER, POINTER, SIZE, ctypes.c_int]
    loaded.cudaMemset.argtypes = [POINTER, ctypes.c_int, SIZE]
    return loaded


class Buffer:
    """Bytes on the device between two guards."""

    def __init__(self, library, content):
        self.library, self.bytes, self.start = library, len(content), POINTER()
        whole = bytes([POISON]) * GUARD + content + bytes([POISON]) * GUARD
        assert library.cudaMalloc(ctypes.byref(self.start), len(whole)) == 0
        assert library.cudaMemcpy(self.start, whole, len(whole), 1) == 0
        self.at = self.start.value + GUARD

    def all(self):
        whole = ctypes.create_string_buffer(self.bytes + 2 * GUARD)
        assert self.library.cudaMemcpy(whole, self.start, len(whole), 2) == 0
        return whole.raw

    def content(self):
        """What is between the guards, which are as they were."""
        whole = self.all()
        assert set(whole[:GUARD]) | set(whole[-GUARD:]) == {POISON}
        return whole[GUARD:-GUARD]

    def free(self):
        self.library.cudaFree(self.start)


def numbers(count, seed, scale):
    """Multiples of scale / 8 that fp16 holds."""
    return [scale * ((i * 37 + i // 11 * 5 + 13 * seed) % 17 - 8) / 8 for i in range(count)]


def fp16(values):
    return struct.pack(f"{len(values)}e", *values)


class Layer:
    """Operands of a gated layer on the device, and what is expected of it."""

    NAMES = ("x", "w1", "w2", "b1", "b2")

    def __init__(self, library, rows, inputs, hidden, seed=0):
        self.library, self.shape = library, Gating(ctypes.sizeof(Gating), FLOAT16, rows, inputs, hidden)
        counts = (rows * inputs, inputs * hidden, inputs * hidden, hidden, hidden)
        scales = (1, 0.5, 0.5, 1, 1)
        self.host = {name: numbers(count, seed + i, scale)
                     for i, (name, count, scale) in enumerate(zip(self.NAMES, counts, scales))}
        self.device = {name: Buffer(library, fp16(values)) for name, values in self.host.items()}
        self.device["out"] = Buffer(library, b"\xff" * (2 * rows * hidden))  # NaN
        needed = SIZE()
        assert library.fk_gating_workspace(ctypes.byref(self.shape), ctypes.byref(needed)) == OK
        self.device["workspace"] = Buffer(library, b"\xff" * max(needed.value, 1))
        self.needed = needed.value

    def call(self, shape=None, stream=None, **instead):
        at = {name: buffer.at for name, buffer in self.device.items()} | {"bytes": self.needed} | instead
        description = instead.get("description", ctypes.byref(shape or self.shape))
        return self.library.fk_gating_forward(description, *(at[name] for name in (*self.NAMES, "out")),
                                              at["workspace"], at["bytes"], stream)

    def is_right(self):
        rows, inputs, hidden = self.shape.rows, self.shape.inputs, self.shape.hidden
        x, w1, w2, b1, b2 = (self.host[name] for name in self.NAMES)
        found = struct.unpack(f"{rows * hidden}e", self.device["out"].content())
        for row in range(rows):
            own = x[row * inputs:(row + 1) * inputs]
            for col in range(hidden):
                gate = b1[col] + sum(a * b for a, b in zip(own, w1[col::hidden]))
                value = b2[col] + sum(a * b for a, b in zip(own, w2[col::hidden]))
                expected = value / (1 + math.exp(-gate))
                # As in tests/gating_shapes.cu: fp16's rounding, and some of fp32's in the sigmoid.
                bound = 2.0**-11 * 1.01 * abs(expected) + 2.0**-25
                if not abs(found[row * hidden + col] - expected) <= bound:
                    return False
        for name, buffer in self.device.items():
            if name in self.NAMES:
                assert buffer.content() == fp16(self.host[name])
        self.device["workspace"].content()
        return True

    def free(self):
        for buffer in self.device.values():
            buffer.free()


@pytest.fixture
def layer(library):
    one = Layer(library, 70, 24, 40)
    yield one
    one.free()


@pytest.mark.parametrize("shape", [(70, 24, 40), (1, 1, 1), (65, 7, 9), (33, 65, 130), (40, 512, 256)])
def test_gated_layer(library, shape):
    layer = Layer(library, *shape)
    for _ in range(2):
        library.cudaMemset(layer.device["out"].at, 0xff, layer.device["out"].bytes)
        assert layer.call() == OK, library.fk_last_error()
        assert layer.is_right()
    layer.free()


def damaged():
    """Of each mistake: its name, the code, a word of the sentence, and what it changes."""
    for name in (*Layer.NAMES, "out"):
        yield f"{name} is NULL", BAD_ARGUMENT, f"{name} is NULL", lambda _, n=name: {n: None}
        yield (f"{name} is misaligned", BAD_ALIGNMENT, f"{name}: the pointer is not aligned to 16",
               lambda layer, n=name: {n: layer.device[n].at + 2})
    for name in Layer.NAMES:
        yield (f"out overlaps {name}", OVERLAP, "out, which is written, overlaps",
               lambda layer, n=name: {"out": layer.device[n].at})
        yield (f"{name} is on the host", BAD_DEVICE, f"{name} is not memory of a GPU",
               lambda _, n=name: {n: 1 << 20})
    for field, value in (("rows", 0), ("rows", -1), ("rows", 1 << 31), ("inputs", 0), ("inputs", -5),
                         ("inputs", 1 << 40), ("hidden", 0), ("hidden", -1), ("hidden", 1 << 21)):
        yield f"{field} is {value}", BAD_SHAPE, f"{field} is {value}", {field: value}
    yield "size", BAD_ARGUMENT, "size is 8", {"size": 8}
    yield "type", BAD_ARGUMENT, "type is 77", {"type": 77}
    yield "no description", BAD_ARGUMENT, "gating is NULL", lambda _: {"description": None}


@pytest.mark.parametrize("name, code, words, change", [pytest.param(*each, id=each[0]) for each in damaged()])
def test_what_is_damaged_is_refused(library, layer, name, code, words, change):
    shape, instead = None, {}
    if callable(change):
        instead = change(layer)
    else:
        shape = Gating.from_buffer_copy(layer.shape)
        for field, value in change.items():
            setattr(shape, field, value)
    before = {each: buffer.all() for each, buffer in layer.device.items()}
    assert layer.call(shape, **instead) == code
    assert words in library.fk_last_error().decode()
    assert before == {each: buffer.all() for each, buffer in layer.device.items()}


@pytest.mark.parametrize("code, words, change", [
    (BAD_WORKSPACE, "are needed", lambda layer: {"bytes": layer.needed - 1}),
    (BAD_ARGUMENT, "workspace is NULL", lambda layer: {"workspace": None}),
    (BAD_ALIGNMENT, "workspace: the pointer", lambda layer: {"workspace": layer.device["workspace"].at + 16}),
    (OVERLAP, "overlaps", lambda layer: {"workspace": layer.device["x"].at}),
])
def test_a_damaged_workspace_is_refused(library, code, words, change):
    layer = Layer(library, 33, 65, 130)
    assert layer.needed > 0
    before = {each: buffer.all() for each, buffer in layer.device.items()}
    assert layer.call(**change(layer)) == code
    assert words in library.fk_last_error().decode()
    assert before == {each: buffer.all() for each, buffer in layer.device.items()}
    layer.free()


def test_two_threads_call_at_the_same_time(library):
    layers = [Layer(library, 70, 24, 40, seed) for seed in (1, 2)]
    codes = []
    threads = [threading.Thread(target=lambda own=own: codes.extend(own.call() for _ in range(5)))
               for own in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [OK] * 10 and all(own.is_right() for own in layers)


def test_the_header_is_c99(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    source = tmp_path / "includes.c"
    source.write_text('#include "fused_kernels.h"\nint main(void) { return FK_OK; }\n')
    result = execute(["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER}",
                      "-fsyntax-only", source])
    assert result.rc == 0, result.stderr


def test_the_example(library, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    program = tmp_path / "gated_layer"
    result = execute(["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER}",
                      f"-I{ROOT / 'cpu/c'}", ROOT / "examples/gated_layer.c", f"-L{CPU_BUILD}",
                      f"-Wl,-rpath,{CPU_BUILD}", "-lfused_kernels", "-o", program])
    assert result.rc == 0, result.stderr
    result = execute([program])
    assert result.rc == 0, result.stdout + result.stderr


def test_the_page_has_the_headers_functions():
    declared = set(re.findall(r"\b(fk_\w+)\(", re.sub(r"/\*.*?\*/", "", (HEADER / "fused_kernels.h").read_text(),
                                                      flags=re.DOTALL)))
    assert {name for name, _ in functions.functions()} == declared
    assert functions.PAGE.read_text() == functions.page()
