"""Plans that their caller owns: fk_plan_create() and what goes with it."""

import concurrent.futures
import ctypes
import os
import re
import resource
import shutil
import signal

from conftest import CPU_BUILD, ROOT, execute
import pytest

from every_function import KINDS, Plan, for_each_function, fused_kernels, number_of
from test_library import (BAD_ALIGNMENT, BAD_ARGUMENT, BAD_DEVICE, BAD_WORKSPACE, FLOAT32, HEADER, OK,
                          POINTER, SIZE, WRONG, Attention, Gated, Product, damaged, library)

CUDA_ERROR = fused_kernels.FK_CUDA_ERROR
OLDER = "FUSED_KERNELS_CAPABILITY"  # read when a plan is made


def in_a_thread(function, *arguments):
    """In a thread of its own, which has no plans yet."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def way_of_call(call):
    assert call.call() == OK, call.library.fk_last_error()
    return call.library.fk_last_way()


def way_of_plan(plan, function="run"):
    assert plan.run(function) == OK, plan.library.fk_last_error()
    return plan.library.fk_last_way()


# ---- What a plan computes ---------------------------------------------------------------------------


@for_each_function
def test_the_bits_of_a_call(library, monkeypatch, kind):
    """In the same way, and the second time, too. (On Hopper the diffusion adds in another order in each call.)"""
    if kind.NAME.startswith("diffusion"):
        monkeypatch.setenv(OLDER, "8.0")

    def compare():
        call = kind(library)
        call.clear()
        way, expected = way_of_call(call), call.results()
        plan = Plan(call)
        assert plan.workspace() == call.needed
        for _ in range(2):
            call.clear()
            assert way_of_plan(plan) == way == library.fk_plan_way(plan.at)
            assert call.results() == expected
        assert call.is_right()
        plan.destroy()
        call.free()

    in_a_thread(compare)


def test_there_is_a_plan_of_each_function(library):
    calls = [kind(library) for kind in KINDS]
    assert sorted(map(number_of, calls)) == [*range(1, fused_kernels.FK_GATING_TWO_KEPT_BACKWARD + 1)]
    for call in calls:
        call.free()


def test_operands_may_be_others_in_each_run(library):
    calls = [Gated(library, rows=33, inputs=65, hidden=130, seed=seed) for seed in range(3)]
    plan = Plan(calls[0])
    for own in calls * 2:
        plan.call = own
        own.clear()
        assert plan.run() == OK and own.is_right()
    plan.destroy()
    for own in calls:
        own.free()


def test_a_short_description(library):
    """The plan has a copy of all its fields."""
    call = Product(library)
    short = ctypes.create_string_buffer(SIZE(40).value.to_bytes(8, "little") + bytes(call.description)[8:40])
    plan = Plan(call)
    plan.destroy()
    plan.at = POINTER()
    assert library.fk_plan_create(number_of(call), short, 0, None, ctypes.byref(plan.at)) == OK
    ctypes.memset(short, 0xa5, 40)
    assert plan.run() == OK and call.is_right()
    plan.destroy()
    call.free()


def test_threads_with_a_plan_each(library):
    """Made in one thread, and run in another one."""
    calls = [kind(library, seed=seed) for seed in range(3) for kind in (Product, Gated)]
    plans = [Plan(own) for own in calls]

    def run(plan):
        return [plan.run() for _ in range(5)] == [OK] * 5 and plan.call.is_right()

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert all(threads.map(run, plans))
    for plan in plans:
        plan.destroy()
        plan.call.free()


def test_nothing_needs_the_plan_once_it_has_run(library):
    stream = POINTER()
    assert library.cudaStreamCreate(ctypes.byref(stream)) == OK
    call = Gated(library, rows=33, inputs=65, hidden=130)
    plan = Plan(call, stream=stream)
    assert plan.run() == OK
    plan.destroy()
    assert library.cudaStreamSynchronize(stream) == OK
    assert call.is_right()
    call.free()
    assert library.cudaStreamDestroy(stream) == OK


# ---- Apart from what calls keep ---------------------------------------------------------------------


def test_plans_and_calls_share_nothing(library, monkeypatch):
    """Each has its own way, which tells when it was planned: as a GPU of compute capability 8.0, or as one of 9.0."""
    def run():
        call = Gated(library)
        monkeypatch.setenv(OLDER, "8.0")
        older = Plan(call)
        monkeypatch.setenv(OLDER, "")
        way = way_of_call(call)
        assert way != way_of_plan(older)  # the call has not found the plan
        monkeypatch.setenv(OLDER, "8.0")
        assert way_of_call(call) == way
        again = Plan(call)
        assert way_of_plan(again) == way_of_plan(older)  # nor a plan what the call has kept
        more = [Plan(call) for _ in range(70)]
        assert {way_of_plan(plan) for plan in more} == {way_of_plan(older)}
        assert way_of_call(call) == way  # which is kept, however many plans there are
        for plan in [older, again, *more]:
            plan.destroy()
        call.free()

    in_a_thread(run)


def test_trying_is_for_the_plan_alone(library):
    """And fk_tune() is for calls alone. Six tiles take a CPU longer than two, as the estimate does not know."""
    for rows in (76, 75, 74, 73):  # where other programs run, a time may mislead once
        call = Product(library, rows=rows, type=FLOAT32)
        plan, other = Plan(call), Plan(call)
        expected = way_of_plan(plan)
        assert library.fk_tune(1) == OK
        assert way_of_plan(plan) == expected
        assert library.fk_tune(0) == OK
        assert way_of_call(call) == expected
        call.clear()
        found = way_of_plan(plan, "tune")
        assert call.is_right()
        call.clear()
        assert way_of_plan(plan) == found
        assert call.is_right()
        assert way_of_plan(other) == way_of_call(call) == in_a_thread(way_of_call, call) == expected
        plan.destroy()
        other.destroy()
        call.free()
        if found != expected:
            return
    assert False, "trying has found nothing"


@pytest.mark.parametrize("kind, options", [(Gated, dict(rows=71)), (Product, dict(rows=71)),
                                           (Attention, dict(queries=3, keys=290, width=40))])
def test_a_plan_is_tuned(library, kind, options):
    call = kind(library, **options)
    plan = Plan(call)
    ways = set()
    for function in ("tune", "run", "run"):
        call.clear()
        ways.add(way_of_plan(plan, function))
        assert call.is_right()
    assert len(ways) == 1
    assert plan.workspace() == call.needed
    plan.destroy()
    call.free()


# ---- Graphs, devices, contexts, processes -----------------------------------------------------------


def test_a_captured_stream(library):
    """Plans are made and run in it; none is tuned. The graph needs no plan."""
    stream, graph, ready = POINTER(), POINTER(), POINTER()
    assert library.cudaStreamCreate(ctypes.byref(stream)) == OK
    call = Gated(library, rows=33, inputs=65, hidden=130)
    before = Plan(call, stream=stream)
    call.clear()
    untouched = call.results()
    assert library.cudaStreamBeginCapture(stream, 0) == OK
    try:
        within = Plan(call, stream=stream)
        assert before.run() == within.run() == OK, library.fk_last_error()
        assert before.run("tune") == BAD_ARGUMENT
        assert library.fk_last_error() == b"the stream is captured, and so no way can be tried"
        assert before.run() == OK
    finally:
        assert library.cudaStreamEndCapture(stream, ctypes.byref(graph)) == OK
    before.destroy()
    within.destroy()
    assert call.results() == untouched
    assert library.cudaGraphInstantiate(ctypes.byref(ready), graph, ctypes.c_ulonglong(0)) == OK
    for _ in range(2):
        call.clear()
        assert library.cudaGraphLaunch(ready, stream) == library.cudaStreamSynchronize(stream) == OK
        assert call.is_right()
    assert library.cudaGraphExecDestroy(ready) == library.cudaGraphDestroy(graph) == OK
    assert library.cudaStreamDestroy(stream) == OK
    call.free()


@pytest.fixture
def device(library):
    """device(n) chooses a device; the first one is chosen again in the end."""
    def choose(number):
        assert library.cudaSetDevice(number) == OK

    yield choose
    choose(0)


def test_another_device_than_the_current_one(library, device):
    device(1)
    there = Gated(library, rows=33, inputs=65, hidden=130)
    device(0)
    here = Gated(library, rows=33, inputs=65, hidden=130)
    plan = Plan(there, device=1)
    assert plan.run() == plan.run("tune") == OK, library.fk_last_error()
    assert there.is_right()
    assert here.call() == OK and here.is_right()  # the current device is as it was
    plan.call = here
    assert plan.run() == BAD_DEVICE
    assert library.fk_last_error() == b"x is memory of device 0; the current device is 1"
    assert here.call() == OK
    plan.destroy()
    plan = Plan(here)
    device(1)
    here.clear()
    assert plan.run() == OK
    plan.call = there
    assert plan.run() == BAD_DEVICE
    assert library.fk_last_error() == b"x is memory of device 1; the current device is 0"
    assert there.call() == OK
    plan.destroy()
    device(0)
    assert here.is_right()
    here.free()
    there.free()


@pytest.mark.parametrize("number", [-1, 4, 1 << 30])
def test_a_device_that_is_none(library, number):
    call, at = Product(library), POINTER(77)
    code = library.fk_plan_create(number_of(call), ctypes.byref(call.description), number, None, ctypes.byref(at))
    assert (code, at.value) == (BAD_DEVICE, 77)
    assert library.fk_last_error().decode() == f"device is {number}; it has to be from 0 to 3"
    assert call.call() == OK
    call.free()


def test_another_context(library, device):
    """After cudaDeviceReset()."""
    device(3)
    call = Product(library)
    plan = Plan(call, device=3)
    assert plan.run() == OK
    assert library.cudaDeviceReset() == OK
    for where in (3, 0):
        device(where)
        for function in ("run", "tune"):
            assert plan.run(function) == BAD_DEVICE
            assert library.fk_last_error() == b"the plan was made in another context of its device"
    plan.destroy()
    device(3)
    call = Product(library)
    plan = Plan(call, device=3)
    assert plan.run() == OK and call.is_right()
    plan.destroy()
    call.free()


def in_a_child(function):
    """In a process that fork() has made. Returns whether function() has returned there."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_fork_has_made(library):
    """It can do with its parent's plan what it can do by a call: on the CPU all."""
    call = Product(library)
    plan = Plan(call)
    assert plan.run() == OK

    def run():
        call.clear()
        assert plan.run() == OK and call.is_right()
        plan.destroy()

    assert in_a_child(run)
    assert plan.run() == OK
    plan.destroy()
    call.free()


