"""Of every function of the library a call, as operators/tests has them, and a plan that does the same."""

import ctypes
import importlib
import sys

from conftest import ROOT
import pytest

sys.path[:0] = [str(ROOT / "operators" / "tests" / folder) for folder in ("", "layouts", "gating")]
from test_library import OK, POINTER, SIZE, Attention, fused_kernels


class AttentionAlone(Attention):
    """Without log_sums, which a plan has to be made for."""

    def __init__(self, library, **options):
        super().__init__(library, log_sums=False, **options)


MODULES = [*(f"test_library{of}" for of in ("", "_softmax", "_gradients", "_meshes", "_clifford")), "test_layouts",
           "test_two_inputs"]
KINDS = [*{kind: None for module in MODULES for kind, _ in importlib.import_module(module).IN_TURN}, AttentionAlone]
for_each_function = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def number_of(call):
    """Its fk_function."""
    if call.NAME == "attention" and "log_sums" in call.host:
        return fused_kernels.FK_ATTENTION_LOG_SUMS
    name = call.NAME.upper()
    return getattr(fused_kernels, f"FK_{name}" if name.endswith("_BACKWARD") else f"FK_{name}_FORWARD")


class Plan:
    """A plan of the library's, for what a call computes."""

    def __init__(self, call, device=0, stream=None):
        self.call, self.library, self.at = call, call.library, POINTER()
        code = self.library.fk_plan_create(number_of(call), ctypes.byref(call.description), device, stream,
                                           ctypes.byref(self.at))
        assert code == OK, self.library.fk_last_error()

    def run(self, function="run", **instead):
        """Runs it, or tunes it, with the call's operands. instead: operands, `workspace`, `bytes`, or the `count` of
        the operands, or `array`, a pointer to them."""
        at = {name: buffer.at for name, buffer in self.call.device.items()} | {"bytes": self.call.needed} | instead
        names = [name for name in self.call.NAMES if name in self.call.host]
        operands = (POINTER * len(names))(*(at[name] for name in names))
        return getattr(self.library, f"fk_plan_{function}")(
            self.at, at.get("array", operands), at.get("count", len(names)), at["workspace"], at["bytes"])

    def workspace(self):
        needed = SIZE()
        assert self.library.fk_plan_workspace(self.at, ctypes.byref(needed)) == OK
        return needed.value

    def destroy(self):
        self.library.fk_plan_destroy(self.at)
        self.at = None
