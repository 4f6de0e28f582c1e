"""Milliseconds of the gated layer with each of its gates, beside PyTorch's operators and torch.compile of these:
`python3 operators/tests/gpu/gates.py [--json results/<gpu>/python/gates.json]`, where FUSED_KERNELS_LIBRARY names the
library. Rows are measured and compared as times.py has them."""

import argparse

import torch

import cases
import times

ROWS, INPUTS, HIDDEN = 1 << 20, 128, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write a record to this file")
    path = parser.parse_args().json
    problems = []
    for backward in (False, True):
        for gate in cases.GATES:
            torch.compiler.reset()
            case = cases.gating(ROWS, INPUTS, HIDDEN, gate=gate)
            took, own, other = times.measure(case, case.formula, backward)
            label = gate + ("; with backward" if backward else "")
            print(f"{label:28}" + "".join(f"{time:10.4f}" for time in took.values()) + f"{own:10.1e}{other:10.1e}",
                  flush=True)
            assert own <= 2 * other, f"{label}: the relative error is {own}; that of PyTorch's operators is {other}"
            problems.append({"name": label, "kernels": [{"name": name, "ms": {"median": time}, "error": error}
                             for (name, time), error in zip(took.items(), (other, None, own))]})
            if path:
                cases.write_record(path, problems)


if __name__ == "__main__":
    main()
