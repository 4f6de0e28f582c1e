"""How a program is linked with cpu/watch/tsan_identities.cpp."""

import os
import subprocess

# The functions of ThreadSanitizer whose place that file takes, as GCC 12 has them.
FUNCTIONS = (
    "_ZN11__sanitizer14ThreadRegistryC1EPFPNS_17ThreadContextBaseEjEjjj", "_ZN11__sanitizer15internal_memsetEPvim",
    "_ZN11__sanitizer22ReleaseMemoryPagesToOSEmm", "_ZN6__tsan5AllocEm", "_ZN6__tsan8FreeImplEPv",
    "_ZN6__tsan12FiberDestroyEPNS_11ThreadStateEmS1_")
MACRO = "CUDA_CPU_TSAN_IDENTITIES"  # without it the file is empty


def link_flags(cxx):
    """The linker's flags; none where the compiler is not this one release of GCC on x86-64."""

    def says(option):
        try:
            return subprocess.run([cxx, option], capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    known = ("Free Software Foundation" in says("--version") and says("-dumpversion") == "12"
             and says("-dumpmachine").startswith("x86_64") and os.path.isabs(says("-print-file-name=libtsan.a")))
    return ["-static-libtsan", *(f"-Wl,--wrap={name}" for name in FUNCTIONS)] if known else []
