"""Lets the host's own code of a counted program run without its hooks.

The compiler calls a hook before each load and store, in functions of the host as in kernels: it does not know them
apart, and many are both. A kernel's accesses are counted. Of the host's it only matters whether they reach into memory
of the device, and most are in pages that are known to have none (HostPages in cpu/watch/ledger.h). In the assembly
language of the program that is asked in place of each call, which is then left out.
"""

import re

_HOOK = re.compile(r"^\tcall\t__tsan_(?:unaligned_)?(?:read|write)\d+(?:@PLT)?\n", re.MULTILINE)
# A thread of a kernel has a runner. A call may change these registers, so they are free; the address is in %rdi.
_ASKED = """\
\tcmpq\t$0, %fs:_ZN8cuda_cpu6runnerE@tpoff
\tjne\t.Lhook_{0}
\tmovq\t%rdi, %r11
\tshrq\t$12, %r11
\tmovzwl\t%r11w, %r10d
\tleaq\t_ZN8cuda_cpu10host_pagesE(%rip), %rax
\tcmpq\t%r11, (%rax,%r10,8)
\tje\t.Lno_hook_{0}
.Lhook_{0}:
{1}.Lno_hook_{0}:
"""


def quick_host(assembly: str) -> str:
    """The program's assembly language for x86-64; that of another processor stays as it is."""
    pieces, end = [], 0
    for number, hook in enumerate(_HOOK.finditer(assembly)):
        pieces += [assembly[end : hook.start()], _ASKED.format(number, hook[0])]
        end = hook.end()
    return "".join(pieces) + assembly[end:]
