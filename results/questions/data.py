"""One product, cuBLAS's of N = 8192 in fp16, with other numbers in it: the clock follows the power, and that the data.

    results/questions/data.py [--json results/h200/questions/data.json]

Each is computed for a second without a pause. The second half is timed, and nvidia-smi asked in its middle.
"""
import subprocess
import sys
import time

import answers
import torch

N, SECONDS = 8192, 1.0


def matrices():
    """{name: a function that makes a matrix}."""
    half = dict(device="cuda", dtype=torch.float16)
    return {
        "zeros": lambda: torch.zeros(N, N, **half),
        "ones": lambda: torch.ones(N, N, **half),
        "whole numbers from -2 to 2": lambda: torch.randint(-2, 3, (N, N), device="cuda").half(),
        "uniform, -1 to 1": lambda: 2 * torch.rand(N, N, **half) - 1,
        "normal": lambda: torch.randn(N, N, **half),
    }


def calls_until(end, call):
    """How many, in groups of 20 that the host waits for."""
    count = 0
    while time.time() < end:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        count += 20
    return count


def main():
    options = answers.parser_of(__doc__).parse_args()
    rows = []
    for name, make in matrices().items():
        a, b = make(), make()
        start = time.time()
        calls_until(start + SECONDS / 2, lambda: a @ b)
        begun = time.time()
        asked = subprocess.Popen(["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits",
                                  "-i", "0"], stdout=subprocess.PIPE, text=True)
        count = calls_until(begun + SECONDS / 2, lambda: a @ b)
        ms = 1e3 * (time.time() - begun) / count
        clock, power = (float(each) if each.strip()[:1].isdigit() else None
                        for each in asked.communicate()[0].strip().split(","))
        rows.append([name, ms, 2e-9 * N**3 / ms, clock, power])
    answers.finish(options.json, torch.cuda.get_device_name(), None, f"N = {N}, PyTorch {torch.__version__}",
                   ["A's and B's elements", "ms", "TFLOP/s", "MHz", "W"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
