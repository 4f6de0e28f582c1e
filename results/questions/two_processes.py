"""The program "Several GPUs" of docs/library.md in two processes, whose gradients are compared with those that each
process has alone: with as many GPUs by nccl, on a single GPU, which they share, by gloo.

    results/questions/two_processes.py [--json results/h200/questions/two_processes.json]
"""
import os
import subprocess
import sys

import answers
import torch
from torch.nn.parallel import DistributedDataParallel

PROCESSES = 2
NAMES = ("w1", "w2", "b1", "b2")


def page_program():
    """What the page's program has above the lines that run it: its imports and its class."""
    page = (answers.ROOT / "docs" / "library.md").read_text()
    (program,) = [part.split("```")[0] for part in page.split("```python\n")[1:] if "DistributedDataParallel" in part]
    return program.split("torch.cuda.set_device")[0]


def one_of_them(several, options):
    sys.path.insert(0, str(answers.ROOT / "operators" / "python"))
    names = {}
    exec(page_program(), names)  # our own page
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # other rows in each process, and the weights of the first one in both
    layer = DistributedDataParallel(names["Layer"]().cuda())
    x = torch.randn(1000, 128, device="cuda", dtype=torch.bfloat16)

    def loss(of):
        return of(x).float().square().mean()

    loss(layer).backward()
    together = [weight.grad.clone() for weight in layer.parameters()]
    alone = torch.autograd.grad(loss(layer.module), list(layer.parameters()))
    rows = []
    for name, mine, own in zip(NAMES, together, alone):
        both = [None] * PROCESSES
        torch.distributed.all_gather_object(both, (mine.cpu(), own.cpu()))
        mean = sum(each for _, each in both) / PROCESSES
        rows.append([name, float(all(torch.equal(each, both[0][0]) for each, _ in both)),
                     ((both[0][0] - mean).norm() / mean.norm()).item()])
    if rank == 0:
        answers.finish(options.json, torch.cuda.get_device_name(), None,
                       f"{PROCESSES} processes, by {'nccl' if several else 'gloo on one GPU'}",
                       ["gradient", "equal in both", "off the mean of both by"], rows)


def main():
    options = answers.parser_of(__doc__).parse_args()
    if "LOCAL_RANK" not in os.environ:
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                               f"--nproc-per-node={PROCESSES}", *sys.argv]).returncode
    several = torch.cuda.device_count() >= PROCESSES
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if several else 0)
    torch.distributed.init_process_group("nccl" if several else "gloo")
    one_of_them(several, options)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
