"""Lets a counted program run without its hooks where nobody asks for them.

The compiler calls a hook before each load and store, in functions of the host as in kernels: it does not know them
apart, and many are both. A kernel's accesses are counted, until it takes long. Of the host's it only matters whether
they reach into memory of the device, and most are in pages that are known to have none (HostPages in
cpu/watch/ledger.h). In the assembly language of the program that is asked in place of each call, which is then left out.
"""

import re

_HOOK = re.compile(r"^\tcall\t__tsan_(?:unaligned_)?(?:read|write)\d+(?:@PLT)?\n", re.MULTILINE)
# hook_use (cpu/watch/counting.h) is 1 where all is counted, 2 where nothing is, 0 for the host. A call may change these
# registers, so they are free; the address is in %rdi.
_ASKED = """\
\tcmpb\t$1, %fs:_ZN8cuda_cpu8hook_useE@tpoff
\tje\t.Lhook_{0}
\tja\t.Lno_hook_{0}
\tmovq\t%rdi, %r11
\tshrq\t$12, %r11
\tmovzwl\t%r11w, %r10d
\tleaq\t_ZN8cuda_cpu10host_pagesE(%rip), %rax
\tcmpq\t%r11, (%rax,%r10,8)
\tje\t.Lno_hook_{0}
.Lhook_{0}:
{1}.Lno_hook_{0}:
"""


def quick_hooks(assembly: str) -> str:
    """The program's assembly language for x86-64; that of another processor stays as it is."""
    pieces, end = [], 0
    for number, hook in enumerate(_HOOK.finditer(assembly)):
        pieces += [assembly[end : hook.start()], _ASKED.format(number, hook[0])]
        end = hook.end()
    return "".join(pieces) + assembly[end:]
