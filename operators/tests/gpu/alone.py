"""Tests that might wait forever if they failed, each of which test_pytorch.py runs in a process of its own:
`python3 operators/tests/gpu/alone.py NAME`."""

import sys
import threading

import torch

from cases import BF16, EACH, alike, attention_backward, binding, differentiable, fused_kernels, numbers, tensors


def captures_graphs():
    """Each function, captured, computes from what the operands are when the graph is replayed."""
    for case in EACH:
        operands = case.operands(1)
        case.run(*operands)  # loads its code
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = case.run(*operands)
        for seed in (2, 3):
            for each, new in zip(operands, case.operands(seed)):
                each.copy_(new)
            for each in tensors(result):
                each.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            case.check(operands, result)


def captures_gradients():
    """A step forward and backward in one graph."""
    for case in EACH:
        if not case.wants_gradients:
            continue
        operands = [each.detach() for each in case.operands(1)]
        wanted = [operands[at].requires_grad_() for at in case.wants_gradients]

        def step():
            result = differentiable(case.run(*operands))
            return torch.autograd.grad(result, wanted, [torch.ones_like(each) for each in result])

        on_the_side = torch.cuda.Stream()
        on_the_side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(on_the_side):
            expected = [each.clone() for each in step()]
        torch.cuda.current_stream().wait_stream(on_the_side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(found, expected):
            alike(one, other, 2)


def runs_on_two_streams():
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for case in EACH:
        operands = [case.operands(seed) for seed in (1, 2)]
        torch.cuda.synchronize()
        results = [[], []]
        for _ in range(20):
            for stream, own, found in zip(streams, operands, results):
                with torch.cuda.stream(stream):
                    found.append(case.run(*own))
        torch.cuda.synchronize()
        for own, found in zip(operands, results):
            for each in found:
                case.check(own, each)


def at_the_same_time(*works):
    """Calls each in a thread of its own, and raises what one of them raises."""
    start, failures = threading.Barrier(len(works)), []

    def run(work):
        try:
            start.wait(30)
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def runs_in_two_threads():
    for case in EACH:
        def work(seed):
            operands = case.operands(seed)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = [case.run(*operands) for _ in range(20)]
            stream.synchronize()
            for each in found:
                case.check(operands, each)

        binding._plans.clear()  # both make the plan
        at_the_same_time(lambda: work(1), lambda: work(2))
        # Both on the default stream.
        operands, results = [case.operands(seed) for seed in (1, 2)], [[], []]
        at_the_same_time(*(lambda own=own, found=found: found.extend(case.run(*own) for _ in range(20))
                           for own, found in zip(operands, results)))
        torch.cuda.synchronize()
        for own, found in zip(operands, results):
            for each in found:
                case.check(own, each)


def each_thread_has_its_own_sentence():
    def refused(words, call):
        def work():
            for _ in range(200):
                try:
                    call()
                except ValueError as error:
                    assert words in str(error), error
                else:
                    raise AssertionError(f"{words}: it was not refused")
        return work

    a, b = numbers(21, 26, dtype=torch.float16)[:, :13], numbers(13, 8, dtype=torch.float16)
    q = numbers(1, 4, 3, 8, dtype=torch.float16)
    at_the_same_time(refused("a_stride is 26", lambda: fused_kernels.product(a, b)),
                     refused("kv_heads", lambda: fused_kernels.attention(q, q[:, :, :2], q[:, :, :2])))


def deterministic_gradients_end_beside_others():
    """Their blocks wait for those of lower numbers. Others may fill the GPU meanwhile: products, in a stream of their
    own, and the same gradients in another one. The bits are those of a call that is alone."""
    case = attention_backward(2, 2048, 2048, 8, 8, 128, BF16)  # 256 blocks of 128 keys: more than there is room for
    operands = case.operands(1)
    expected = [each.clone() for each in fused_kernels.attention_backward(*operands, deterministic=True)]
    case.check(operands, expected)
    left, right = (numbers(8192, 8192, dtype=torch.float16, seed=seed) for seed in (2, 3))
    product = left @ right
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            for _ in range(2):
                torch.matmul(left, right, out=product)
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                results.append(fused_kernels.attention_backward(*operands, deterministic=True))
    torch.cuda.synchronize()
    for found in results:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


TESTS = {each.__name__: each for each in (captures_graphs, captures_gradients, runs_on_two_streams, runs_in_two_threads,
                                          each_thread_has_its_own_sentence,
                                          deterministic_gradients_end_beside_others)}

if __name__ == "__main__":
    TESTS[sys.argv[1]]()
