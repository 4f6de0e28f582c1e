"""The size of a description says which fields its caller knows."""

import ctypes
import mmap

import pytest

from every_function import KINDS, for_each_function, fused_kernels, number_of
from test_library import BAD_ARGUMENT, FLOAT16, OK, POINTER, SIZE, Gated, Product, library

# The shortest that each library takes, from the first one on: a later one may not ask for more.
SHORTEST = {"fk_product": 40, "fk_gating": 40, "fk_attention": 168, "fk_attention_gradients": 264,
            "fk_diffusion": 48, "fk_softmax": 40, "fk_gradients": 40, "fk_clifford": 48}
MOST = 4096


def sizes_of(kind):
    return SHORTEST[kind.Description.__name__], ctypes.sizeof(kind.Description)


class AtTheEnd:
    """Memory behind which nothing can be read."""

    def __init__(self):
        page = mmap.PAGESIZE
        self.memory = mmap.mmap(-1, 3 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.end = start + 2 * page
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = [POINTER, SIZE, ctypes.c_int]
        assert mprotect(self.end, page, 0) == 0  # PROT_NONE

    def put(self, data):
        """Where the last of these bytes is the last that can be read."""
        ctypes.memmove(self.end - len(data), data, len(data))
        return self.end - len(data)


@pytest.fixture(scope="module")
def at_the_end():
    return AtTheEnd()


def ask(call, description):
    """The codes of all that takes a description; with FK_OK each has done what it does with a whole one."""
    library, needed, plan = call.library, SIZE(), POINTER()
    codes = {call.workspace_of(description, ctypes.byref(needed)),
             library.fk_plan_create(number_of(call), description, 0, None, ctypes.byref(plan))}
    call.clear()
    codes.add(call.call(description=description))
    if codes == {OK}:
        assert needed.value == call.needed
        assert call.is_right()
    assert (plan.value is not None) == (codes == {OK})
    library.fk_plan_destroy(plan)
    return codes


def bytes_of(description, size):
    """Of the description, with this size; further ones are 0."""
    return SIZE(size).value.to_bytes(8, "little") + bytes(description)[8:size] + bytes(
        max(0, size - ctypes.sizeof(description)))


@for_each_function
def test_every_size(library, at_the_end, kind):
    """Up to that of this library's struct, and a bit longer. Behind each nothing can be read."""
    call = kind(library)
    shortest, own = sizes_of(kind)
    for size in range(own + 17):
        codes = ask(call, at_the_end.put(bytes_of(call.description, size)))
        if size % 8 == 0 and size >= shortest:
            assert codes == {OK}, (size, library.fk_last_error())
            continue
        assert codes == {BAD_ARGUMENT}, size
        assert f"size is {size}; it has to be a multiple of 8 from {shortest} to {MOST}" in (
            library.fk_last_error().decode())
    call.free()


@for_each_function
def test_a_longer_description(library, at_the_end, kind):
    """It is taken if all is 0 that this library does not know."""
    call = kind(library)
    own = ctypes.sizeof(kind.Description)
    for size in (own + 8, own + 64, MOST):
        whole = bytearray(bytes_of(call.description, size))
        assert ask(call, at_the_end.put(bytes(whole))) == {OK}, library.fk_last_error()
        for at in (own, own + 7, size - 1):
            whole[at] = 1
            assert ask(call, at_the_end.put(bytes(whole))) == {BAD_ARGUMENT}
            assert (f"size is {size}; this library knows {own} bytes, and the others have to be 0"
                    in library.fk_last_error().decode())
            whole[at] = 0
    for size in (MOST + 8, 1 << 40, (1 << 64) - 8):
        assert ask(call, at_the_end.put(size.to_bytes(8, "little") + bytes(call.description)[8:])) == {BAD_ARGUMENT}
        assert f"size is {size}; it has to be" in library.fk_last_error().decode()
    call.free()


@pytest.mark.parametrize("kind, options, fields", [
    (Product, dict(a_stride=32), "a_stride"), (Product, dict(a_stride=32, b_stride=56), "b_stride"),
    (Gated, dict(x_stride=32), "x_stride"),
])
def test_fields_that_are_missing_are_0(library, kind, options, fields):
    """Whatever is behind the last field that the caller knows."""
    call = kind(library, **options)
    last = getattr(kind.Description, fields)
    size = last.offset + last.size
    own = ctypes.sizeof(kind.Description)
    assert size < own
    data = bytes_of(call.description, size) + b"\xa5" * (own - size)
    assert ask(call, ctypes.create_string_buffer(data)) == {OK}, library.fk_last_error()
    assert ask(call, ctypes.create_string_buffer(own.to_bytes(8, "little") + data[8:])) != {OK}
    call.free()


def test_padding_is_no_field(library):
    """A caller's compiler may have left anything there."""
    call = Product(library)
    whole = bytearray(bytes(call.description))
    whole[fused_kernels.fk_product.type.offset + 4:fused_kernels.fk_product.rows.offset] = b"\xa5" * 4
    assert ask(call, ctypes.create_string_buffer(bytes(whole))) == {OK}
    call.free()


def test_no_struct_is_shorter_than_the_shortest():
    assert {kind.Description.__name__ for kind in KINDS} == set(SHORTEST)
    assert all(each % 8 == 0 and each <= ctypes.sizeof(fused_kernels.STRUCTS[name]) for name, each in SHORTEST.items())
