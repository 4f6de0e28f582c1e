"""Calls of CUDA's runtime whose result a program throws away: they are marked, so that one that fails is mentioned."""

import re

from cu2cpp import _closing, code_of

# A call that may fail without a mistake is none of these: one that asks whether something is there, or enables it.
_CALLS = re.compile(
    r"\bcuda(?:Mem(?:cpy|set)\w*|Malloc\w*|Free\w*|HostAlloc|SetDevice|DeviceSynchronize|GetDeviceProperties"
    r"|Stream(?!Query|IsCapturing|GetCaptureInfo)\w+|Event(?!Query)\w+|Func\w+|Graph\w+|LaunchHostFunc)\s*\(")
_DIRECTIVES = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)


def _begins_statement(code, position):
    """Whether a statement begins here."""
    before = code[:position].rstrip().removesuffix("::").rstrip()
    if before.endswith(")"):
        depth = 0
        for at in range(len(before) - 1, -1, -1):
            depth += (before[at] == ")") - (before[at] == "(")
            if depth == 0:
                return re.search(r"\b(?:if|for|while|switch|constexpr)\s*$", before[:at]) is not None
        return False
    if before.endswith(":"):  # of a label, and not of a condition
        return "?" not in re.split(r"[;{}]", before)[-1]
    return before.endswith((";", "{", "}")) or re.search(r"\b(?:else|do)$", before) is not None


def with_unasked(text):
    """The text with a mark around each such call, which takes no line."""
    code = _DIRECTIVES.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), code_of(text))
    parts, done = [], 0
    for match in _CALLS.finditer(code):
        end = _closing(code, match.end() - 1) + 1
        if match.start() < done or not code[end:].lstrip().startswith(";") or not _begins_statement(code, match.start()):
            continue
        name = match[0][:-1].rstrip()
        begin = match.start()
        parts += [text[done:begin], f'cuda_cpu::unasked("{name}", ', text[begin:end], ")"]
        done = end
    return "".join([*parts, text[done:]])
