"""libfused_kernels.so as ctypes sees it: where it is, the types of its functions, and what its codes say."""

import contextlib
import ctypes
import functools
import os
import pathlib

from ._header import FK_BAD_ALIGNMENT, FK_BAD_ARGUMENT, FK_BAD_SHAPE, FK_OVERLAP, FK_VERSION, INT, POINTER, SIZE
from ._table import OPERATORS

LEAST_CAPABILITY = 7.5  # of a GPU that the library can be built for
_WORKSPACE = INT, [POINTER, POINTER]  # description, bytes
FUNCTIONS = {  # name -> (type of the result, types of the arguments)
    "fk_version": (INT, []),
    "fk_last_error": (ctypes.c_char_p, []),
    "fk_last_way": (ctypes.c_char_p, []),
    "fk_tune": (INT, [INT]),
    "fk_plan_create": (INT, [INT, POINTER, INT, POINTER, POINTER]),
    "fk_plan_workspace": _WORKSPACE,
    "fk_plan_way": (ctypes.c_char_p, [POINTER]),
    "fk_plan_run": (INT, [POINTER, POINTER, SIZE, POINTER, SIZE]),
    "fk_plan_tune": (INT, [POINTER, POINTER, SIZE, POINTER, SIZE]),
    "fk_plan_destroy": (None, [POINTER]),
}


def query_of(function):
    """The function that says how much workspace another one needs."""
    return function.removesuffix("_forward") + "_workspace"


for _each in OPERATORS.values():
    # Description, operands and results, workspace, its bytes, stream.
    FUNCTIONS[_each.function] = INT, [POINTER] * (2 + len(_each.operands + _each.results)) + [SIZE, POINTER]
    FUNCTIONS[query_of(_each.function)] = _WORKSPACE


def load(path):
    """The library at this path, as a ctypes.CDLL that knows the types of FUNCTIONS. Raises a RuntimeError if it is not
    of this file's version, and an OSError if it cannot be loaded."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        if not hasattr(loaded, name):
            raise RuntimeError(f"{path} has no function {name}; build it again: scons library")
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if loaded.fk_version() != FK_VERSION:
        raise RuntimeError(f"{path} has version {loaded.fk_version()}; this file is for version {FK_VERSION}")
    return loaded


@functools.cache
def gpu():
    """(the driver's library, the first GPU's name, its compute capability), such as (CDLL, "NVIDIA A100", 8.0); None if
    there is no driver or no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name, digits = INT(), ctypes.create_string_buffer(256), [INT(), INT()]
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    failed = driver.cuDeviceGetName(name, len(name), 0)
    for number, attribute in zip(digits, (75, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and MINOR
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    return None if failed else (driver, name.value.decode(), digits[0].value + digits[1].value / 10)


def is_usable(found):
    """Whether what gpu() returns is a GPU that the library is for."""
    return found is not None and found[2] >= LEAST_CAPABILITY


def library_path():
    """Where the library is: what the environment variable FUSED_KERNELS_LIBRARY names; or else, of the libraries in
    this package or in build/ of this repository, the GPU's if there is a usable GPU, and else the CPU's. Raises a
    RuntimeError if there is none."""
    if named := os.environ.get("FUSED_KERNELS_LIBRARY"):
        found = [pathlib.Path(named)]
    else:
        here = pathlib.Path(__file__).resolve().parent
        folder = here if (here / "cpu").is_dir() else here.parents[2] / "build"
        found = [folder / kind / "libfused_kernels.so" for kind in ("cuda", "cpu")[not is_usable(gpu()):]]
    for path in found:
        if path.exists():
            return path
    raise RuntimeError(f"there is no {found[0]}; build it with `scons library`, or let the environment variable "
                       "FUSED_KERNELS_LIBRARY name the library")


@functools.cache
def library():
    """The library at library_path(), loaded once. Raises what library_path() and load() raise."""
    return load(library_path())


def is_for_cpu(loaded):
    """Whether a library is the CPU's: it brings CUDA's functions for memory."""
    return hasattr(loaded, "cudaMalloc")


@contextlib.contextmanager
def tuning():
    """`with tuning(): ...` calls the functions of tensors as usual, but the first call for operands of some shapes,
    strides and types tries the ways to compute it, and waits for them. Later calls for the same on this device, in
    this block and after it, use the one that was the fastest. That holds for all threads, so also for gradients,
    which PyTorch computes in another one. While a CUDA graph is captured nothing is tried."""
    library().fk_tune(1)
    try:
        yield
    finally:
        library().fk_tune(0)


def error_of(code):
    """The exception for a call of this thread that returned this code."""
    refused = code in (FK_BAD_ARGUMENT, FK_BAD_SHAPE, FK_BAD_ALIGNMENT, FK_OVERLAP)
    return (ValueError if refused else RuntimeError)(library().fk_last_error().decode())
