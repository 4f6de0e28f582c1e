"""The rate of `mma.sync` by itself, as a share of what the device's peak rates say.

    results/questions/mma_sync.py --build    # by nvcc, into build/cuda
    results/questions/mma_sync.py [--bin FOLDER] [--json results/h200/questions/mma_sync.json]
"""
import os
import subprocess
import sys

import answers

PROGRAM = "mma_sync"
PEAK = 2048  # multiply-adds of fp16 a cycle and multiprocessor: common/device.cpp, compute capability 9.0


def main():
    parser = answers.parser_of(__doc__)
    parser.add_argument("--build", action="store_true", help="make the program, and stop")
    options = parser.parse_args()
    if options.build:
        command = [os.environ.get("NVCC", "/usr/local/cuda/bin/nvcc"), "-std=c++20", f"-I{answers.ROOT}",
                   "-gencode=arch=compute_90a,code=sm_90a", "-o", str(options.bin / PROGRAM),
                   str(answers.pathlib.Path(__file__).with_suffix(".cu"))]
        return subprocess.run(command).returncode
    answers.need_programs(options.bin, [PROGRAM])
    said = subprocess.run([options.bin.resolve() / PROGRAM], check=True, capture_output=True, text=True).stdout
    (device, _), *lines = [line.split("; ") for line in said.splitlines()]
    rows = []
    for name, *numbers in lines:
        error, per_cycle, tflops, mhz = map(float, numbers)
        if not error < 1e-3:
            sys.exit(f"{name}: the relative error is {error}")
        rows.append([name, tflops, per_cycle, 100 * per_cycle / PEAK, mhz])
    answers.finish(options.json, device, None, "Median of 30 launches",
                   ["", "TFLOP/s", "multiply-adds a cycle", "% of the peak", "MHz"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
