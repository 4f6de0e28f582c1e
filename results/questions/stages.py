"""Lesson 3's *stages*, *lean* and *double buffering* with other numbers of stages than three.

    results/questions/stages.py --build    # by nvcc, after scons arch=90a: a copy of the lesson with these kernels
    results/questions/stages.py --json results/h200/questions/stages.json

The copy is the lesson's source, but its kernels for Hopper are left out, and each of the three kernels is there once
for each number of stages. That these places are in the source is checked. See docs/lessons/3_matmul_tensorcore.md.
"""
import os
import re
import subprocess
import sys
import tempfile

import answers
from answers import ROOT

LESSON, PROGRAM, N = "3_matmul_tensorcore", "3_stages", 4096
SMALL, LARGE = (2, 3, 4, 6), (2, 3, 4)  # stages of 16 and of 48 KB: what fits in the 227 KB of a block


def replaced(text, old, new, times=1):
    found = re.findall(old, text)
    if len(found) != times:
        sys.exit(f"{LESSON}.cu has {len(found)} places like {old}, not {times}")
    return re.sub(old, new, text)


def copy_of(text):
    """The lesson's source with rows like "lean, 2 stages", and without the kernels that need Hopper."""
    text = replaced(text, r"(?s)// Adds the kernels that need TMA and wgmma.*?\n}\n", "")
    text = replaced(text, r"add_hopper_kernels\(.*\);", "")
    text = replaced(text, r"(?s)template <int kStages, int kBuffers>\nvoid add_persistent.*?\n}\n", "")
    for name in ("lean", "double buffering"):
        text = replaced(text, rf'\.kernel\("{name}"', rf'.kernel("{name}, " + std::to_string(kStages) + " stages"')
    text = replaced(text, r"add_small_mma<kWidth>\(square, A, B, C, n\);", "")
    # Of the two small kernels only *stages* has several; it takes its number as a template argument.
    text = replaced(text, r"template <int kWidth>\nvoid add_small_mma", "template <int kStages>\nvoid add_small_mma")
    text = replaced(text, r"MmaTiles<128, 128, 32, 2, 4, 3>;", "MmaTiles<128, 128, 32, 2, 4, kStages>;")
    text = replaced(text, r'(?s)  square\.kernel\("swizzled tiles".*?\}\);\n', "")
    text = replaced(text, r'square\.kernel\("stages", Role::ours, \[=\] \{\n'
                    r'\s*matmul_stages<128, 128, 32, 2, 4, 3, kWidth>',
                    'const auto stages = matmul_stages<128, 128, 32, 2, 4, kStages, 8>;\n'
                    '  allow_shared_bytes(stages, kStages * kBytes);\n'
                    '  square.kernel("stages, " + std::to_string(kStages) + " stages", Role::ours, [=] {\n    stages')
    text = replaced(text, r"3 \* kBytes>>>", "kStages * kBytes>>>")
    calls = [f"add_small_mma<{stages}>(square, A, B, C, n);" for stages in SMALL]
    calls += [f"add_mma<256, 128, 64, 4, 2, {stages}, 8>(square, A, B, C, n);" for stages in LARGE]
    text = replaced(text, r"(?s)  if \(n % 2 != 0\) \{\n    add_mma.*?shared memory: such.*?\n  \}\n",
                    "  " + "\n  ".join(calls) + "\n")
    text = replaced(text, r"(?s)  n % 16 == 0 \? add_wmma_global.*?;\n  n % 8 == 0 \? add_wmma_shared.*?;\n", "")
    text = replaced(text, r'(?s)  square\.compare\(.*?\);\n', "", times=5)
    return text


def build(folder):
    """The program: the copy by nvcc, with the objects that scons has made for the lesson."""
    sys.path.insert(0, str(ROOT / "site_scons"))
    from includes import linked_sources

    nvcc = os.environ.get("NVCC", "/usr/local/cuda/bin/nvcc")
    objects = ["build_info"] + [source.rsplit(".", 1)[0] for source in linked_sources(f"{LESSON}.cu")]
    objects = {("common/all" if source.startswith("common/") and not (folder / "obj" / f"{source}.o").exists()
                else source): None for source in objects}
    objects = [str(folder / "obj" / f"{each}.o") for each in objects]
    with tempfile.TemporaryDirectory() as scratch:
        source = f"{scratch}/{PROGRAM}.cu"
        with open(source, "w") as file:
            file.write(copy_of((ROOT / f"{LESSON}.cu").read_text()))
        subprocess.run([nvcc, "-std=c++20", "-lineinfo", "--default-stream=per-thread", f"-I{ROOT}", "-w",
                        "-gencode=arch=compute_90a,code=sm_90a", "-o", str(folder / PROGRAM), source, *objects,
                        "-lcublas", "-lcublasLt", "-lfmt", "-lpthread", "-ldl", "-lrt"], check=True)


def main():
    parser = answers.parser_of(__doc__)
    parser.add_argument("--build", action="store_true", help="make the program, and stop")
    options = parser.parse_args()
    if options.build:
        return build(options.bin)
    answers.need_programs(options.bin, [PROGRAM])
    with tempfile.TemporaryDirectory() as folder:
        written = f"{folder}/run.json"
        command = [options.bin.resolve() / PROGRAM, str(N), "--device", "cuda", "--seconds", "10", "--json", written]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = answers.load_run(answers.pathlib.Path(written))
    square = run["problems"][0]
    ms = {kernel["name"]: kernel["ms"]["median"] for kernel in square["kernels"]}
    rows = []
    for name, tile, numbers in (("stages", "128 x 128 x 32", SMALL), ("lean", "256 x 128 x 64", LARGE),
                                ("double buffering", "256 x 128 x 64", LARGE)):
        times = [ms[f"{name}, {stages} stages"] if stages in numbers else None for stages in SMALL]
        rows.append([f"{name}, {tile}", *times])
    answers.finish(options.json, run["device"]["name"], None,
                   f"N = {N}, fp16; ms, cold L2 cache, median of {square['kernels'][0]['ms']['samples']}",
                   ["kernel, tile", *(f"{stages} stages" for stages in SMALL)], rows)


if __name__ == "__main__":
    sys.exit(main())
