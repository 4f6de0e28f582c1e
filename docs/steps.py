"""What changed from one kernel of a lesson to the next: `scons diff LESSON`.

    docs/steps.py LESSON [FROM [TO]]

For each two neighbours of a ladder it prints their difference, taken from the source: lines that only
the first has start with -, lines that only the second has with +. FROM and TO are names of kernels,
as in the source; without them it is the whole ladder. Where little is the same the new kernel is shown
as it is. The functions and types between the two that the new one uses are named.
"""
import argparse
import difflib
import pathlib
import re
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The kernels of each lesson from which to which one goes, in the order of its table.
LADDERS = {
    "1_matmul_basic": ["matmul_uncoalesced", "matmul_coalesced"],
    "2_matmul_sharedmem": [
        "matmul_tile", "matmul_registers", "matmul_vectors", "matmul_async", "matmul_lean", "matmul_ahead",
        "matmul_stream_k",
    ],
    "3_matmul_tensorcore": [
        "matmul_wmma_global", "matmul_wmma_shared", "matmul_ldmatrix", "matmul_stages", "matmul_lean",
        "matmul_mma", "matmul_wgmma", "matmul_specialized", "matmul_persistent", "matmul_clusters",
        "matmul_rasterized",
    ],
    "6_gating_fused": [
        "gating_simple", "gating_tensor_cores", "gating_async", "gating_resident",
        "gating_hopper_resident", "gating_hopper_cluster",
    ],
    "7_diffusion_fused": ["project_slices", "add_slices", "expand_spectrum", "diffusion_one_launch",
                          "diffusion_clusters"],
    "8_spatial_gradients": [
        "gradient_features", "associated_features", "specialized_features", "cluster_features",
        "accumulate_backward", "specialized_backward",
    ],
    "9_matmul_softmax": [
        "fused_rows", "logit_tiles", "fused_tiles", "fused_cluster", "exchange_tiles", "tensor_core_cluster",
        "softmax_specialized", "fused_split_k",
    ],
    "10_clifford_gp": ["fused_product", "forward_one_launch", "forward_on_chip", "forward_streamed"],
    "bonus_attention": [
        "attention_rows", "attention_mma", "attention_hopper", "attention_ping_pong", "attention_overlap",
        "attention_stay",
    ],
    "bonus_attention_backward": ["attention_backward_mma", "attention_backward_hopper"],
    "bonus_clifford_fully_connected": ["forward_tiles", "planes_first", "planes_beside"],
    "bonus_diffusion_gpus": ["diffusion", "sum_vertices", "expand_sums"],
    "bonus_matmul_A_stationary": ["matmul_atomic", "matmul_tile_stationary"],
    "bonus_memory": ["chain_registers", "chase_shared", "chase_l1", "chase_l2"],
}
DIFFERENT = 0.1  # of the lines are the same: below that a difference says nothing
COLORS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[1m"}


def blocks(lines):
    """(first, last) of each unindented definition, with the comments and the template line above."""
    first, inside, body = None, False, False
    for number, line in enumerate(lines):
        if not inside:
            if not line.strip() or line.startswith(("// ----", "#")):
                first = None
                continue
            first = number if first is None else first
            inside = not line.startswith(("//", "template"))
            body = False
        if inside:
            body = body or "{" in line
            if line.rstrip().endswith(";") and (not body or line.startswith("}")):
                inside = False
            elif body and (line.startswith("}") or (not line.startswith(" ") and line.endswith("}"))):
                inside = False
            if not inside:
                yield first, number + 1
                first = None


def name_of(block):
    """The name of the kernel, function or type that a block defines; None if it is none of these."""
    code = "\n".join(line for line in block if not line.lstrip().startswith("//"))
    type_name = re.search(r"^(?:struct|class|enum class) (\w+)", code, re.MULTILINE)
    if type_name:
        return type_name[1]
    head = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)|HOPPER_CLUSTER\([^)]*\)", "", code)
    head = re.sub(r"^template\s*<.*?>\n", "", head, flags=re.MULTILINE | re.DOTALL)
    function = re.search(r"(\w+)\s*\(", head)
    return function[1] if function else None


def parts_of(text):
    """A source's definitions: a list of (name, lines, whether it is a kernel)."""
    lines = text.splitlines()
    parts = []
    for first, last in blocks(lines):
        block = lines[first:last]
        name = name_of(block)
        if name:
            parts.append((name, block, any("__global__" in line for line in block)))
    return parts


def step(parts, before, after):
    """The lines that tell how `after` differs from `before`, and what else is new for it."""
    names = [name for name, _, _ in parts]
    at, to = names.index(before), names.index(after)
    old, new = parts[at][1], parts[to][1]
    yield f"@@ {before} -> {after}"
    between = [name for name, _, kernel in parts[at + 1 : to] if not kernel]
    used = [name for name in between if re.search(rf"\b{name}\b", "\n".join(new))]
    if used:
        yield f"@@ new beside it: {', '.join(used)}"
    if difflib.SequenceMatcher(None, old, new, autojunk=False).ratio() < DIFFERENT:
        yield "@@ nearly everything changed: this is the new kernel"
        yield from (f"+ {line}" for line in new)
        return
    for line in difflib.ndiff(old, new):
        if not line.startswith("?"):  # which letters changed: the lines show it
            yield line


def steps(lesson, before=None, after=None):
    """The steps of a lesson's ladder, a line each; of a part of it where `before` is given."""
    parts = parts_of((ROOT / f"{lesson}.cu").read_text())
    ladder = LADDERS[lesson]
    pairs = list(zip(ladder, ladder[1:]))
    if before:
        pairs = [pair for pair in pairs if pair[0] == before]
        pairs = [(before, after)] if after else pairs
    for pair in pairs:
        yield from step(parts, *pair)
        yield ""


def main():
    parser = argparse.ArgumentParser(prog="docs/steps.py", description=__doc__.split("\n")[0])
    parser.add_argument("lesson", choices=sorted(LADDERS), metavar="LESSON",
                        help=f"one of {', '.join(sorted(LADDERS))}")
    parser.add_argument("before", nargs="?", metavar="FROM")
    parser.add_argument("after", nargs="?", metavar="TO")
    arguments = parser.parse_args()
    ladder = LADDERS[arguments.lesson]
    known = [name for name, _, _ in parts_of((ROOT / f"{arguments.lesson}.cu").read_text())]
    for name in (arguments.before, arguments.after):
        if name and name not in known:
            parser.error(f"{arguments.lesson} has no kernel {name}: {', '.join(ladder)}")
    if arguments.before and not arguments.after and arguments.before not in ladder[:-1]:
        parser.error(f"no kernel comes after {arguments.before}: say which one to compare it with")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    for line in steps(arguments.lesson, arguments.before, arguments.after):
        color = COLORS.get(line[:1]) if sys.stdout.isatty() else None
        print(f"{color}{line}\033[0m" if color else line)


if __name__ == "__main__":
    main()
