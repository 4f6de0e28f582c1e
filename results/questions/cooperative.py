"""What a cooperative launch costs: an empty kernel, launched in three ways, one after the other in one stream.

    results/questions/cooperative.py [--json results/h200/questions/cooperative.json]

Each time is that of many launches over their number: called by the host, and as one CUDA graph. The blocks are as many
as the GPU has multiprocessors.
"""
import ctypes
import statistics
import sys

import answers
import torch

LAUNCHES, SAMPLES, THREADS = 200, 20, 256
PTX = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"
COOPERATIVE, EARLY = 2, 6  # CUlaunchAttributeID
driver = ctypes.CDLL("libcuda.so.1")


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding, and a value of 64 bytes."""
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]


def check(code):
    if code != 0:
        sys.exit(f"the driver says {code}")


def launcher(function, blocks, attribute):
    """Launches the function in PyTorch's current stream."""
    attributes = (Attribute * 1)()
    if attribute:
        attributes[0].id, attributes[0].value[0] = attribute, 1

    def launch():
        config = Config((blocks, 1, 1), (THREADS, 1, 1), 0, torch.cuda.current_stream().cuda_stream, attributes,
                        1 if attribute else 0)
        check(driver.cuLaunchKernelEx(ctypes.byref(config), function, None, None))
    return launch


def timed(run):
    times = []
    for _ in range(SAMPLES + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(times[3:])


def main():
    options = answers.parser_of(__doc__).parse_args()
    torch.zeros(1, device="cuda")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), PTX))
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"nothing"))
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    rows = []
    for name, attribute in (("plain", None), ("cooperative", COOPERATIVE), ("early", EARLY)):
        launch = launcher(function, blocks, attribute)

        def all_of_them():
            for _ in range(LAUNCHES):
                launch()

        with torch.cuda.stream(torch.cuda.Stream()):
            by_host = timed(all_of_them)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        rows.append([name, by_host, timed(graph.replay)])
    answers.finish(options.json, torch.cuda.get_device_name(), None,
                   f"us of a launch, median of {SAMPLES} times {LAUNCHES} launches of an empty kernel",
                   ["launch", "by the host (Python)", "in a graph"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