# ---- Refusals ---------------------------------------------------------------------------------------


def created(call, number=None, **instead):
    """The code, and the sentence, of fk_plan_create(); nothing is written if it fails."""
    at, own = POINTER(77), number_of(call) if number is None else number
    given = {"description": ctypes.byref(call.description), "plan": ctypes.byref(at)} | instead
    code = call.library.fk_plan_create(own, given["description"], 0, None, given["plan"])
    assert code != OK and at.value == 77
    return code, call.library.fk_last_error()


@for_each_function
def test_what_a_call_refuses(library, kind):
    """With its code and its sentence, and before anything is written."""
    call = kind(library)
    plan, before, count = Plan(call), call.all(), 0
    for _, _, changes, arguments in damaged(kind, WRONG.get(kind, [(dict(type=77), BAD_ARGUMENT)])):
        try:
            whole, instead = kind.Description.from_buffer_copy(call.description), arguments(call) if arguments else {}
        except KeyError:
            continue  # log_sums, which this call does not have
        if not instead.keys() <= call.device.keys() | {"description"}:
            continue
        for field, value in changes.items():
            setattr(call.description, field, value)
        expected = call.call(**instead), library.fk_last_error()
        if changes or "description" in instead:
            assert created(call, **instead) == expected
        else:
            assert (plan.run(**instead), library.fk_last_error()) == expected
            assert (plan.run("tune", **instead), library.fk_last_error()) == expected
        assert call.all() == before
        call.description, count = whole, count + 1
    assert count > 10
    assert plan.run() == OK and call.is_right()
    plan.destroy()
    call.free()


