"""Trains the network of examples/diffusion_net.py in one process, and in two under DistributedDataParallel, and
compares the losses: `python3 operators/tests/gpu/processes.py [--json FILE]`, where FUSED_KERNELS_LIBRARY names the
library.

The two processes share one GPU, and so their gradients are averaged by gloo: NCCL wants a GPU for each. Each process
has one of two meshes; the one process has both, and takes the mean of their losses. All start from the same weights.
The optimizer is Adam, since weights in bf16 would not change by gradients as small as these."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed

import cases
from cases import fused_kernels

sys.path.insert(0, str(cases.ROOT / "examples"))
import diffusion_net

VERTICES, STEPS, MESHES = 10_000, 50, 2


def data(number):
    """A mesh, and what goes in and should come out at its vertices."""
    torch.manual_seed(1 + number)
    mesh = diffusion_net.made_up_mesh(VERTICES)
    return mesh, *(torch.randn(VERTICES, diffusion_net.WIDTH, device="cuda").to(diffusion_net.TYPE) for _ in range(2))


def losses_of(network, meshes):
    """Of each step, the mean over these meshes."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0
        for mesh, x, target in meshes:
            loss = (network(x, mesh) - target).float().square().mean() / len(meshes)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return torch.stack(losses)


def network():
    torch.manual_seed(0)
    return diffusion_net.Network(fused_kernels.diffusion, fused_kernels.gradient_features).cuda()


def in_fp32(_, bucket):
    """Averages gradients in fp32, and rounds them once, as one process rounds the sum of its two."""
    work = torch.distributed.all_reduce(bucket.buffer().float() / MESHES, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].to(bucket.buffer().dtype))


def one_of_two(rank, store):
    """What each of the two processes does; process 0 prints the mean of their losses."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MESHES)
    parallel = torch.nn.parallel.DistributedDataParallel(network(), init_sync=False)  # they are the same already
    parallel.register_comm_hook(None, in_fp32)
    losses = losses_of(parallel, [data(rank)]).cpu()
    torch.distributed.all_reduce(losses)
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps((losses / MESHES).tolist()))


def in_two():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--store", f"{folder}/store", "--rank"]
        started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(MESHES)]
        said = [each.communicate(timeout=120)[0] for each in started]
        if any(each.returncode for each in started):
            sys.exit("one of the two processes failed")
        return torch.tensor(json.loads(said[0].splitlines()[-1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write a record to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return one_of_two(options.rank, options.store)
    one = losses_of(network(), [data(number) for number in range(MESHES)]).cpu()
    again = losses_of(network(), [data(number) for number in range(MESHES)]).cpu()
    two = in_two()
    apart, usual = (((other - one).abs() / one).max().item() for other in (two, again))
    print(f"loss {one[0]:.4f} to {one[-1]:.4f}; one process and two are apart by {apart:.1e}, two runs of one process "
          f"by {usual:.1e}")
    if options.json:
        record = {"device": {"name": torch.cuda.get_device_name()}, "pytorch": torch.__version__, "steps": STEPS,
                  "first": one[0].item(), "last": one[-1].item(), "apart, %": 100 * apart,
                  "two runs, %": 100 * usual}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    if not (apart < 2e-2 and one[-1] < 0.9 * one[0]):  # bf16 rounds by 4e-3
        sys.exit("The losses are further apart than roundings explain, or nothing was learnt.")


if __name__ == "__main__":
    main()
