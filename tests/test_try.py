"""./try: small programs of a reader's own, that are right, and that are wrong in one way each."""

import os
import re
import shutil

from conftest import ROOT, execute
import pytest

TRY = ROOT / "try"


@pytest.fixture
def tried(tmp_path):
    """tried(source, ...): what ./try says of a program that stands in a folder of its own."""

    def run(source, *arguments, name="program.cu", options=("--quick",), **files):
        (tmp_path / name).write_text(source)
        for file, text in files.items():
            (tmp_path / file.replace("_h", ".h").replace("_cu", ".cu")).write_text(text)
        return execute([TRY, tmp_path / name, *options, *arguments], timeout=300, cwd=tmp_path)

    return run


def program(kernel, launch, size=400):
    """A program of one kernel, and of memory `d`."""
    return f"""{kernel}
int main() {{
  float* d;
  cudaMalloc(&d, {size});
  {launch};
  cudaDeviceSynchronize();
  cudaFree(d);
}}
"""


WRITE = "__global__ void f(float* x) { x[threadIdx.x] = 1; }"
SHARED = """__global__ void f(float* x) {
  %s
  s[threadIdx.x %s] = 2;
  __syncthreads();
  x[threadIdx.x] = s[31 - threadIdx.x];
}"""
MISTAKES = {
    "null": (program(WRITE, "f<<<1, 32>>>(NULL)"), r"in f, block \(0,0,0\), thread \(0,0,0\): a null pointer"),
    "host pointer": (program(WRITE, "f<<<1, 32>>>((float*)malloc(400))"), "at a host pointer"),
    "global one too far": (program(WRITE, "f<<<1, 128>>>(d)"),
                           r"thread \(100,0,0\): .* 4 bytes behind the end of 400 bytes, at program.cu:1"),
    "shared one too far": (program(SHARED % ("__shared__ float s[32];", "+ 1"), "f<<<1, 32>>>(d)"),
                           r"thread \(31,0,0\): shared memory: .* 4 bytes behind .*, at program.cu:3"),
    "no dynamic bytes": (program(SHARED % ("extern __shared__ float s[];", ""), "f<<<1, 32>>>(d)"),
                         "dynamic shared memory, of which the launch asks for 0 bytes"),
    "freed": (program(WRITE, "cudaFree(d); f<<<1, 32>>>(d)"), "used after free"),
    "misaligned": (program("__global__ void f(float* x) { float4 v = *(float4*)(x + 1); x[0] = v.x; }",
                           "f<<<1, 1>>>(d)"), "misaligned: it reads 16 bytes"),
    "host reads": (program(WRITE, "f<<<1, 32>>>(d); return d[3] == 1"), "the host reads 4 bytes of device memory"),
    "refused": (program(WRITE, "f<<<1, 2048>>>(d)"), "A launch failed, and the program did not ask"),
    "a barrier that not all come to": (program(
        "__global__ void f(float* x) { if (threadIdx.x) __syncthreads(); }", "f<<<1, 32>>>(d)"), "waits in __syncthreads"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tried, name):
    source, said = MISTAKES[name]
    result = tried(source)
    assert re.search(said, result.stdout), result.stdout + result.stderr
    assert result.rc == 1


def test_right_program(tried):
    result = tried(program(WRITE, "f<<<2, 32>>>(d); f<<<2, 32>>>(d)"))
    assert result.rc == 0, result.stdout
    row = re.search(r"^f +2 +32 +2 +0 +0 +4 +16 +0 +0 +0 ", result.stdout, re.MULTILINE)
    assert row, result.stdout
    assert "Never freed" not in result.stdout


def test_never_freed(tried):
    result = tried("int main() {\n  float* d;\n  cudaMalloc(&d, 400);\n}\n")
    assert "Never freed: 1 allocation of device memory, 400 bytes, asked for at program.cu:3." in result.stdout


def test_arguments_and_exit_code(tried):
    source = "int main(int count, char** words) { puts(words[1]); return count + VALUE; }"
    result = tried(source, "-D", "VALUE=5", "--", "hello there")
    assert "hello there" in result.stdout and "exit code 7" in result.stdout
    assert result.rc == 1


FORMS = """
#include "own.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cstdio>
namespace cg = cooperative_groups;
extern __shared__ int dynamic[];
template <class T> __global__ void deduced(T* x, T value) { x[threadIdx.x] = value; }
__global__ void overload(int* x) { x[0] += 1; }
__global__ void twin(float* x) { x[0] += 1; }
void twin(float* x, int threads) { twin<<<1, threads>>>(x); }
__global__ void overload(float* x, float value = 2) { x[0] = value; }
__global__ void several(int* x) {
  __shared__ int a[32], b[32];
  int __shared__ c;
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> tile = cg::tiled_partition<32>(block);
  a[threadIdx.x] = b[threadIdx.x] = dynamic[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x == 0) c = 0;
  block.sync();
  atomicAdd(&c, 1);
  block.sync();
  x[threadIdx.x] = cg::reduce(tile, a[threadIdx.x] + b[31 - threadIdx.x] + dynamic[0], cg::plus<int>()) + c;
#if __CUDA_ARCH__ >= 700
  x[threadIdx.x] += 1000;
#endif
}
__global__ void everyone(int* x) {
  cg::grid_group grid = cg::this_grid();
  int mine = x[grid.thread_rank()];
  grid.sync();
  x[grid.size() - 1 - grid.thread_rank()] = mine;
}
int main() {
  int* x;
  float* y;
  cudaMalloc((void**)&x, 256);
  cudaMalloc(&y, 4);
  deduced<<<1, 32>>>(x, 1);
  overload<<<1, 1>>>(y, 3.0f);
  overload<<<dim3(1), dim3(1)>>>(x);
  twin(y, 1);
  own<<<1, 32>>>(x, 0);
  several<<<1, 32, 128>>>(x);
  int got[64];
  cudaMemcpy(got, x, 128, cudaMemcpyDeviceToHost);
  // x is 3, 2, 2, ...: the sums of a and b are 65 each, and dynamic[0] is 3.
  if (got[5] != 65 + 65 + 32 * 3 + 32 + 1000) return printf("several: %d\\n", got[5]);
  for (int i = 0; i < 64; ++i) got[i] = i;
  cudaMemcpy(x, got, 256, cudaMemcpyHostToDevice);
  void* arguments[] = {&x};
  if (cudaLaunchCooperativeKernel((void*)everyone, 2, 32, arguments)) return 2;
  cudaMemcpy(got, x, 256, cudaMemcpyDeviceToHost);
  if (got[0] != 63 || got[63] != 0) return 3;
  cudaFree(x);
  cudaFree(y);
}
"""
OWN = """#pragma once
__global__ void own(int* x, const int* nothing) {
  __shared__ int s[32];
  s[threadIdx.x] = x[threadIdx.x] + 1;
  __syncthreads();
  if (!nothing) x[threadIdx.x] = s[threadIdx.x];
}
"""


def test_forms_of_other_programs(tried):
    result = tried(FORMS, own_h=OWN)
    assert result.rc == 0, result.stdout + result.stderr


def test_several_sources(tried, tmp_path):
    other = "__global__ void f(float* x) { x[0] = 1; }\nvoid launch(float* x) { f<<<1, 1>>>(x); }\n"
    result = tried(program("void launch(float*);", "launch(d)"), tmp_path / "other.cu", other_cu=other)
    assert result.rc == 0 and re.search(r"^f +1 +1 +1 ", result.stdout, re.MULTILINE), result.stdout + result.stderr


REFUSALS = {
    "#include <cub/cub.cuh>\nint main() {}\n": "program.cu:1: the CPU backend does not have cub. docs/cpu.md",
    "\n__global__ void f(int* x) { asm(\"nop;\"); }\nint main() {}\n": "program.cu:2: .* inline PTX",
    "__global__ void g() {}\n__global__ void f() {\n  g<<<1, 1>>>();\n}\nint main() {}\n": "program.cu:3: .*dynamic para",
    "int f() { return 1; }\n": "has no main",
    "int main() {\n  return nowhere;\n}\n": "does not compile: .*nowhere.*\n    program.cu, line 2: return nowhere;",
    "int main() { cudaNoSuch(); }\n": r"does not have cudaNoSuch \(docs/cpu.md",
    "#include \"nosuch.h\"\nint main() {}\n": "there is no nosuch.h",
}


@pytest.mark.parametrize("source", REFUSALS)
def test_refusals(tried, source):
    result = tried(source)
    assert re.search(REFUSALS[source], result.stderr), result.stdout + result.stderr
    assert result.rc in (1, 2) and "Traceback" not in result.stderr


@pytest.mark.parametrize("words, said", [(["nosuch.cu"], "There is no file nosuch.cu"), ([str(ROOT)], "It is a folder"),
                                         ([str(ROOT / "README.md")], "no source of a CUDA program")])
def test_bad_command_lines(words, said):
    result = execute([TRY, *words])
    assert result.rc == 2 and said in result.stderr


@pytest.mark.extensive
def test_races_and_stray_accesses(tried):
    """The builds of the two sanitizers, whose backend takes half a minute each the first time."""
    race = tried(program(SHARED.replace("  __syncthreads();\n", "") % ("__shared__ float s[64];", ""),
                         "f<<<1, 32>>>(d)").replace("s[31 -", "s[31 -"), options=())
    assert "A race: the same memory is used twice" in race.stdout, race.stdout + race.stderr
    assert "No stray access" in race.stdout and race.rc == 1
    right = tried(program(WRITE, "f<<<1, 32>>>(d)"), options=())
    assert "No race" in right.stdout and "No stray access" in right.stdout and right.rc == 0


def test_nothing_is_left_in_the_repository(tried):
    if not shutil.which("git"):
        pytest.skip("there is no git")
    before = execute(["git", "status", "--porcelain"], cwd=ROOT).stdout
    tried(program(WRITE, "f<<<1, 32>>>(d)"))
    assert execute(["git", "status", "--porcelain"], cwd=ROOT).stdout == before
    assert os.access(TRY, os.X_OK)