def test_a_damaged_workspace(library):
    call = Gated(library, rows=33, inputs=65, hidden=130)
    plan, before, at = Plan(call), call.all(), call.device["workspace"].at
    assert call.needed > 0
    for code, instead in ((BAD_WORKSPACE, {"bytes": call.needed - 1}), (BAD_WORKSPACE, {"bytes": 0}),
                          (BAD_ARGUMENT, {"workspace": None}), (BAD_ALIGNMENT, {"workspace": at + 16}),
                          (BAD_DEVICE, {"workspace": 1 << 20})):
        assert call.call(**instead) == code
        sentence = library.fk_last_error()
        assert (plan.run(**instead), library.fk_last_error()) == (code, sentence)
        assert call.all() == before
    plan.destroy()
    call.free()


def test_what_is_no_plan(library):
    call = Product(library)
    plan, before, needed = Plan(call), call.all(), SIZE(77)
    for number in (0, -1, fused_kernels.FK_GATING_TWO_KEPT_BACKWARD + 1, 1 << 30):
        assert created(call, number) == (
            BAD_ARGUMENT, f"function is {number}; it has to be one of fk_function".encode())
    assert created(call, plan=None) == (BAD_ARGUMENT, b"plan is NULL")
    assert library.fk_plan_workspace(None, ctypes.byref(needed)) == BAD_ARGUMENT and needed.value == 77
    assert library.fk_last_error() == b"plan is NULL"
    assert library.fk_plan_workspace(plan.at, None) == BAD_ARGUMENT
    assert library.fk_last_error() == b"bytes is NULL"
    for function in ("run", "tune"):
        for count in (0, 2, 4, 1 << 40):
            assert plan.run(function, count=count) == BAD_ARGUMENT
            assert library.fk_last_error().decode() == f"count is {count}; the plan has 3 operands"
        assert plan.run(function, array=None) == BAD_ARGUMENT
        assert library.fk_last_error() == b"operands is NULL"
    assert call.all() == before
    plan.destroy()
    for function in ("run", "tune"):
        assert plan.run(function) == BAD_ARGUMENT  # destroy() has made it NULL
        assert library.fk_last_error() == b"plan is NULL"
    library.fk_plan_destroy(None)
    call.free()


def test_a_description_of_another_function(library):
    """Its size tells, where the structs have others."""
    call = Product(library)
    assert created(call, fused_kernels.FK_ATTENTION_FORWARD)[0] == BAD_ARGUMENT
    call.free()


def test_no_host_memory(library):
    """Plans are made until there is none left. Then the library says so, and goes on."""
    call = Product(library)

    def run():
        plans, made, code, malloc = (POINTER * 100000)(), 0, OK, ctypes.CDLL(None).malloc
        malloc.restype, malloc.argtypes = POINTER, [SIZE]
        with open("/proc/self/statm") as sizes:
            own = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own, resource.RLIM_INFINITY))
        while malloc(1 << 14):
            pass
        while code == OK:
            code = library.fk_plan_create(fused_kernels.FK_PRODUCT_FORWARD, ctypes.byref(call.description), 0, None,
                                          ctypes.byref(plans, 8 * made))
            made += code == OK
        assert code == CUDA_ERROR and plans[made] is None
        assert library.fk_last_error() == b"std::bad_alloc"
        for at in range(made):
            library.fk_plan_destroy(plans[at])
        plan = Plan(call)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert plan.run() == OK and call.is_right()

    assert in_a_child(run)
    call.free()


# ---- The example of the page ------------------------------------------------------------------------


def test_the_example_of_the_page(library, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    programs = re.findall(r"```c\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL)
    (text,) = (program for program in programs if "fk_plan_create(" in program)
    source, program = tmp_path / "plan.c", tmp_path / "plan"
    source.write_text(text)
    result = execute(["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER}",
                      f"-I{ROOT / 'cpu/c'}", source, f"-L{CPU_BUILD}", f"-Wl,-rpath,{CPU_BUILD}", "-lfused_kernels",
                      "-o", program])
    assert result.rc == 0, result.stderr
    result = execute([program])
    assert (result.rc, result.stdout) == (0, "c[0] is 64\n"), result.stderr
