"""./try: small programs of a reader's own, that are right, and that are wrong in one way each."""

import ctypes
import json
import platform
import re
import shutil
import subprocess
import sys

from conftest import ROOT, execute
import pytest

sys.path += [str(ROOT / folder) for folder in ("cpu", "cpu/watch", "exercises")]
from own_program import CCCL_TRIED, cccl_version, installed_toolkits  # noqa: E402

# In the Python of these tests: what `python3` names may be a script that looks for one.
TRY = [sys.executable, ROOT / "try"]


@pytest.fixture
def tried(tmp_path):
    """tried(source, ...): what ./try says of a program that stands in a folder of its own."""

    def run(source, *arguments, name="program.cu", options=("--quick",), **files):
        (tmp_path / name).write_text(source)
        for file, text in files.items():
            (tmp_path / file.replace("_h", ".h").replace("_cu", ".cu")).write_text(text)
        return execute([*TRY, tmp_path / name, *options, *arguments], timeout=300, cwd=tmp_path)

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


def kept(tmp_path_factory, name, text):
    """A program in a folder of its own: it is built once, and its argument chooses what it does."""
    path = tmp_path_factory.mktemp(name) / f"{name}.cu"
    path.write_text(text)
    return path


WRITE = "__global__ void f(float* x) { x[threadIdx.x] = 1; }"
SHARED = """__global__ void f(float* x) {
  %s
  s[threadIdx.x %s] = 2;
  __syncthreads();
  x[threadIdx.x] = s[31 - threadIdx.x];
}"""
# Each a kernel, what launches it, and what is said: @1 is the first line of the kernel. They are one program, which is
# built once, and whose argument chooses.
MISTAKES = {
    "null": (WRITE, "f<<<1, 32>>>(NULL)", r"in f, block \(0,0,0\), thread \(0,0,0\): a null pointer"),
    "host pointer": (WRITE, "f<<<1, 32>>>((float*)malloc(400))", "at a host pointer"),
    "global one too far": (WRITE, "f<<<1, 128>>>(d)",
                           r"thread \(100,0,0\): .* 4 bytes behind the end of 400 bytes, at program.cu:@1"),
    "shared one too far": (SHARED % ("__shared__ float s[32];", "+ 1"), "f<<<1, 32>>>(d)",
                           r"thread \(31,0,0\): shared memory: .* 4 bytes behind .*, at program.cu:@3"),
    "no dynamic bytes": (SHARED % ("extern __shared__ float s[];", ""), "f<<<1, 32>>>(d)",
                         "dynamic shared memory, of which the launch asks for 0 bytes"),
    "freed": (WRITE, "cudaFree(d); f<<<1, 32>>>(d)", "used after free"),
    "misaligned": ("__global__ void f(float* x) { float4 v = *(float4*)(x + 1); x[0] = v.x; }",
                   "f<<<1, 1>>>(d)", "misaligned: it reads 16 bytes"),
    "host reads": (WRITE, "f<<<1, 32>>>(d); return d[3] == 1", "the host reads device memory"),
    "refused": (WRITE, "f<<<1, 2048>>>(d)", "A launch failed, and the program did not ask"),
    "a volatile variable that nobody sets": (
        "__global__ void f(volatile float* x) {\n  while (x[0] != 1) {}\n}", "f<<<1, 32>>>(d)",
        "A deadlock: .*\n.*finds the same value again and again in line @2 .so do 31 more threads"),
    "a lock that nobody opens": (
        "__global__ void f(int* x) {\n  while (atomicCAS(x, -1, 1) != -1);\n}", "f<<<1, 32>>>((int*)d)",
        "A deadlock: .*\n.*finds the same value again and again in line @2 .so do 30 more threads"),
    "two shuffles": (
        "__global__ void f(float* x) {\n  float v = threadIdx.x;\n"
        "  if (threadIdx.x % 2) v = __shfl_up_sync(~0u, v, 1);\n"
        "  else v = __shfl_down_sync(~0u, v, 1);\n  x[threadIdx.x] = v;\n}", "f<<<1, 32>>>(d)",
        "__shfl_down_sync.. in line @4, but with the same mask .* waits in __shfl_up_sync.. in line @3"),
    "a division by zero": ("__global__ void f(int* x, int n) { x[0] = 7 / (n - (int)threadIdx.x); }",
                           "f<<<1, 32>>>((int*)d, 3)",
                           r"in f, block \(0,0,0\), thread \(3,0,0\): divides an integer by zero, .* at program.cu:@1"),
    "an assertion": ("__global__ void f(float* x) { assert(threadIdx.x < 9); }", "f<<<1, 32>>>(d)",
                     r"thread \(9,0,0\): assertion .* at program.cu:@1"),
    "a kernel called like a function": (WRITE, "f(d)", "calls the kernel f like any function, without <<<"),
    "a strange address, and a long std::string": (
        WRITE, "std::string s(99, 'x'); f<<<1, 128>>>(d); puts((s + s).c_str())", "4 bytes behind the end"),
    "grid.sync() of an ordinary launch": (
        "__global__ void f(float* x) {\n  cooperative_groups::this_grid().sync();\n}", "f<<<1, 32>>>(d)",
        "grid.sync.. at program.cu:@2, but the launch is not cooperative: cudaLaunchCooperativeKernel"),
    "a constructor in shared memory": (
        "struct Two { int two = 2; };\n__global__ void f(float* x) { __shared__ Two s[9]; x[0] = s[0].two; }",
        "f<<<1, 32>>>(d)", "a __shared__ variable has a constructor that is not empty: nvcc refuses it"),
    "a barrier that not all come to": (
        "__global__ void f(float* x) { if (threadIdx.x) __syncthreads(); }", "f<<<1, 32>>>(d)",
        "waits in __syncthreads"),
}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """(the program of all mistakes, the line before each kernel)."""
    text, lines = "#include <cooperative_groups.h>\n#include <string>\n", []
    for number, (kernel, launch, _) in enumerate(MISTAKES.values()):
        text += f"namespace mistake_{number} {{\n"
        lines.append(text.count("\n"))
        text += f"{kernel}\nint run(float* d) {{ {launch}; return 0; }}\n}}\n"
    runs = ", ".join(f"mistake_{number}::run" for number in range(len(lines)))
    path = tmp_path_factory.mktemp("mistakes") / "program.cu"
    path.write_text(program(f"{text}int (*const runs[])(float*) = {{{runs}}};",
                            "const int rc = runs[atoi(words[1])](d)").replace("main()", "main(int, char** words)")
                    .replace("  cudaFree(d);\n}\n", "  cudaFree(d);\n  return rc;\n}\n"))
    return path, lines


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(mistaken, name):
    path, lines = mistaken
    number = list(MISTAKES).index(name)
    result = execute([*TRY, path, "--quick", "--", number], timeout=300)
    said = re.sub(r"@(\d)", lambda match: str(lines[number] + int(match[1])), MISTAKES[name][2])
    assert re.search(said, result.stdout), result.stdout + result.stderr
    assert result.rc == 1


# What many tests ask of one program, which is built once: its first word chooses.
CHOICES = """#include <csignal>
__global__ void f(float* x) { x[threadIdx.x] = 1; }
__global__ void g(float* x) { x[threadIdx.x] = 1; }
__global__ void endless(float* x) { for (int i = 0; i >= 0; i = (i + 1) % 9) x[i] += 1; }
float host[9999];
int main(int count, char** words) {
  const int word = atoi(words[1]);
  if (word < 0) raise(-word);
  float *d, sum = 0;
  cudaMalloc(&d, 400);
  switch (word) {
    case 0: f<<<2, 32>>>(d); f<<<2, 32>>>(d); break;
    case 1: for (float each : host) sum += each; f<<<1, 32>>>(d); sum += d[1]; return sum > 0;
    case 2: g<<<1, 32>>>(d);
    case 3: endless<<<1, 1>>>(d); break;
    case 4: f<<<1, 2048>>>(d); f<<<1, 2048>>>(d); f<<<1, 128>>>(d); f<<<1, 32>>>(d); break;
    case 5: f<<<1, 32>>>(d); cudaDeviceSynchronize(); assert(d == nullptr); break;
    case 6: return 0;
    case 7: puts(words[2]); cudaFree(d); return count + VALUE;
  }
  cudaDeviceSynchronize();
  cudaFree(d);
}
"""


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """chosen(word, ...): what ./try says of this program."""
    path = kept(tmp_path_factory, "choices", CHOICES)
    return lambda *words, options=(): execute([*TRY, path, "--quick", "-D", "VALUE=5", *options, "--", *words], timeout=300)


def test_right_program(chosen):
    result = chosen(0)
    assert result.rc == 0, result.stdout
    row = re.search(r"^f +2 +32 +2 +0 +0 +4 +16 +0 +0 +0 ", result.stdout, re.MULTILINE)
    assert row, result.stdout
    assert "Never freed" not in result.stdout


def test_a_kernel_that_takes_long(tried, monkeypatch):
    """Its blocks are alike, so what is told of all of them is right although only the first ones are counted. The time
    is over between two barriers."""
    monkeypatch.setenv("CUDA_CPU_COUNTED_MILLISECONDS", "1")
    kernel = "__global__ void f(float* x) { for (int i = 0; i < 400; ++i) { x[threadIdx.x] += 1; __syncthreads(); } }"
    result = tried(program(kernel, "for (int i = 0; i < 2; ++i) f<<<200, 32>>>(d)"))
    assert re.search(r"f takes long: only the first \S+ % of its blocks were counted", result.stdout), result.stdout
    row = re.search(r"^f +200 +32 +2 +160 k +640 k +160 k +640 k ", result.stdout, re.MULTILINE)
    assert row, result.stdout


def test_host_reads_late(chosen):
    """The host has read the same page before there was device memory in it, and others since."""
    result = chosen(1)
    assert "the host reads device memory" in result.stdout and result.rc == 1, result.stdout


def test_host_reads_what_was_its_own(tried):
    """The host has used all pages before cudaMalloc() gets some of them. Managed memory is everybody's."""
    source = program(WRITE, """float* m;
  cudaMallocManaged(&m, 4096);
  for (int i = 0; i < 1024; ++i) m[i] = i;
  float *own[64], *theirs;
  for (float*& each : own) each = (float*)malloc(1 << 16);
  for (float* each : own) for (int i = 0; i < 1 << 14; ++i) each[i] = m[i % 1024];
  for (float* each : own) free(each);
  cudaMalloc(&theirs, 1 << 16);
  puts(theirs >= own[0] && theirs < own[63] ? "used again" : "elsewhere");
  m[1023] = own[63] > own[0];
  puts("as far as this");
  fflush(stdout);
  theirs[1 << 13] = 2""")
    result = tried(source)
    assert "used again" in result.stdout and "as far as this" in result.stdout, result.stdout
    assert "the host writes device memory" in result.stdout and result.rc == 1, result.stdout


# The same sum with hooks and in a function that the compiler makes without them, on the host and in a kernel, which is
# counted for a millisecond only. The first is __host__ and __device__, so hooks have to be in it.
HOOKS = """
#include <time.h>
#include <algorithm>
#include <vector>
#define SUM                                   \\
  int all = 0;                                \\
  for (int i = 0; i < n; ++i) all += x[i];    \\
  return all;
__host__ __device__ int sum(const int* x, int n) { SUM }
__attribute__((noinline, no_sanitize("thread"))) __host__ __device__ int sum_without(const int* x, int n) { SUM }
__global__ void f(const int* x, int* y, int n) { y[threadIdx.x] = sum(x, n); }
__global__ void f_without(const int* x, int* y, int n) { y[threadIdx.x] = sum_without(x, n); }
template <class F> double cpu_ns(F function) {
  timespec from, to;
  double least = 1e18;
  for (int k = 0; k < 9; ++k) {
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    function();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    least = std::min(least, (to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec));
  }
  return least;
}
int main() {
  std::vector<int> host(64000, 1);
  int all = 0;
  const double before = cpu_ns([&] { all += sum(host.data(), 64000); }) /
                        cpu_ns([&] { all += sum_without(host.data(), 64000); });
  int *x, *y;
  cudaMalloc(&x, 4 * 4000);
  cudaMalloc(&y, 4 * 32);
  cudaMemcpy(x, host.data(), 4 * 4000, cudaMemcpyHostToDevice);
  f<<<1, 32>>>(x, y, 40);
  const double on_host = cpu_ns([&] { all += sum(host.data(), 64000); }) /
                         cpu_ns([&] { all += sum_without(host.data(), 64000); });
  const double in_kernel = cpu_ns([&] { f<<<8, 32>>>(x, y, 4000); cudaDeviceSynchronize(); }) /
                           cpu_ns([&] { f_without<<<8, 32>>>(x, y, 4000); cudaDeviceSynchronize(); });
  printf("%d, %.1f, %.1f, %.1f times\\n", all, before, on_host, in_kernel);
  cudaFree(x);
  cudaFree(y);
  return before > 4 || on_host > 4 || in_kernel > 2.5;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="cpu/two_versions.py knows this processor alone")
def test_what_is_not_counted_is_not_slowed_down(tried, monkeypatch):
    """A call for each access would take six times as long. The same function is counted in a kernel before: a load of
    one sector for each element."""
    monkeypatch.setenv("CUDA_CPU_COUNTED_MILLISECONDS", "1")
    result = tried(HOOKS)
    assert result.rc == 0, result.stdout + result.stderr
    assert re.search(r"^f +1 +32 +1 +40 +40 +1 +4 ", result.stdout, re.MULTILINE), result.stdout


# What a program has once, though its functions are there twice: variables of every kind, and addresses of functions.
TWICE = """
#include <omp.h>
#include <stdexcept>
#include <vector>
#include "own.h"
static int calls = 1;
__device__ int device_calls;
thread_local int of_thread = 5;
struct Shape { virtual ~Shape() {} virtual int sides() const { return 0; } };
struct Square : Shape { int sides() const override { return 4; } };
static int next() { static std::vector<int> all = {++calls}; all.push_back(calls); return all.size(); }
static void throws(int i) { if (i == 3) throw std::runtime_error("three"); }
__global__ void waits(volatile int* flag, int* y) {
  if (threadIdx.x == 31) { *flag = 1; atomicAdd(&device_calls, 1); }
  while (*flag == 0) {}
  y[threadIdx.x] = more<int>(threadIdx.x);
}
int (*address())(int);
int main() {
  int *flag, *y, got[32], caught = 0, wrong = 0, counted = 0;
  cudaMalloc(&flag, 4);
  cudaMalloc(&y, 128);
  for (int i = 0; i < 300; ++i) {
    cudaMemset(flag, 0, 4);
    waits<<<1, 32>>>(flag, y);
    cudaMemcpy(got, y, 128, cudaMemcpyDeviceToHost);
    for (int k = 0; k < 32; ++k) wrong += got[k] != k + 7;
  }
  cudaMemcpyFromSymbol(&counted, device_calls, 4);
  try {
    for (int i = 0; i < 9; ++i) throws(i);
  } catch (const std::exception& error) {
    caught = error.what()[0] == 't';
  }
  Shape* shape = new Square;
  const int sides = shape->sides();
  delete shape;
  next();
  more<int>(0);
  printf("%d %d %d %d %d %d %d %d\\n", wrong, counted, caught, sides, next(), calls, times<int> > 0, ++of_thread);
  int threads = 0;
#pragma omp parallel for num_threads(3) reduction(+ : threads)
  for (int i = 0; i < 3; ++i) threads += omp_get_num_threads() * (1 + omp_get_thread_num());
  printf("%d %d\\n", address() == &more<int>, threads);
  printf("%d ", rand());
  srand(5);
  const int number = rand();
  printf("%ld ", random());
  srandom(5);
  printf("%d\\n", rand() == number);
  cudaFree(flag);
  cudaFree(y);
}
"""
TWICE_OWN = """#pragma once
template <class T> int times = 0;
template <class T> __host__ __device__ T more(T x) { ++times<T>; static const T seven = 7; return x + seven; }
"""


def test_variables_are_there_once(tried, tmp_path, monkeypatch):
    """Most launches are not counted, and threads that wait for a volatile variable let others go on then, too. The host
    has OpenMP, and the C library's numbers from rand()."""
    library = ctypes.CDLL(None)
    library.srand(5)
    library.rand()
    monkeypatch.setenv("CUDA_CPU_COUNTED_MILLISECONDS", "1")
    other = '#include "own.h"\nstatic int calls = 8;\nint f() { return calls; }\n'
    other += "int (*address())(int) { return &more<int>; }\n"
    result = tried(TWICE, tmp_path / "other.cu", other_cu=other, own_h=TWICE_OWN)
    said = f"\n0 300 1 4 3 2 1 6\n1 18\n1804289383 {library.rand()} 1\n"
    assert said in result.stdout and result.rc == 0, result.stdout + result.stderr


REPEATED = """
__device__ int launches;
__global__ void same(const float* x, float* y) {
  float sum = 0;
  for (int i = 0; i < 3000; ++i) sum += x[(i + threadIdx.x) % 32];
  y[threadIdx.x] = sum;
}
__global__ void adds(float* y) {
  for (int i = 0; i < 3000; ++i) y[threadIdx.x] += 1;
}
__global__ void halves_and_doubles(float* y, bool halves) {
  for (int i = 0; i < 3001; ++i) y[threadIdx.x] *= halves == (i % 2 == 0) ? 0.5f : 2.0f;
}
__global__ void counts(float* y) {
  for (int i = 0; i < 3000; ++i) y[threadIdx.x] = i;
  if (threadIdx.x == 0) ++launches;
}
__global__ void says(float* y) {
  for (int i = 0; i < 3000; ++i) y[threadIdx.x] = i;
  if (threadIdx.x == 0) printf("here\\n");
}
__global__ void shares(float* shared) {
  for (int i = 0; i < 3000; ++i) shared[threadIdx.x + 32] = shared[threadIdx.x] + 1;
}
int main() {
  float *x, *y, *shared, h[32] = {}, sums[3], z[4];
  cudaMalloc(&x, sizeof h);
  cudaMalloc(&y, sizeof h);
  cudaMallocManaged(&shared, 2 * sizeof h);
  auto last = [&] { cudaMemcpy(h, y, sizeof h, cudaMemcpyDeviceToHost); return h[31]; };
  for (int round = 0; round < 3; ++round) {
    for (float& each : h) each = round;
    cudaMemcpy(x, h, sizeof h, cudaMemcpyHostToDevice);
    for (int i = 0; i < 20; ++i) {
      cudaMemset(y, 0, sizeof h);
      same<<<1, 32>>>(x, y);
    }
    sums[round] = last();
  }
  cudaMemset(y, 0, sizeof h);
  for (int i = 0; i < 20; ++i) adds<<<1, 32>>>(y);
  z[0] = last();
  for (int i = 0; i < 41; ++i) halves_and_doubles<<<1, 32>>>(y, i % 2 == 0);
  z[1] = last();
  for (int i = 0; i < 20; ++i) counts<<<1, 32>>>(y);
  for (int i = 0; i < 20; ++i) says<<<1, 32>>>(y);
  int right = 0;
  for (int i = 0; i < 20; ++i) {
    for (int k = 0; k < 32; ++k) shared[k] = i / 10;
    shares<<<1, 32>>>(shared);
    cudaDeviceSynchronize();
    right += shared[63] == i / 10 + 1;
  }
  int n;
  cudaMemcpyFromSymbol(&n, launches, sizeof n);
  printf("%g %g %g, %g %g, %d %d\\n", sums[0], sums[1], sums[2], z[0], z[1], n, right);
  cudaFree(x);
  cudaFree(y);
  cudaFree(shared);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="launches that are not counted have no version of their own")
def test_a_launch_that_finds_what_an_earlier_one_found_is_not_run(tried, monkeypatch):
    """It is run if the host, or the kernel, has changed anything: its input, its output, a variable, memory that both
    use. And if it prints."""
    monkeypatch.setenv("CUDA_CPU_COUNTED_MILLISECONDS", "1")
    result = tried(REPEATED)
    assert "\n0 3000 6000, 60000 30000, 20 20\n" in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("here\n") == 20
    repeats = dict(re.findall(r"^    (\w+): (\d+) of its \d+ launches found memory", result.stdout, re.MULTILINE))
    assert set(repeats) == {"same", "halves_and_doubles", "shares"}, result.stdout
    assert int(repeats["same"]) > 20 and int(repeats["halves_and_doubles"]) > 10 and int(repeats["shares"]) > 5
    assert result.rc == 0, result.stdout


def test_time_and_refusals(chosen):
    """A loop without an end ends with the second that it was given, and the kernels before it are shown. Launches
    refused alike are one sentence, and none is said of those behind a kernel that failed."""
    result = chosen(3, options=("--seconds", "1"))
    assert "It did not end within 1 seconds: kernel endless" in result.stdout, result.stdout
    result = chosen(2, options=("--seconds", "2"))
    assert re.search(r"^g +1 +32 +1 +0 +0 +1 +4 ", result.stdout, re.MULTILINE), result.stdout
    assert "It did not end within 2 seconds: kernel endless" in result.stdout, result.stdout
    assert "No kernel" not in result.stdout and not re.search("^endless  ", result.stdout, re.MULTILINE), result.stdout
    result = chosen(4)
    assert result.stdout.count("A launch failed") == 1 and "A launch failed (2 times)" in result.stdout, result.stdout


def test_an_assertion_of_the_host(chosen):
    """It ends the program, and what its kernels have asked for is said all the same."""
    result = chosen(5)
    assert "ended itself (abort())" in result.stdout and result.rc == 1, result.stdout
    assert re.search(r"^f +1 +32 +1 +0 +0 +1 +4 ", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.parametrize("number, said", [
    (9, "was killed (SIGKILL), which is no crash"), (15, "was ended by the signal SIGTERM"),
    (11, "crashed: some thread reaches far outside"), (8, "the host divides an integer by zero")])
def test_ended_by_a_signal(chosen, number, said):
    """Not every signal is a crash."""
    result = chosen(-number)
    assert said in result.stdout and result.rc == 1, result.stdout


def test_never_freed(chosen):
    line = CHOICES[:CHOICES.index("cudaMalloc(")].count("\n") + 1
    said = f"Never freed: 1 allocation of device memory, 400 bytes, asked for at choices.cu:{line}."
    assert said in chosen(6).stdout


def test_arguments_and_exit_code(chosen):
    result = chosen(7, "hello there")
    assert "hello there" in result.stdout and "exit code 8" in result.stdout
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


# Kernels that have the names of functions of std and of the C library, one of them in two namespaces, and parameters that
# have the names of functions of the host. Blocks that use memory from new and malloc().
NAMES = """
#include <algorithm>
#include <numeric>
#include <iostream>
#include <string.h>
using namespace std;
__global__ void merge(int* x, int n) { x[threadIdx.x] += n; }
__global__ void fill(int* x, int value) { x[threadIdx.x] = value; }
__global__ void copy(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }
__global__ void reduce(const int* x, int* y, int n) { for (int i = 0; i < n; ++i) y[0] += x[i]; }
__global__ void iota(int* x) { x[threadIdx.x] = threadIdx.x; }
__global__ void index(int* x) { x[threadIdx.x] += 1; }
__global__ void free(int* x, int value) { x[threadIdx.x] += value; }
__global__ void max_element(const int* x, int* y) { y[0] = x[31]; }
namespace { __global__ void sort(int* x, int n) { x[threadIdx.x] += n; } }
namespace own {
__global__ void count(int* x) { x[threadIdx.x] += 1; }
void go(int* x) { count<<<1, 32>>>(x); }
}
template <class T> __global__ void transform(T* x, T value) { x[threadIdx.x] += value; }
template <int N> __global__ void rotate(int* x) { x[threadIdx.x] += N; }
template <class Kernel> void launch(Kernel iota, int* x) { iota<<<1, 32>>>(x, 1); }
float host(float x) { return x; }
template <class F> __device__ int call(F host) { return host(3); }
__global__ void calls(int* x) { x[threadIdx.x] += call([](int y) { return y; }); }
int shadowed = 3;
__global__ void parameters(int* x, int shadowed) { int a = 0, b = shadowed; x[threadIdx.x] += a + b; }
struct Node { int value; Node* next; };
__device__ Node* kept;
__global__ void allocates(int* x) {
  Node* node = new Node{1, nullptr};
  int* numbers = (int*)malloc(40);
  numbers[9] = 1;
  atomicAdd(x + threadIdx.x, node->value + numbers[9]);
  delete node;
  free(numbers);
  if (blockIdx.x == 3 && threadIdx.x == 0) kept = new Node[32];
}
__global__ void uses(int* x) { kept[threadIdx.x].value = 1; x[threadIdx.x] += kept[threadIdx.x].value; }
__global__ void gives_back() { delete[] kept; }
int main() {
  int *x, *y, got[32];
  cudaMalloc(&x, 128);
  cudaMalloc(&y, 128);
  iota<<<1, 32>>>(x);
  index<<<1, 32>>>(x);
  merge<<<1, 32>>>(x, 1);
  free<<<1, 32>>>(x, 1);
  sort<<<1, 32>>>(x, 1);
  own::count<<<1, 32>>>(x);
  own::go(x);
  transform<<<1, 32>>>(x, 1);
  transform<int><<<1, 32>>>(x, 1);
  rotate<1><<<1, 32>>>(x);
  launch<void (*)(int*, int)>(merge, x);
  calls<<<1, 32>>>(x);
  parameters<<<1, 32>>>(x, 1);
  allocates<<<4, 32>>>(x);
  uses<<<1, 32>>>(x);
  gives_back<<<1, 1>>>();
  fill<<<1, 32>>>(y, 0);
  reduce<<<1, 1>>>(x, y, 32);
  max_element<<<1, 1>>>(x, y + 1);
  copy<<<1, 32>>>(y, x);
  cudaMemcpy(got, x, 128, cudaMemcpyDeviceToHost);
  cout << got[0] << " " << got[1] << endl;  // each element is its index and 23 more
  cudaFree(x);
  cudaFree(y);
  return got[0] != 31 * 16 + 32 * 23 || got[1] != 31 + 23;
}
"""


def test_names_of_libraries_and_memory_from_kernels(tried):
    result = tried(NAMES)
    assert result.rc == 0, result.stdout + result.stderr
    assert "A mistake" not in result.stdout


# Each function says where it runs, as nvcc's two passes let it. A barrier would stop the host, and a macro that
# depends on the pass is used by another macro.
PASSES = """
#include <cstdio>
#ifdef __CUDA_ARCH__
#define PLACE "device"
#else
#define PLACE "host"
#endif
#define BOTH __host__ __device__
#define LETTER PLACE[0]
BOTH int where() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
  __syncthreads();
  return 1;
#else
  return 0;
#endif
}
struct Number {
  int value;
  __host__ __device__ int get() const {
#ifndef __CUDA_ARCH__
    return value;
#endif
    return value + 10;
  }
};
template <class T> BOTH constexpr T twice(T x) {
#ifdef __CUDA_ARCH__
  return 2 * x + 1;
#else
  return 2 * x;
#endif
}
BOTH char letter() { return LETTER; }
int of_host() {
#ifdef __CUDA_ARCH__
  return 1;
#endif
  return 0;
}
__global__ void f(int* x) {
  auto own = [] BOTH (int y) {
#ifdef __CUDA_ARCH__
    return y;
#else
    return -y;
#endif
  };
  const int values[] = {where(), Number{1}.get(), twice(1), letter(), own(1), __LINE__};
  if (threadIdx.x < 6) x[threadIdx.x] = values[threadIdx.x];
}
int main() {
  int *x, got[6];
  cudaMalloc(&x, 128);
  f<<<1, 32>>>(x);
  cudaMemcpy(got, x, 24, cudaMemcpyDeviceToHost);
  cudaFree(x);
  static_assert(twice(1) == 2);
  printf("device: %d %d %d %c %d %d\\n", got[0], got[1], got[2], got[3], got[4], got[5]);
  printf("host: %d %d %d %c %d %d\\n", where(), Number{1}.get(), twice(1), letter(), of_host(), __LINE__);
}
"""


def test_what_the_host_compiles_and_what_the_device(tried):
    result = tried(PASSES)
    lines = [number for number, line in enumerate(PASSES.splitlines(), 1) if "__LINE__" in line]
    assert f"device: 1 11 3 d 1 {lines[0]}\nhost: 0 1 2 h 0 {lines[1]}\n" in result.stdout, result.stdout + result.stderr
    assert result.rc == 0


# Of C++17, and not of C++20: an aggregate with a constructor that is not its own, a comparison that would call itself with
# its sides changed, a u8 literal, names that std has got since. And what nvcc takes: a constructor that does nothing in
# shared memory, macros for the bounds of a kernel on either side of void, attributes and properties of all kinds.
STANDARD = """
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
using namespace std;
struct Aggregate { int value; Aggregate() = delete; };
struct Left { int value; };
struct Right { int value; bool operator==(const Left& other) const { return value == other.value; } };
bool operator==(const Left& left, const Right& right) { return right == left; }
const char* text = u8"text";
template <class T> __host__ __device__ T midpoint(T a, T b) { return (a + b) / 2; }
int popcount(unsigned x) { return x ? 1 + popcount(x & (x - 1)) : 0; }
struct identity { int operator()(int x) const { return x; } };
struct Pair { float x, y; __device__ Pair() {} };
#define BOUNDS(n) __launch_bounds__(n)
#define SMALL __launch_bounds__(64)
__global__ BOUNDS(64) void f(float* x) {
  __shared__ Pair s[32];
  s[threadIdx.x].x = threadIdx.x;
  __syncthreads();
  x[threadIdx.x] = midpoint(s[31 - threadIdx.x].x, 1.0f);
}
template <class T> __global__ SMALL void g(T* x) { x[threadIdx.x] += 1; }
__global__ void SMALL h(float* x) { x[threadIdx.x] += 1; }
int main() {
  float *x, got[32];
  cudaMalloc(&x, 128);
  f<<<1, 32>>>(x);
  g<<<1, 32>>>(x);
  h<<<1, 32>>>(x);
  cudaMemcpy(got, x, 128, cudaMemcpyDeviceToHost);
  cudaFree(x);
  int value;
  cudaDeviceProp properties;
  if (cudaDeviceGetAttribute(&value, cudaDevAttrStreamPrioritiesSupported, 0)) return 1;
  if (cudaDeviceGetAttribute(&value, cudaDevAttrHostRegisterSupported, 0) || value != 1) return 2;
  if (cudaGetDeviceProperties(&properties, 0) || properties.surfaceAlignment != 0) return 3;
  cudaDeviceGetAttribute(&value, cudaDevAttrConcurrentManagedAccess, 0);
  if (value != properties.concurrentManagedAccess) return 4;
  Aggregate aggregate{7};
  if (!(Left{1} == Right{1}) || popcount(7) != 3 || identity()(aggregate.value) != 7) return 5;
  if (got[31] != 2.5f) return 6;
  h<<<1, 65>>>(x);
  if (cudaGetLastError() == cudaSuccess) return 7;
  printf("%s %ld\\n", text, __cplusplus);
}
"""


def test_the_standard_is_that_of_nvcc(tried):
    result = tried(STANDARD)
    assert "text 201703" in result.stdout and result.rc == 0, result.stdout + result.stderr


def test_another_standard(tried):
    result = tried("template <class T> concept Any = true;\nint main() { return !Any<int>; }\n", "-std=c++20")
    assert result.rc == 0, result.stdout + result.stderr
    assert "invalid choice" in tried("int main() {}\n", "-std=c++98").stderr


READS = """#include <iostream>
#include <string>
__global__ void f(float* x, int with_barrier) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  if (with_barrier) __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x];
}
int main() {
  std::string line, all;
  while (std::getline(std::cin, line)) all += line + "+";
  std::cout << "read " << all << std::endl;
  if (all.empty()) return 0;
  float* x;
  cudaMalloc(&x, 256);
  f<<<1, 64>>>(x, all != "race+");
  cudaDeviceSynchronize();
  cudaFree(x);
}
"""


def test_standard_input(tmp_path):
    """From a file and from a pipe."""
    path, given = tmp_path / "program.cu", tmp_path / "given"
    path.write_text(READS)
    given.write_text("left out\none\ntwo\n")
    with open(given, "rb") as file:
        file.seek(len("left out\n"))
        result = subprocess.run([*TRY, path, "--quick"], stdin=file, capture_output=True, text=True, timeout=300)
    assert "read one+two+\n" in result.stdout, result.stdout + result.stderr
    result = subprocess.run([*TRY, path, "--quick"], input="three\n", capture_output=True, text=True, timeout=300)
    assert "read three+\n" in result.stdout and result.returncode == 0, result.stdout + result.stderr


@pytest.mark.extensive
def test_a_sanitizer_reads_the_same(tmp_path):
    path = tmp_path / "program.cu"
    path.write_text(READS)
    for text, said in (("race\n", "A race: "), ("right\n", "No race: ")):
        result = subprocess.run([*TRY, path, "--race"], input=text, capture_output=True, text=True, timeout=300)
        assert said in result.stdout, result.stdout + result.stderr


# A race in the first file, in the second one, and in a header that both include.
RACES_OF_FILES = {
    "program.cu": """#include "own.h"
__global__ void second(float* x);
__global__ void first(float* x) {
  __shared__ float s[64];
  if (blockIdx.y == 0) put(s);
  x[threadIdx.x] = s[63 - threadIdx.x];
}
int main(int count, char**) {
  float* x;
  cudaMalloc(&x, 256);
  if (count > 1) second<<<1, 64>>>(x);
  else first<<<1, 64>>>(x);
  cudaDeviceSynchronize();
  cudaFree(x);
}
""",
    "own.h": "// shared\n__device__ inline void put(float* s) {\n  s[threadIdx.x] = 1;\n}\n",
    "other.cu": """// the second file
__global__ void second(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = 2;
  x[threadIdx.x] = s[63 - threadIdx.x];
}
""",
}


@pytest.mark.extensive
def test_a_race_is_quoted_from_its_file(tmp_path):
    for name, text in RACES_OF_FILES.items():
        (tmp_path / name).write_text(text)
    command = [*TRY, tmp_path / "program.cu", tmp_path / "other.cu", "--race"]
    result = execute(command, timeout=300)
    assert "in line 3 of own.h: s[threadIdx.x] = 1;" in result.stdout, result.stdout + result.stderr
    assert "in line 6: x[threadIdx.x] = s[63 - threadIdx.x];" in result.stdout, result.stdout
    result = execute([*command, "--", "1"], timeout=300)
    assert "in line 4 of other.cu: s[threadIdx.x] = 2;" in result.stdout, result.stdout + result.stderr
    assert "in line 5 of other.cu: x[threadIdx.x] = s[63 - threadIdx.x];" in result.stdout, result.stdout


def test_what_is_not_looked_at_is_said(tried):
    source = "struct A { virtual int f() { return 1; } };\n"
    source += program(SHARED % ("__shared__ float s[32];", ""), "f<<<1, 32>>>(d)")
    result = tried(source)
    assert "Not looked at: whether a kernel reads shared memory that nobody has written" in result.stdout, result.stdout
    assert "Not looked at: whether a kernel calls a virtual function" in result.stdout and result.rc == 0
    plain = tried(program(WRITE, "f<<<1, 32>>>(d)")).stdout
    assert "shared memory that nobody" not in plain and "virtual function" not in plain


# What a survey of public programs needed. The constructor stands outside of its class, and the function of the host with
# the name of one of the device is in what the preprocessor leaves out.
FUNCTIONS = r"""
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <climits>
#ifdef WITH_TEXTURES
texture<float> from;
#endif
struct Simulation { Simulation(); int steps; };
Simulation::Simulation() : steps(3) {}
#if 1
__device__ inline int twice(int i) { return 2 * i; }
#else
inline int once(int i) { return i; }
__device__ inline int twice(int i) { return once(i) + once(i); }
#endif
template <class T> struct Aligned { typedef __align__(16) T Type; };
template <class T, class... Numbers> __global__ void sum(T* x, Numbers... numbers) {
  x[threadIdx.x] = twice((numbers + ...));
}
template <class... Numbers> void sums(int* x, Numbers... numbers) { sum<<<1, 32>>>(x, numbers...); }
__global__ void layers(cudaPitchedPtr memory, int* x) {
  const char* row = (char*)memory.ptr + (threadIdx.x * memory.ysize + 1) * memory.pitch;
  x[threadIdx.x] = ((const int*)row)[2];
  atomicMax_system(&x[3], 7);
  if (threadIdx.x == 0) atomicCAS_block(&x[4], 0, 9);
}
struct Owner {  // of memory, which neither a copy's constructor nor its destructor touches when a kernel is launched
  int* x;
  Owner() { cudaMalloc(&x, 4); }
  Owner(const Owner&) : x(nullptr) {}
  ~Owner() { cudaFree(x); }
};
__global__ void own(Owner owner, int value) {
  if (threadIdx.x == 0) *owner.x = value;
  owner.x = nullptr;
}
#define CHECK(CONDITION) if (!(CONDITION)) return printf("line %d: %s\n", __LINE__, #CONDITION), 1
int main() {
  CHECK(Simulation().steps == 3 && alignof(Aligned<short2>::Type) == 16);
  // Lanes: -128 - 1 and 0 - 1 of 8 bits; -32768 of 16 bits; the mean of -2 and -1, away from zero.
  CHECK(__vsubss4(0x80, 1) == 0x80 && __vsub4(0x80, 0x101) == 0xFF7F && __vabsss2(0x8000) == 0x7FFF);
  CHECK(__vcmplts2(0x1234ABA5, 0x1234ABA6) == 0xFFFF && __vavgs2(0xFFFE, 0xFFFF) == 0xFFFE);
  CHECK(__vsadu4(0x01020304, 0x04030201) == 8 && __dp2a_hi(0x00020001, 0x04030201, 5) == 5 + 3 + 2 * 4);
  CHECK(__viaddmax_s16x2_relu(0x80007FFF, 0xFFFF0001, 0x00058001) == 0x7FFF0000);
  CHECK(__fadd_rd(1, 1e-20f) == 1 && __fadd_ru(1, 1e-20f) > 1 && __fadd_rz(-1, 1e-20f) > -1);
  CHECK(__double2float_rd(-1e-60) < 0 && __ull2float_rz(~0ull) < 0x1p64f && __ddiv_ru(1, 3) > __ddiv_rd(1, 3));
  CHECK(__double2int_rd(-1.5) == -2 && __double2ll_rn(NAN) == LLONG_MIN && __float2ll_rn(2.5f) == 2);
  CHECK(__hiloint2double(__double2hiint(2.7), __double2loint(2.7)) == 2.7);
  CHECK(__half_as_ushort(__float2half_rz(65519)) == 0x7BFF && __half_as_ushort(__float2half_ru(65505)) == 0x7C00);
  CHECK(__half_as_ushort(__float2half_rd(-1e-9f)) == 0x8001 && __bfloat162int_ru(__float2bfloat16(1.5f)) == 2);
  CHECK(__hgt2_mask(__floats2half2_rn(2, NAN), __floats2half2_rn(1, 1)) == 0xFFFF && __hneu(__half(NAN), __half(1)));
  CHECK((float)__hfma_sat(__half(2), __half(3), __half(-5.5f)) == 0.5f);
  CHECK(__nv_cvt_float_to_fp8(500, __NV_SATFINITE, __NV_E4M3) == 0x7E);
  CHECK(__nv_cvt_float_to_fp8(500, __NV_NOSAT, __NV_E4M3) == 0x7F);
  int *x, got[32];
  cudaMalloc(&x, 128);
  sums(x, 4, Simulation().steps);
  cudaMemcpy(got, x, 128, cudaMemcpyDeviceToHost);
  CHECK(got[31] == 14);
  cudaPitchedPtr memory;
  const cudaExtent size = make_cudaExtent(12, 2, 32);
  CHECK(!cudaMalloc3D(&memory, size));
  int numbers[32][2][3];
  for (int i = 0; i < 192; ++i) (&numbers[0][0][0])[i] = i;
  cudaMemcpy3DParms copy = {0};
  copy.srcPtr = make_cudaPitchedPtr(numbers, 12, 12, 2);
  copy.dstPtr = memory;
  copy.extent = size;
  copy.kind = cudaMemcpyHostToDevice;
  CHECK(!cudaMemcpy3D(&copy));
  layers<<<1, 32>>>(memory, x);
  cudaMemcpy(got, x, 128, cudaMemcpyDeviceToHost);
  CHECK(got[31] == 31 * 6 + 5 && got[3] == 3 * 6 + 5 && got[4] == 4 * 6 + 5);
  Owner owner;
  own<<<1, 32>>>(owner, 5);
  cudaMemcpy(got, owner.x, 4, cudaMemcpyDeviceToHost);
  CHECK(got[0] == 5);
  int calls = 0;
  cudaLaunchHostFunc(0, [](void* data) { ++*(int*)data; }, &calls);
  cudaStreamAddCallback(0, [](cudaStream_t, cudaError_t, void* data) { ++*(int*)data; }, &calls, 0);
  CHECK(calls == 2);
  cudaFree(x);
  cudaFree(memory.ptr);
}
"""


def test_a_source_in_c(tried, tmp_path):
    """It is C, as nvcc has it: names of C++ are no words there, its functions have C's names, and one without a return
    is no mistake. An asm of the host's stands beside a kernel's."""
    (tmp_path / "half.c").write_text("int halved(int new) { return new / 2; }\nint nothing(int x) { x = x + 1; }\n")
    host_asm = 'asm volatile("rdtsc" : "=a"(low), "=d"(high));' if platform.machine() == "x86_64" else ""
    result = tried('''#include <sm_61_intrinsics.h>
extern "C" { int halved(int); int nothing(int); }
__global__ void f(int* x) { asm("mov.u32 %0, 7;" : "=r"(x[0])); }
int main() {
  unsigned low = 0, high = 0;
  HOST_ASM
  int* x;
  cudaMallocManaged(&x, 4);
  f<<<1, 1>>>(x);
  cudaEvent_t event;
  if (cudaDeviceSynchronize() || cudaEventCreate(&event, cudaEventDisableTiming)) return 1;
  nothing(1);
  const int rc = halved(x[0]) - 3;
  cudaFree(x);
  return rc;
}
'''.replace("HOST_ASM", host_asm), tmp_path / "half.c")
    assert result.rc == 0, result.stdout + result.stderr


def test_functions_of_other_programs(tried):
    result = tried(FUNCTIONS)
    assert result.rc == 0, result.stdout + result.stderr


# What older programs count on: the threads of a warp go on together between their accesses to volatile memory, and a
# barrier does not wait for threads that have ended.
OLD_WAYS = """
__device__ void warp_sum(volatile int* s, int t) {
  s[t] += s[t + 32];
  s[t] += s[t + 16];
  s[t] += s[t + 8];
  s[t] += s[t + 4];
  s[t] += s[t + 2];
  s[t] += s[t + 1];
}
__global__ void sum(const int* x, int* y) {
  __shared__ int s[64];
  s[threadIdx.x] = x[64 * blockIdx.x + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32) warp_sum(s, threadIdx.x);
  if (threadIdx.x == 0) y[blockIdx.x] = s[0];
}
__global__ void exchange(int* x, int n) {
  __shared__ int s[64];
  const int i = 64 * blockIdx.x + threadIdx.x;
  if (i >= n) return;
  s[threadIdx.x] = x[i];
  __syncthreads();
  x[i] = s[threadIdx.x ^ 1];
}
int main() {
  int *x, *y;
  cudaMallocManaged(&x, 512);
  cudaMallocManaged(&y, 8);
  for (int i = 0; i < 128; ++i) x[i] = i * i;
  sum<<<2, 64>>>(x, y);
  exchange<<<2, 64>>>(x, 100);
  if (cudaDeviceSynchronize() || y[0] != 85344 || y[1] != 605536 || x[98] != 99 * 99 || x[99] != 98 * 98) return 9;
  cudaFree(x);
  cudaFree(y);
}
"""


def test_what_older_programs_count_on(tried):
    result = tried(OLD_WAYS)
    assert re.search(r"A barrier in exchange, block \(1,0,0\), to which a thread does not come, since it has ended. .*\n"
                     r"    thread \(0,0,0\) waits in __syncthreads\(\) in line 22\n.*\n    thread \(36,0,0\) has exited",
                     result.stdout), result.stdout + result.stderr
    assert result.rc == 1 and "exit code" not in result.stdout


TILES = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
template <unsigned kSize> __global__ void sums(int* x, float* y) {
  __shared__ cg::block_tile_memory<256> memory;
  auto block = cg::this_thread_block(memory);
  auto tile = cg::tiled_partition<kSize>(block);
  __shared__ int of_tile[256];
  const int i = block.thread_rank();
  of_tile[i] = i;
  tile.sync();
  const int other = of_tile[tile.meta_group_rank() * kSize + kSize - 1 - tile.thread_rank()];
  x[i] = cg::reduce(tile, i, cg::plus<int>()) + tile.shfl(i, 33) + 1000 * tile.any(i == 200) + 2000 * tile.all(i < 100);
  y[i] = cg::reduce(tile, (float)other, cg::greater<float>());
  const int rank = i % kSize, until = cg::inclusive_scan(tile, rank), before = cg::exclusive_scan(tile, rank + 1);
  const bool most = cg::inclusive_scan(tile, kSize - rank, cg::greater<int>()) == kSize;
  if (until != rank * (rank + 1) / 2 || before != until || !most) x[i] = -1;
}
__global__ void part_of_a_warp(int* x) {
  x[threadIdx.x] = cg::reduce(cg::tiled_partition<32>(cg::this_thread_block()), (int)threadIdx.x, cg::plus<int>());
}
__global__ void without(int* x) {
  auto tile = cg::tiled_partition<64>(cg::this_thread_block());
  x[threadIdx.x] = cg::reduce(tile, 1, cg::plus<int>());
}
__global__ void waits(int* x) {
  auto tile = cg::tiled_partition<64>(cg::this_thread_block());
  if (threadIdx.x != 70) tile.sync();
}
template <unsigned kSize> int wrong(int* x, float* y) {
  sums<kSize><<<1, 256>>>(x, y);
  int xs[256], wrong = 0;
  float ys[256];
  cudaMemcpy(xs, x, 1024, cudaMemcpyDeviceToHost);
  cudaMemcpy(ys, y, 1024, cudaMemcpyDeviceToHost);
  for (int i = 0; i < 256; ++i) {
    const int first = i / kSize * kSize, last = first + kSize - 1;
    const int sum = (first + last) * (int)kSize / 2;
    wrong += xs[i] != sum + first + 33 + 1000 * (first <= 200 && 200 <= last) + 2000 * (last < 100) || ys[i] != last;
  }
  return wrong;
}
int main(int count, char** words) {
  int* x;
  float* y;
  cudaMalloc(&x, 1024);
  cudaMalloc(&y, 1024);
  if (count > 1 && atoi(words[1]) == 1) without<<<1, 128>>>(x);
  if (count > 1 && atoi(words[1]) == 2) waits<<<1, 128>>>(x);
  if (count > 1 && atoi(words[1]) == 3) waits<<<1, 96>>>(x);
  int bad = wrong<64>(x, y) + wrong<128>(x, y) + wrong<256>(x, y), part[20];
  part_of_a_warp<<<1, 20>>>(x);
  cudaMemcpy(part, x, 80, cudaMemcpyDeviceToHost);
  for (int each : part) bad += each != 190;
  printf("%d wrong\\n", bad);
  cudaFree(x);
  cudaFree(y);
  return bad;
}
"""


def test_tiles_of_several_warps(tried):
    result = tried(TILES)
    assert "\n0 wrong" in result.stdout and result.rc == 0, result.stdout
    result = tried(TILES, "--", "1")
    assert "needs memory to exchange values" in result.stdout and result.rc == 1, result.stdout
    result = tried(TILES, "--", "2")
    assert "to which 63 of 64 threads have come" in result.stdout and result.rc == 1, result.stdout
    result = tried(TILES, "--", "3")
    assert "a tile has 64 threads, which the block of 96 does not fill" in result.stdout, result.stdout


@pytest.mark.extensive
def test_new_and_free_are_no_stray_access(tried):
    result = tried(program(WRITE, "f<<<1, 32>>>(d); free(new int[3])"), options=())
    assert result.rc == 0 and "No stray access" in result.stdout, result.stdout + result.stderr


@pytest.mark.extensive
def test_tiles_of_several_warps_race_with_nobody(tried):
    """Nor do they miss a race."""
    result = tried(TILES, options=("--race",))
    assert result.rc == 0 and "No race" in result.stdout and "stray access" not in result.stdout, result.stdout
    result = tried(TILES.replace("  tile.sync();\n  const", "  const"), options=("--race",))
    assert result.rc == 1 and "race" in result.stdout and "No race" not in result.stdout, result.stdout


LIBRARY = """#pragma once
#include <cuda/std/utility>
#ifdef __CUDACC__
#define LIBRARY_GLOBAL __global__ static
#else
#define LIBRARY_GLOBAL static
#endif
#define LIBRARY_UNROLL #pragma unroll
namespace library {
template <class T, int kFactor = 3>
LIBRARY_GLOBAL
#ifdef __CUDACC__
// The macro is what a library calls a kernel by.
__launch_bounds__(64, 1)
#endif
void scale(T* x, int n) {
  LIBRARY_UNROLL
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] *= kFactor;
}
}  // namespace library
"""
BY_ADDRESS = """
#include <cassert>
#include <cuComplex.h>
#include <cudaTypedefs.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdint>
#include <library.h>
struct Two { double a, b; };
__global__ void add(const float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] += x[threadIdx.x]; }
__global__ void add(int* y) { y[threadIdx.x] += 100; }
__global__ void copy(const Two* x, Two* y) { *y = *x; }  // 16 bytes, aligned to 8
__global__ void address_of_nothing(unsigned* x) { *x = __cvta_generic_to_shared((void*)nullptr) % 1024; }
int main() {
  float *x, *y;
  cudaMallocManaged(&x, 4 * 64), cudaMallocManaged(&y, 4 * 64);
  for (int i = 0; i < 64; ++i) x[i] = i, y[i] = 1;
  int n = 64;
  void* scaled[] = {&x, &n};
  cudaLaunchConfig_t config = {1, 64};
  void const* kernel = (void const*)library::scale<float>;
  assert(cudaLaunchKernelExC(&config, kernel, scaled) == cudaSuccess);
  void* added[] = {&x, &y, &n};
  void (*sum)(const float*, float*, int) = add;
  kernel = reinterpret_cast<const void*>(sum);
  assert(cudaLaunchKernel(kernel, dim3(1), dim3(64), added, 0, 0) == cudaSuccess);
  cudaDeviceSynchronize();
  for (int i = 0; i < 64; ++i) assert(x[i] == 3 * i && y[i] == 1 + 3 * i);
  assert(cudaLaunchKernel((const void*)&n, dim3(1), dim3(64), added, 0, 0) == cudaErrorInvalidDeviceFunction);
  config.blockDim = 65;  // more than the launch bounds
  kernel = (void const*)library::scale<float>;
  assert(cudaLaunchKernelExC(&config, kernel, scaled) != cudaSuccess);
  cudaGetLastError();
  copy<<<1, 1>>>((Two*)((double*)x + 1), (Two*)((double*)y + 5));
  unsigned* nothing = (unsigned*)y;
  address_of_nothing<<<1, 1>>>(nothing);
  assert(cudaDeviceSynchronize() == cudaSuccess && *nothing == 0 && y[10] == x[2] && y[13] == x[5]);
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
  assert(reinterpret_cast<PFN_cuTensorMapEncodeTiled>(encode) == cuTensorMapEncodeTiled && found == 0);
  int a = 1, b = 2;
  cuda::std::swap(a, b);
  const cuFloatComplex z = cuCmulf(make_cuFloatComplex(1, 2), make_cuFloatComplex(3, 4));
  const cuDoubleComplex q = cuCdiv(make_cuDoubleComplex(-5, 10), make_cuDoubleComplex(3, 4));
  assert(a == 2 && z.x == -5 && z.y == 10 && q.x == 1 && q.y == 2);
  for (int bits = 0; bits < 256; ++bits) {  // all numbers, those halfway to the next, and what is too large
    __nv_fp8_e5m2 number, next;
    number.__x = bits, next.__x = bits + 1;
    const float value(number);
    if ((bits & 0x7F) >= 0x7B) continue;
    assert(__nv_fp8_e5m2(value).__x == bits);
    assert(__nv_fp8_e5m2((value + float(next)) / 2).__x == bits + bits % 2);
  }
  assert(float(__nv_fp8_e5m2(1e9f)) == 57344 && float(__nv_fp8_e5m2(-0x1p-16f)) == -0x1p-16f);
  assert(float(__float2half_rz(1.9999f)) == 1.9990234375f && float(__float2half_rz(-1.9999f)) == -1.9990234375f);
  assert(float(__float2half_rz(65535.0f)) == 65504 && float(__float2half_rz(0.5f)) == 0.5f);
  cudaFree(x), cudaFree(y);
}
"""


def test_what_headers_of_libraries_ask_for(tried, tmp_path):
    """Kernels behind a macro and launched by their address, and headers and functions that only libraries use."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/library.h").write_text(LIBRARY)
    result = tried(BY_ADDRESS, "-I", tmp_path / "lib")
    assert re.search(r"^scale<float> +1 +64 +1 +2 ", result.stdout, re.MULTILINE), result.stdout + result.stderr
    assert re.search(r"^add +1 +64 +1 +4 ", result.stdout, re.MULTILINE), result.stdout
    assert "A mistake" not in result.stdout and result.rc == 0, result.stdout


def needs(header):
    """Skips where the CUDA toolkit has not this header, or a version of thrust and cub that nobody has tried, or is not
    installed. Returns the folder that has the header."""
    folders = [folder for include in installed_toolkits() for folder in (include, include / "cccl")]
    folder = next((folder for folder in folders if (folder / header).is_file()), None)
    if not folder:
        pytest.skip(f"the CUDA toolkit's {header} is not installed")
    version = cccl_version(folder)
    if header.startswith(("thrust", "cub")) and not CCCL_TRIED[0] <= version <= CCCL_TRIED[1]:
        pytest.skip("thrust and cub {}.{} were not tried".format(*version))
    return folder


RANDOM = """
#include <curand_kernel.h>
__global__ void draw(float* x) {
  curandState state;
  curand_init(1234, threadIdx.x, 0, &state);
  curandStatePhilox4_32_10_t counter;
  curand_init(7, threadIdx.x, 0, &counter);
  x[threadIdx.x] = curand_uniform(&state);
  x[threadIdx.x + 32] = curand_normal(&state);
  x[threadIdx.x + 64] = curand_normal4(&counter).w;
}
"""


def test_random_numbers_are_those_of_a_gpu(tried):
    """Through the toolkit's headers. What an H100 gives: the uniform number bit by bit, the normal ones but for rounding."""
    needs("curand_kernel.h")
    shown = 'float h[96]; cudaMemcpy(h, d, 384, cudaMemcpyDeviceToHost); printf("%.9g %.9g %.9g|", h[1], h[33], h[65])'
    result = tried(program(RANDOM, f"draw<<<1, 32>>>(d); {shown}"))
    assert result.rc == 0, result.stdout + result.stderr
    uniform, normal, other = map(float, re.search(r"^(\S+) (\S+) (\S+)\|", result.stdout, re.MULTILINE).groups())
    assert uniform == 0.820180893
    assert normal == pytest.approx(-0.0288760383, abs=1e-6) and other == pytest.approx(0.236220852, abs=1e-6)


CHECK = """
#include <cstdio>
int wrong = 0;
#define CHECK(x) (x) ? 0 : (++wrong, printf("wrong: %s\\n", #x))
"""
THRUST = CHECK + """
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/host_vector.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/zip_iterator.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/transform.h>
#include <thrust/tuple.h>
__global__ void twice(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
__global__ void sorted_by_one_thread(int* x) { thrust::sort(thrust::seq, x, x + 8); }
__global__ void sorted_by_many(int* x) {
  int* const mine = x + 10 * threadIdx.x;
  thrust::sort(thrust::device, mine, mine + 10);
  mine[0] = thrust::reduce(thrust::device, mine, mine + 10);
}
int main(int count, char**) {
  const int n = 100;
  thrust::device_vector<float> x(n), y(n, 1.0f);
  thrust::sequence(x.begin(), x.end());
  float* const raw = thrust::raw_pointer_cast(x.data());
  twice<<<1, 128>>>(raw, n);
  const float a = 3;
  thrust::transform(x.begin(), x.end(), y.begin(), y.begin(), [=] __host__ __device__(float u, float v) {
    return a * u + v;
  });
  CHECK(y[2] == 13);
  y[2] = 5;
  thrust::host_vector<float> h = y;
  CHECK(h[2] == 5 && h[99] == 3 * 198 + 1);

  thrust::device_vector<int> keys(n), values(n);
  thrust::transform(thrust::counting_iterator<int>(0), thrust::counting_iterator<int>(n), keys.begin(),
                    [] __device__(int i) { return i * 37 % 101; });
  thrust::sequence(values.begin(), values.end());
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  thrust::sort_by_key(thrust::cuda::par.on(stream), keys.begin(), keys.end(), values.begin());
  CHECK(keys[0] == 0 && keys[50] < keys[51] && values[1] * 37 % 101 == keys[1]);
  thrust::exclusive_scan(values.begin(), values.end(), keys.begin());
  CHECK(keys[99] + values[99] == 4950);
  auto both = thrust::make_zip_iterator(thrust::make_tuple(x.begin(), y.begin()));
  thrust::for_each(both, both + n, [] __device__(auto t) { thrust::get<1>(t) = thrust::get<0>(t); });
  CHECK(y[50] == 100);
  const int down[] = {8, 7, 6, 5, 4, 3, 2, 1};
  thrust::device_vector<int> eight(down, down + 8);
  sorted_by_one_thread<<<1, 1>>>(thrust::raw_pointer_cast(eight.data()));
  CHECK(eight[0] == 1 && eight[7] == 8);
  thrust::device_vector<int> tens(1280);
  thrust::transform(thrust::counting_iterator<int>(0), thrust::counting_iterator<int>(1280), tens.begin(),
                    [] __device__(int i) { return i * 7 % 10; });
  sorted_by_many<<<1, 128>>>(thrust::raw_pointer_cast(tens.data()));
  CHECK(tens[0] == 45 && tens[1] == 1 && tens[1270] == 45 && tens[1279] == 9);

  // One after the other, the ones would all be lost.
  float* more;
  cudaMalloc(&more, 1001 * sizeof(float));
  thrust::fill(thrust::device, more, more + 1001, 1.0f);
  thrust::device_pointer_cast(more)[0] = 1 << 24;
  CHECK(thrust::reduce(thrust::device, more, more + 1001) > (1 << 24) + 900);
  if (count > 1) CHECK(more[1] == 1);
  cudaFree(more);
  cudaStreamDestroy(stream);
  return wrong;
}
"""


@pytest.mark.extensive
def test_thrust(tried):
    """What its algorithms do to memory of the device is right, and a kernel's before and after it; the host by itself
    may not read that memory."""
    needs("thrust/version.h")
    result = tried(THRUST)
    assert result.rc == 0 and "wrong" not in result.stdout, result.stdout + result.stderr
    assert re.search(r"^twice +1 +128 +1 +4 +13 +4 +13 ", result.stdout, re.MULTILINE), result.stdout
    assert "Never freed" not in result.stdout
    result = tried(THRUST, "--", "1")
    assert "the host reads device memory" in result.stdout and result.rc == 1, result.stdout


CUB_IN_KERNELS = CHECK + """
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_reduce.cuh>
#ifdef WITHOUT_BARRIER
#define BARRIER
#else
#define BARRIER __syncthreads()
#endif
constexpr int kThreads = 64;
__global__ void parts(const int* x, int* sums, int* sorted, int* scanned) {
  using Sort = cub::BlockRadixSort<int, kThreads, 2>;
  using Scan = cub::BlockScan<int, kThreads>;
  using Reduce = cub::BlockReduce<int, kThreads>;
  using Warp = cub::WarpReduce<int>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
    typename Warp::TempStorage warp[kThreads / 32];
  } shared;
  const int t = threadIdx.x;
  int mine[2] = {x[2 * t], x[2 * t + 1]};
  Sort(shared.sort).Sort(mine);
  BARRIER;
  sorted[2 * t] = mine[0];
  sorted[2 * t + 1] = mine[1];
  Scan(shared.scan).InclusiveSum(mine, mine);
  __syncthreads();
  scanned[2 * t] = mine[0];
  scanned[2 * t + 1] = mine[1];
  const int sum = Reduce(shared.reduce).Sum(x[t]);
  __syncthreads();
  const int most = Warp(shared.warp[t / 32]).Reduce(x[t], [] __device__(int a, int b) { return a > b ? a : b; });
  if (t == 0) sums[0] = sum;
  if (t % 32 == 0) sums[1 + t / 32] = most;
}
int main() {
  constexpr int n = 2 * kThreads;
  int *x, *sums, *sorted, *scanned;
  cudaMallocManaged(&x, n * sizeof(int));
  cudaMallocManaged(&sums, 3 * sizeof(int));
  cudaMallocManaged(&sorted, n * sizeof(int));
  cudaMallocManaged(&scanned, n * sizeof(int));
  int sum = 0, most = 0;
  for (int i = 0; i < n; ++i) x[i] = i * 37 % 131 - 60;
  for (int i = 0; i < kThreads; ++i) sum += x[i];
  for (int i = 32; i < 64; ++i) most = x[i] > most ? x[i] : most;
  parts<<<1, kThreads>>>(x, sums, sorted, scanned);
  cudaDeviceSynchronize();
  CHECK(sums[0] == sum && sums[2] == most);
  for (int i = 1, running = sorted[0]; i < n; ++i) {
    running += sorted[i];
    CHECK(sorted[i - 1] <= sorted[i] && scanned[i] == running);
  }
  cudaFree(x);
  cudaFree(sums);
  cudaFree(sorted);
  cudaFree(scanned);
  return wrong;
}
"""


def test_cub_in_kernels(tried):
    needs("cub/version.cuh")
    result = tried(CUB_IN_KERNELS)
    assert result.rc == 0 and "wrong" not in result.stdout, result.stdout + result.stderr
    # Four loads and eight stores of two elements each, and three loads of one; what cub does in shared memory counts.
    row = re.search(r"^parts +1 +64 +1 +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) ", result.stdout, re.MULTILINE)
    assert row and row[1] == "8" and row[3] == "11" and int(row[5]) > 100, result.stdout
    assert "cub/" not in result.stdout, "lines of the library that a reader cannot change"


@pytest.mark.extensive
def test_races_in_cub(tried):
    """Its storage is used again without a barrier. With the barrier there is no race."""
    needs("cub/version.cuh")
    race = tried(CUB_IN_KERNELS, options=("--race", "-D", "WITHOUT_BARRIER"))
    assert "A race: the same memory is used twice" in race.stdout and race.rc == 1, race.stdout + race.stderr
    right = tried(CUB_IN_KERNELS, options=("--race",))
    assert "No race" in right.stdout and right.rc == 0, right.stdout + right.stderr


@pytest.mark.extensive
@pytest.mark.slow
def test_no_races_in_thrust(tried):
    needs("thrust/version.h")
    result = tried(THRUST, options=())
    assert "No race" in result.stdout and "No stray access" in result.stdout and result.rc == 0, result.stdout


@pytest.mark.extensive
@pytest.mark.slow
def test_a_copy_of_cub(tried):
    """A folder that -I names, where the backend has headers of its own in the place of some."""
    result = tried(CUB_IN_KERNELS, "-I", needs("cub/version.cuh"))
    assert result.rc == 0 and "wrong" not in result.stdout, result.stdout + result.stderr


def test_a_thrust_that_was_not_tried(tried, tmp_path):
    """One sentence, whatever would not compile in it."""
    thrust = tmp_path / "other/thrust"
    thrust.mkdir(parents=True)
    (thrust / "sort.h").write_text("#error\n")
    for version, said in ("#define THRUST_VERSION 101200 // 1.12.0", "1.12"), ("", "of a time when they did not say .*"):
        (thrust / "version.h").write_text(version)
        result = tried("\n#include <thrust/sort.h>\nint main() {}\n", "-I", tmp_path / "other")
        assert re.fullmatch(rf"program.cu:2: \S+/other has thrust and cub {said}; ./try takes 1.15 to 3.4\. .*\n",
                            result.stderr), result.stderr
        assert result.rc == 1


def test_folders_of_headers(tried, tmp_path):
    """A folder cuda/ of the program's own, and the toolkit's folder, which nvcc does not need to be told."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/own.cuh").write_text(WRITE + "\ninline void go(float* d) { f<<<1, 32>>>(d); }\n")
    (tmp_path / "toolkit/crt").mkdir(parents=True)
    (tmp_path / "toolkit/cuda_runtime.h").write_text("#error\n")
    result = tried(program('#include <cuda_runtime.h>\n#include "cuda/own.cuh"', "go(d)"), "-I", tmp_path / "toolkit")
    assert re.search(r"^f +1 +32 +1 ", result.stdout, re.MULTILINE) and result.rc == 0, result.stdout + result.stderr


SHUFFLES = """
#include <cstdio>
#include <cuda/__warp/warp_shuffle.h>
using namespace cuda::device;
struct Three {
  int a;
  double b;
  char c;
};
__global__ void shuffles(int* wrong) {
  const int t = threadIdx.x;
  Three mine{t, 2.0 * t, char('a' + t)};
  const auto up = warp_shuffle_up<8>(mine, 3);
  const int from = t % 8 < 3 ? t : t - 3;
  wrong[t] = up.pred != (t % 8 >= 3) || up.data.a != from || up.data.b != 2 * from || up.data.c != 'a' + from;
  const Three fifth = warp_shuffle_idx(mine, 5);
  wrong[t] += fifth.a != 5 || fifth.c != 'f';
  const int several[3] = {t, t + 100, t + 200};
  const auto down = warp_shuffle_down<16>(several, 1);
  const bool last = t % 16 == 15;
  wrong[t] += down.pred == last || down.data[0] != t + !last || down.data[2] != t + 200 + !last;
  const int neighbor = warp_shuffle_xor(t, 1, 0xffffffff);
  wrong[t] += neighbor != (t ^ 1);
  const auto other = warp_shuffle_xor(long(t), 6, cuda::std::integral_constant<int, 4>());
  const int source = t ^ 6;
  wrong[t] += other.pred != (source / 4 <= t / 4) || other.data != (source / 4 <= t / 4 ? source : t);
}
int main() {
  int* wrong;
  cudaMallocManaged(&wrong, 128);
  shuffles<<<1, 32>>>(wrong);
  cudaDeviceSynchronize();
  int sum = 0;
  for (int t = 0; t < 32; ++t) sum += wrong[t];
  cudaFree(wrong);
  return sum;
}
"""


def test_shuffles_of_libcudacxx(tried):
    """cuda::device::warp_shuffle_*, which cub uses since CCCL 3.2: what a lane gets, and whether its source is there."""
    result = tried(SHUFFLES)
    assert result.rc == 0 and "A mistake" not in result.stdout, result.stdout + result.stderr


CUB_OF_DEVICE = CHECK + """
#include <cub/cub.cuh>
template <class T>
T read(const T* x, int i) {
  T value;
  cudaMemcpy(&value, x + i, sizeof(T), cudaMemcpyDeviceToHost);
  return value;
}
template <class Function>
void in_two_calls(Function function) {
  void* storage = nullptr;
  size_t bytes = 0;
  CHECK(function(storage, bytes) == cudaSuccess && bytes > 0);
  cudaMalloc(&storage, bytes);
  size_t too_few = 1;
  CHECK(function(storage, too_few) == cudaErrorInvalidValue);
  CHECK(function(storage, bytes) == cudaSuccess);
  cudaFree(storage);
}
__global__ void fill(float* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = i * 37 % 101 - 50, y[i] = i;
}
struct Small {
  __device__ bool operator()(int i) const { return i < 10; }
};
int main() {
  const int n = 1000;
  float *x, *sorted, *result;
  int *y, *with, *number;
  cudaMalloc(&x, n * sizeof(float));
  cudaMalloc(&sorted, n * sizeof(float));
  cudaMalloc(&result, sizeof(float));
  cudaMalloc(&y, n * sizeof(int));
  cudaMalloc(&with, n * sizeof(int));
  cudaMalloc(&number, 3 * sizeof(int));
  fill<<<4, 256>>>(x, y, n);
  using namespace cub;
  in_two_calls([&](void* s, size_t& b) { return DeviceReduce::Min(s, b, x, result, n); });
  CHECK(read(result, 0) == -50);
  in_two_calls([&](void* s, size_t& b) { return DeviceReduce::Sum(s, b, y, number, n); });
  CHECK(read(number, 0) == 499500);
  in_two_calls([&](void* s, size_t& b) { return DeviceRadixSort::SortPairsDescending(s, b, x, sorted, y, with, n); });
  CHECK(read(sorted, 0) == 50 && read(sorted, n - 1) == -50 && read(x, read(with, 500)) == read(sorted, 500));
  in_two_calls([&](void* s, size_t& b) { return DeviceScan::ExclusiveSum(s, b, y, with, n); });
  CHECK(read(with, 0) == 0 && read(with, 999) == 498501);
  DoubleBuffer<int> keys(y, with);  // 0 to 999, and then the other way around
  in_two_calls([&](void* s, size_t& b) { return DeviceRadixSort::SortKeysDescending(s, b, keys, n); });
  CHECK(keys.Current() == with && read(with, 0) == 999 && read(with, 999) == 0);
  const int ends[] = {0, 10, n};
  cudaMemcpy(number, ends, sizeof ends, cudaMemcpyHostToDevice);
  in_two_calls([&](void* s, size_t& b) { return DeviceSegmentedSort::SortKeys(s, b, with, y, n, 2, number, number + 1); });
  CHECK(read(y, 0) == 990 && read(y, 9) == 999 && read(y, 10) == 0 && read(y, 999) == 989);
  in_two_calls([&](void* s, size_t& b) { return DeviceRadixSort::SortKeys(s, b, with, y, n); });
  in_two_calls([&](void* s, size_t& b) { return DeviceHistogram::HistogramEven(s, b, y, with, 11, 0, 500, n); });
  CHECK(read(with, 0) == 50 && read(with, 9) == 50);
  in_two_calls([&](void* s, size_t& b) { return DeviceSelect::If(s, b, y, with, number, n, Small()); });
  CHECK(read(number, 0) == 10 && read(with, 9) == 9);
  for (void* each : {(void*)x, (void*)sorted, (void*)result, (void*)y, (void*)with, (void*)number}) cudaFree(each);
  return wrong;
}
"""


@pytest.mark.extensive
def test_cub_of_the_device(tried):
    needs("cub/version.cuh")
    result = tried(CUB_OF_DEVICE)
    assert result.rc == 0 and "wrong" not in result.stdout, result.stdout + result.stderr
    result = tried("#include <cub/device/device_adjacent_difference.cuh>\nint main() {}\n")
    assert "program.cu:1: the CPU backend does not have cub/device/device_adjacent_difference.cuh" in result.stderr


GRAPHS = """
#include <cstdio>
__global__ void add(float* x, float value) { x[threadIdx.x] += value; }
template <class T> __global__ void sum(const T* x, const T* y, T* z) { z[threadIdx.x] = x[threadIdx.x] + y[threadIdx.x]; }
void CUDART_CB note(void* data) { ++*static_cast<int*>(data); }
int main() {
  float *x, *y, *z, h[32], value = 5;
  int noted = 0;
  for (float** p : {&x, &y, &z}) cudaMalloc(p, sizeof h);
  cudaStream_t a, b; cudaStreamCreate(&a); cudaStreamCreate(&b);
  cudaEvent_t fork, join; cudaEventCreate(&fork); cudaEventCreate(&join);
  cudaMemset(x, 0, sizeof h);
  cudaGraph_t graph; cudaGraphExec_t exec;
  cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal);
  cudaMemsetAsync(y, 0, sizeof h, a);
  cudaEventRecord(fork, a);
  cudaStreamWaitEvent(b, fork, 0);
  for (int i = 1; i < 3; ++i) add<<<1, 32, 0, a>>>(x, i);
  add<<<1, 32, 0, b>>>(y, 2);
  cudaEventRecord(join, b);
  cudaStreamWaitEvent(a, join, 0);
  sum<<<1, 32, 0, a>>>(x, y, z);
  cudaMemcpyAsync(h, z, sizeof h, cudaMemcpyDeviceToHost, a);
  cudaLaunchHostFunc(a, note, &noted);
  cudaStreamEndCapture(a, &graph);
  size_t count; cudaGraphGetNodes(graph, NULL, &count);
  cudaGraphInstantiate(&exec, graph, NULL, NULL, 0);
  cudaGraphDestroy(graph);
  printf("captured %d %d|", (int)count, noted);
  for (int i = 0; i < 2; ++i) cudaGraphLaunch(exec, a);
  cudaStreamSynchronize(a);
  printf("launched %g %d|", h[31], noted);
  cudaGraphExecDestroy(exec);

  cudaGraph_t child; cudaGraphCreate(&graph, 0); cudaGraphCreate(&child, 0);
  cudaGraphNode_t copy, kernel, set, all, node;
  void* arguments[] = {&x, &value};
  cudaKernelNodeParams params = {0};
  params.func = (void*)add; params.gridDim = dim3(1); params.blockDim = dim3(32); params.kernelParams = arguments;
  cudaGraphAddMemcpyNode1D(&copy, graph, NULL, 0, h, x, sizeof h, cudaMemcpyDeviceToHost);
  cudaGraphAddKernelNode(&kernel, child, NULL, 0, &params);
  value = 7;
  cudaGraphAddChildGraphNode(&all, graph, NULL, 0, child);
  cudaMemsetParams fill = {x, 64, 0x40000000, 4, 16, 2};
  cudaGraphAddMemsetNode(&set, graph, NULL, 0, &fill);
  cudaGraphNode_t from[] = {set, all}, to[] = {all, copy};
  cudaGraphAddDependencies(graph, from, to, 2);
  cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphLaunch(exec, a);
  printf("by hand %g|", h[0]);
  fill.value = 0;
  cudaGraphExecMemsetNodeSetParams(exec, set, &fill);
  cudaGraphLaunch(exec, a);
  printf("set anew %g|", h[0]);
  cudaGraphAddDependencies(graph, &copy, &set, 1);
  cudaGraphExec_t none = NULL;
  printf("circle %s\\n", cudaGetErrorName(cudaGraphInstantiate(&none, graph, 0)));
  cudaGraphExecDestroy(exec); cudaGraphDestroy(graph); cudaGraphDestroy(child);

  cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal);
  printf("%s ", cudaGetErrorName(cudaMalloc(&y, 4)));
  printf("%s|", cudaGetErrorName(cudaStreamEndCapture(a, &graph)));
  cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal);
  cudaEventRecord(fork, a);
  cudaStreamWaitEvent(b, fork, 0);
  add<<<1, 32, 0, b>>>(x, 1);
  printf("%s|", cudaGetErrorName(cudaStreamEndCapture(a, &graph)));
  cudaGetLastError();
  cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal);
  add<<<1, 32>>>(x, 1);
  cudaStreamEndCapture(a, &graph);
  add<<<1, 32, 0, a>>>(x, 1);
}
"""


def test_graphs(tried):
    """Streams that are captured, graphs that are built, and what must not be done while a stream is captured."""
    result = tried(GRAPHS)
    first, second = re.search(r"^(captured .*)\n(.*)", result.stdout, re.MULTILINE).groups()
    assert first == "captured 7 0|launched 8 2|by hand 7|set anew 5|circle cudaErrorInvalidValue"
    assert second.startswith("cudaErrorStreamCaptureUnsupported cudaErrorStreamCaptureInvalidated|"
                             "cudaErrorStreamCaptureUnjoined|")
    assert "add, launched at program.cu:70 " in result.stdout and result.rc == 1, result.stdout
    assert "its stream, the default one, would wait for a stream that is captured" in result.stdout
    assert re.findall(r"^add +1 +32 +(\d+) ", result.stdout, re.MULTILINE) == ["4", "2", "2", "1"], result.stdout


def test_several_sources(tried, tmp_path):
    other = "__global__ void f(float* x) { x[0] = 1; }\nvoid launch(float* x) { f<<<1, 1>>>(x); }\n"
    result = tried(program("void launch(float*);", "launch(d)"), tmp_path / "other.cu", other_cu=other)
    assert result.rc == 0 and re.search(r"^f +1 +1 +1 ", result.stdout, re.MULTILINE), result.stdout + result.stderr


PHASES = """
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda/pipeline>
#include "common/try.h"
namespace cg = cooperative_groups;
constexpr int kWidth = 64;

/// Turns each piece of 64 elements around; of the last one, as many as it has.
template <class Copy>
__device__ void reverse(const float* x, float* y, int n, Copy copy) {
  __shared__ alignas(16) float s[kWidth];
  const int first = blockIdx.x * kWidth, count = min(kWidth, n - first), i = threadIdx.x;
  copy(s, x + first, sizeof(float) * count);
  if (i < count) y[first + i] = s[count - 1 - i];
}
__global__ void by_barrier(const float* x, float* y, int n) {
  __shared__ cuda::barrier<cuda::thread_scope_block> ready;
  auto block = cg::this_thread_block();
  if (block.thread_rank() == 0) init(&ready, block.size());
  block.sync();
  reverse(x, y, n, [&](float* to, const float* from, size_t bytes) {
    cuda::memcpy_async(block, to, from, bytes, ready);
    auto token = ready.arrive();
    WAIT(ready.wait(std::move(token)));
  });
}
__global__ void by_group(const float* x, float* y, int n) {
  auto block = cg::this_thread_block();
  reverse(x, y, n, [&](float* to, const float* from, size_t bytes) {
    cg::memcpy_async(block, to, from, bytes);
    cg::wait(block);
  });
}
/// The first warp copies, two pieces ahead of the others.
__global__ void by_pipeline(const float* x, float* y, int n) {
  __shared__ alignas(16) float s[2][kWidth];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto block = cg::this_thread_block();
  const bool copies = threadIdx.x < 32;
  auto pipe = cuda::make_pipeline(block, &state,
                                  copies ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer);
  auto warp = cg::tiled_partition<32>(block);
  for (int k = 0; k < (n + kWidth - 1) / kWidth; ++k) {
    const int count = min(kWidth, n - kWidth * k), i = threadIdx.x - 32;
    if (copies) {
      pipe.producer_acquire();
      cuda::memcpy_async(warp, s[k % 2], x + kWidth * k, sizeof(float) * count, pipe);
      pipe.producer_commit();
    } else {
      pipe.consumer_wait();
      if (i < count) y[kWidth * k + i] = s[k % 2][count - 1 - i];
      RELEASE(pipe.consumer_release());
    }
  }
}
void test(Try& t, int n) {
  auto x = t.input<float>(n);
  auto y = t.result<float>(n);
  const int blocks = (n + kWidth - 1) / kWidth;
  auto turned = [=](int i) { return x[2 * (i / kWidth * kWidth) + std::min(kWidth, n - i / kWidth * kWidth) - 1 - i]; };
  t.run("barrier", [=] { by_barrier<<<blocks, kWidth>>>(x, y, n); });
  t.expect(y, turned);
  t.run("group", [=] { by_group<<<blocks, kWidth>>>(x, y, n); });
  t.expect(y, turned);
  t.run("pipeline", [=] { by_pipeline<<<1, 32 + kWidth>>>(x, y, n); });
  t.expect(y, turned);
}
"""
WAITS = ("-D", "WAIT(x)=x", "-D", "RELEASE(x)=x")


def test_barriers_and_pipelines_of_libcu(tried):
    result = tried(PHASES, options=("--quick", *WAITS))
    assert result.stdout.count(": right") == 9 and result.rc == 0, result.stdout + result.stderr


def test_a_stage_that_nobody_gives_back(tried):
    result = tried(PHASES, options=("--quick", *WAITS[:2], "-D", "RELEASE(x)=if (i == 0) x"))
    assert re.search("A deadlock: .*\n.*waits in wait.. of a cuda::barrier .* 1 of 64 have arrived", result.stdout)


# With 1001 elements the kernel has another factor than is expected, with 999 it has no block for the last elements.
SCALE = """#include "common/try.h"
__global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
__global__ void count(const int* x, unsigned* seen, double* twice, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && x[i] > 0) atomicAdd(seen, 1u);
  if (i < n) twice[i] += twice[i];
}
void test(Try& t, int n) {
  auto x = t.input<float>(n);
  auto y = t.result<float>(n);
  t.run("scale", [=] { scale<<<n / 256 + (n != 999), 256>>>(x, y, n == 1001 ? 2.0f : 3.0f, n); });
  t.expect(y, [=](int i) { return 3 * x[i]; }, 1e-6);
  auto whole = t.input<int>(n);
  auto seen = t.result<unsigned>(1, 0);
  auto start = t.input<double>(n, [](int i) { return 0.5 * i; });
  auto twice = t.result(start);
  t.run("count", [=] { count<<<n / 256 + 1, 256>>>(whole, seen, twice, n); });
  t.expect(seen, [=](int) { int sum = 0; for (int i = 0; i < n; ++i) sum += whole[i] > 0; return sum; });
  t.expect(twice, [=](int i) { return 2 * start[i]; });
}
"""


@pytest.fixture(scope="module")
def scales(tmp_path_factory):
    return kept(tmp_path_factory, "scales", SCALE)


def test_a_file_without_main(scales):
    result = execute([*TRY, scales, "--quick"], timeout=300)
    assert result.stdout.count(": right") == 9 and result.rc == 0, result.stdout + result.stderr
    assert re.search("^n = 1000, scale: right$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("n, said", [
    (1001, "n = 1001, scale: wrong: element 0 is .*, and should be .* Wrong are 1001 of 1001 elements"),
    (999, "n = 999, scale: wrong: element 768 is .*nan.* 231 of 999 .*; 231 were never written"),
])
def test_a_wrong_result_of_a_file_without_main(scales, n, said):
    result = execute([*TRY, scales, "--quick", "--", n], timeout=300)
    assert re.search(said, result.stdout) and result.rc == 1, result.stdout + result.stderr


def test_runs_after_one_that_fails(tried):
    """A launch that fails, and one that is refused, cost their own runs."""
    kernels = """#include "common/try.h"
__global__ void stops(float* y) { assert(y == nullptr); }
__global__ void one(float* y) { y[threadIdx.x] = 1; }
void test(Try& t, int n) {
  auto y = t.result<float>(32);
  t.run("stops", [=] { stops<<<1, 32>>>(y); });
  t.expect(y, [](int) { return 1; });
  t.run("too large", [=] { one<<<1, 2048>>>(y); });
  t.expect(y, [](int) { return 1; });
  t.run("one", [=] { one<<<1, 32>>>(y); });
  t.expect(y, [](int) { return 1; });
}
"""
    result = tried(kernels)
    for said in ("stops: wrong: it failed: ", "too large: wrong: it failed: ", "one: right\n"):
        assert result.stdout.count(said) == 3, result.stdout + result.stderr
    assert result.stdout.count("A mistake in stops") == 1 and result.rc == 1, result.stdout


def test_program_of_the_notebook(tried):
    notebook = json.loads((ROOT / "notebooks" / "lessons.ipynb").read_text())
    (source,) = ("".join(cell["source"]) for cell in notebook["cells"] if cell["id"] == "own-program")
    result = tried(re.search('"""(.*?)"""', source, re.DOTALL)[1])
    assert result.stdout.count("scale: right") == 3 and result.rc == 0, result.stdout + result.stderr


def test_skeleton(tried, tmp_path):
    """What is printed can be pasted as it is, and runs."""
    kernel = "template <class T, int k>\n__global__ void f(T* out, const T* __restrict__ in, int n) {\n%s}\n"
    kernel %= "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) out[i] = in[i];\n"
    asked = tried(kernel)
    assert asked.rc == 2 and "has no main(), and no test()" in asked.stderr
    assert (tmp_path / "program.cu").read_text() == kernel
    result = tried(kernel + asked.stdout)
    assert result.stdout.count("f: right") == 3 and result.rc == 0, asked.stdout + result.stdout + result.stderr


REFUSALS = {
    "#include <thrust/nosuch.h>\nint main() {}\n":
        "program.cu:1: there is no thrust/nosuch.h. The CUDA toolkit's package cuda-cccl would install it; .* docs/cpu.md",
    "#include <cufft.h>\nint main() {}\n": "program.cu:1: the CPU backend does not have cufft. docs/cpu.md",
    "__global__ void g() {}\n__global__ void f() {\n  g<<<1, 1>>>();\n}\nint main() {}\n": "program.cu:3: .*dynamic para",
    "#if __CUDA_ARCH__ < 300\ntexture<float> of_old_ones;\n#endif\ntexture<float> t;\nint main() {}\n":
        "program.cu:4: .* textures",
    "int f() { return 1; }\n": "has no main",
    "float g(float x) { return x; }\n__global__ void f(float* x) { x[0] = g(1); }\nint main() {}\n":
        r"calls g\(\), which is a function of the host: it needs __device__.\n    program.cu:2: ",
    "#include <vector>\n__device__ int f() {\n  std::vector<int> v; return 1;\n}\nint main() {}\n":
        "f runs on the GPU, and uses std::vector, which only the host has.\n    program.cu:3: ",
    "__global__ void f() { throw 1; }\nint main() {}\n": "throws an exception",
    "int main() {\n  return nowhere;\n}\n": "does not compile: .*nowhere.*\n    program.cu, line 2: return nowhere;",
    "int main() { cudaNoSuch(); }\n": r"does not have cudaNoSuch \(docs/cpu.md",
    "#include \"nosuch.h\"\nint main() {}\n": "there is no nosuch.h",
    "#include \"nosuch.h\"\n__global__ void g() {}\n__global__ void f() {\n  g<<<1, 1>>>();\n}\nint main() {}\n":
        "there is no nosuch.h .*\n    program.cu, line 1",
    "__global__ int f(int* x) { return x[0]; }\nint main() { f<<<1, 1>>>(nullptr); }\n":
        "program.cu:1: a kernel returns void, and nothing else; nvcc refuses int, too",
    # nvcc 13.0 refuses these, or warns of them and reaches another variable.
    "int n = 3;\n__global__ void f(int* x) {\n  x[0] = 2 * n;\n}\nint main() {}\n":
        "f runs on the GPU, and uses n, which is a variable of the host: .*\n    program.cu:3: ",
    "const float w[2] = {1, 2};\n__global__ void f(float* x) { x[0] = w[threadIdx.x]; }\nint main() {}\n":
        "f runs on the GPU, and uses w, which is a variable of the host",
    "__constant__ float w[2];\nint main() {\n  w[1] = 2;\n}\n":
        r"main runs on the host, and writes w, which is the GPU's: cudaMemcpyToSymbol\(\) .*\n    program.cu:3: ",
    "__device__ int n;\nint main() { int mine = 1 + n; return mine; }\n":
        "main runs on the host, and reads n, which is the GPU's",
    "__constant__ int n;\n__global__ void f() { n = 2; }\nint main() {}\n":
        "f runs on the GPU, and writes n, which is __constant__",
    "__device__ int g() { return 1; }\nint main() { return g(); }\n":
        r"main runs on the host, and calls g\(\), which only the GPU",
    "int main() { int x = 0; atomicAdd(&x, 1); }\n":
        r"main runs on the host, and calls atomicAdd\(\), which only the GPU has",
    "int main() { return threadIdx.x; }\n": "main runs on the host, where there is no threadIdx",
    "__global__ void f(float* x) { atomicMax(x, 1.0f); }\nint main() {}\n":
        r"nvcc refuses atomicMax\(\) for float, too: CUDA has no such function\n    program.cu, line 1",
    "__global__ void f(size_t* x) { atomicAdd(x, 1); }\nint main() {}\n":
        r"nvcc refuses atomicAdd\(\) for (?:size_t|unsigned long), too",
    "__global__ void f(int* x) { x[0] = __shfl(x[0], 0); }\nint main() {}\n":
        r"nvcc refuses __shfl\(\), too, .* write __shfl_sync\(mask",
}


@pytest.mark.parametrize("source", REFUSALS)
def test_refusals(tried, source):
    result = tried(source)
    assert re.search(REFUSALS[source], result.stderr), result.stdout + result.stderr
    assert result.rc in (1, 2) and "Traceback" not in result.stderr


@pytest.mark.parametrize("words, said", [(["nosuch.cu"], "There is no file nosuch.cu"), ([str(ROOT)], "It is a folder"),
                                         ([str(ROOT / "README.md")], "no source of a CUDA program")])
def test_bad_command_lines(words, said):
    result = execute([*TRY, *words])
    assert result.rc == 2 and said in result.stderr


@pytest.mark.extensive
def test_openmp_is_no_race(tried):
    source = """#include <vector>
int main() {
  std::vector<float> v(1000);
  float sum = 0;
#pragma omp parallel for num_threads(3)
  for (int i = 0; i < 1000; ++i) v[i] = i;
#pragma omp parallel for num_threads(3) reduction(+ : sum)
  for (int i = 0; i < 1000; ++i) sum += v[i];
  return sum != 499500;
}
"""
    result = tried(source, options=())
    assert "No race" in result.stdout and result.rc == 0, result.stdout + result.stderr


@pytest.mark.extensive
def test_races_and_stray_accesses(tried):
    """The builds of the two sanitizers, whose backend takes half a minute each the first time. A copy that nobody waits
    for is a race, and without the mistake there is none."""
    race = tried(PHASES, "--", "64", options=("-D", "WAIT(x)=", *WAITS[2:]))
    assert "A race: the same memory is used twice" in race.stdout, race.stdout + race.stderr
    assert "No stray access" in race.stdout and race.rc == 1
    right = tried(PHASES, "--", "100", options=WAITS)
    assert "No race" in right.stdout and "No stray access" in right.stdout and right.rc == 0, right.stdout


# ---- Calls that fail, streams, fences, several devices -----------------------------------------------


ASKS = """#include <cstdio>
#include <cstdlib>
__global__ void wait(volatile int* flag) {
  while (*flag == 0) {}
}
__global__ void set(int* flag) { *flag = 1; }
int main(int, char** words) {
  int *d, *pinned, host[200] = {};
  cudaMalloc(&d, 400);
  cudaMallocHost(&pinned, 400);
  pinned[0] = 0;
  cudaStream_t a;
  switch (atoi(words[1])) {
    case 0: cudaMemcpy(host, d, 800, cudaMemcpyDeviceToHost); break;
    case 1: if (!host[0]) cudaMemcpy(host, d, 400, cudaMemcpyHostToDevice); break;
    case 2: cudaFree(host); break;
    case 3: for (int i = 0; i < 3; ++i) cudaSetDevice(7); break;
    case 4: cudaFree(d); cudaFree(d); d = nullptr; break;
    case 5:
      wait<<<1, 32>>>(pinned);
      *(volatile int*)pinned = 1;
      break;
    case 6:
      cudaMemset(d, 0, 400);
      cudaStreamCreate(&a);
      wait<<<1, 32, 0, a>>>(d);
      set<<<1, 1>>>(d);
      cudaStreamDestroy(a);
      break;
    default: {
      cudaPointerAttributes of;
      cudaPointerGetAttributes(&of, host);
      cudaDeviceEnablePeerAccess(0, 0);
      (void)cudaFree(host);
      if (cudaMemcpy(host, d, 800, cudaMemcpyDeviceToHost) != cudaSuccess) puts("as expected");
      cudaSetDevice(7);
      printf("%s\\n", cudaGetErrorString(cudaGetLastError()));
      const cudaError_t error = host[0] ? cudaSuccess : cudaSetDevice(9);
      return error == cudaSuccess;
    }
  }
  cudaDeviceSynchronize();
  cudaFree(d);
  cudaFreeHost(pinned);
}
"""
FAILED = "A call failed%s, and the program did not look at what it returned: %s.., at asks.cu:%d\n    asks.cu:%d: "


@pytest.fixture(scope="module")
def asks(tmp_path_factory):
    return kept(tmp_path_factory, "asks", ASKS)


@pytest.mark.parametrize("number, said", enumerate([
    FAILED % ("", r"cudaMemcpy..: invalid argument .cudaErrorInvalidValu", 14, 14),
    FAILED % ("", r"cudaMemcpy..: invalid argument .cudaErrorInvalidValu", 15, 15),
    FAILED % ("", r"cudaFree..: invalid argument .cudaErrorInvalidValu", 16, 16),
    FAILED % (" .3 times.", r"cudaSetDevice..: invalid device ordinal .cudaErrorInvalidDevic", 17, 17),
    FAILED % ("", r"cudaFree..: invalid argument .cudaErrorInvalidValu", 18, 18),
    "Not known: whether these threads would go on. The host, or a kernel in another stream, may write .*\n.*in line 4",
    "Not known: whether these threads would go on. The host, or a kernel in another stream, may write .*\n.*in line 4",
]))
def test_calls_that_fail_and_waits_for_others(asks, number, said):
    """What is thrown away although it failed is mentioned; and who waits for the host is in no deadlock."""
    result = execute([*TRY, asks, "--quick", "--", number], timeout=300)
    assert result.rc == 1
    assert re.search(said, result.stdout), result.stdout + result.stderr
    assert "A deadlock" not in result.stdout


def test_calls_that_may_fail(asks):
    """A call whose result is looked at, or cast to void, and one that only asks."""
    result = execute([*TRY, asks, "--quick", "--", 99], timeout=300)
    assert result.rc == 0, result.stdout
    assert "A call failed" not in result.stdout


STREAMS = """#include <cstdio>
#include <cstdlib>
constexpr int n = 64;
__global__ void set(float* x, float value) { x[threadIdx.x] = value; }
__global__ void add(const float* x, float* y) { y[threadIdx.x] += x[threadIdx.x]; }
__global__ void nothing() {}

int main(int, char** words) {
  cudaStream_t a, b;
  cudaStreamCreate(&a);
  cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
  cudaEvent_t event;
  cudaEventCreate(&event);
  float *x, *y, *pinned, *managed;
  cudaMalloc(&x, n * sizeof(float));
  cudaMalloc(&y, n * sizeof(float));
  cudaMallocHost(&pinned, n * sizeof(float));
  cudaMallocManaged(&managed, n * sizeof(float));
  float pageable[n] = {};
  float sum = 0;
  switch (atoi(words[1])) {
    case 0:  // two kernels in two streams
      set<<<1, n, 0, a>>>(x, 1);
      add<<<1, n, 0, b>>>(x, y);
      break;
    case 1:  // a memset beside a kernel
      set<<<1, n, 0, b>>>(x, 1);
      cudaMemset(x, 0, n * sizeof(float));
      break;
    case 2:  // the host reads a pinned buffer
      set<<<1, n, 0, a>>>(x, 1);
      cudaMemcpyAsync(pinned, x, n * sizeof(float), cudaMemcpyDeviceToHost, a);
      sum = pinned[3];
      break;
    case 3:  // the host reads managed memory
      set<<<1, n>>>(managed, 1);
      sum = managed[3];
      break;
    case 4:  // two copies
      cudaMemcpyAsync(x, pinned, n * sizeof(float), cudaMemcpyHostToDevice, a);
      cudaMemcpyAsync(y, x, n * sizeof(float), cudaMemcpyDeviceToDevice, b);
      break;
    case 5:  // the host writes what a copy still reads
      cudaMemcpyAsync(x, pinned, n * sizeof(float), cudaMemcpyHostToDevice, a);
      pinned[5] = 2;
      break;
    case 6:  // waits for the wrong stream
      set<<<1, n, 0, a>>>(managed, 1);
      nothing<<<1, 1, 0, b>>>();
      cudaStreamSynchronize(b);
      sum = managed[0];
      break;
    case 7:  // an event that is recorded too soon
      cudaEventRecord(event, a);
      set<<<1, n, 0, a>>>(x, 1);
      cudaStreamWaitEvent(b, event, 0);
      add<<<1, n, 0, b>>>(x, y);
      break;
    case 8:  // freed while another stream uses it
      set<<<1, n, 0, a>>>(x, 1);
      cudaFreeAsync(x, b);
      x = nullptr;
      break;
    case 9:  // many launches in between
      set<<<1, n, 0, a>>>(x, 1);
      for (int i = 0; i < 5; ++i) nothing<<<1, n, 0, a>>>(), nothing<<<1, n, 0, b>>>();
      add<<<1, n, 0, b>>>(x, y);
      break;
    default:  // all of it, ordered
      for (int i = 0; i < 6; ++i) {
        set<<<1, n, 0, a>>>(x, 1);
        cudaEventRecord(event, a);
        cudaStreamWaitEvent(b, event, 0);
        add<<<1, n, 0, b>>>(x, y);
        cudaMemcpyAsync(pinned, y, n * sizeof(float), cudaMemcpyDeviceToHost, b);
        cudaStreamSynchronize(b);
        sum += pinned[3];
        set<<<1, n, 0, a>>>(managed, 1);
        nothing<<<1, 1>>>();
        cudaMemcpy(x, managed, n * sizeof(float), cudaMemcpyDefault);
        sum += managed[1];
        pageable[1] = 3;
        cudaMemcpyAsync(x, pageable, n * sizeof(float), cudaMemcpyHostToDevice, b);
        pageable[1] = 4;
        cudaEventRecord(event, b);
        cudaMemcpyAsync(pageable, x, n * sizeof(float), cudaMemcpyDeviceToHost, b);
        sum += pageable[2];
        cudaEventSynchronize(event);
        set<<<1, n>>>(x, 0);
        set<<<1, n, 0, a>>>(x, 1);
        cudaMemset(x, 1, n * sizeof(float));
        cudaDeviceSynchronize();
        cudaMemsetAsync(x, 0, n * sizeof(float), b);
        cudaFreeAsync(x, b);
        cudaMallocAsync((void**)&x, n * sizeof(float), a);
        cudaLaunchHostFunc(a, [](void* to) { *(float*)to = 5; }, managed);
        set<<<1, n, 0, a>>>(managed, 1);
        cudaStreamSynchronize(a);
        managed[1] = 2;
      }
  }
  cudaDeviceSynchronize();
  cudaFree(x);
  cudaFree(y);
  cudaFree(managed);
  cudaFreeHost(pinned);
  printf("%g\\n", sum);
}
"""
BETWEEN = "They are in two streams. An event"
OF_HOST = "One of them is the host's. It has to wait"


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    return kept(tmp_path_factory, "streams", STREAMS)


@pytest.mark.parametrize("number, words", enumerate([
    BETWEEN, BETWEEN, OF_HOST, OF_HOST, BETWEEN, OF_HOST, OF_HOST, BETWEEN, BETWEEN, BETWEEN]))
@pytest.mark.extensive
def test_streams_that_nothing_orders(streams, number, words):
    result = execute([*TRY, streams, "--race", "--", number], timeout=300)
    assert result.rc == 1
    assert "A race: the same memory is used twice" in result.stdout, result.stdout + result.stderr
    assert words in result.stdout, result.stdout


@pytest.mark.extensive
def test_streams_in_order(streams):
    result = execute([*TRY, streams, "--race", "--", 99], timeout=300)
    assert result.rc == 0, result.stdout + result.stderr
    assert re.search("No race: .*\n    Not looked at: the order of the nodes of a graph", result.stdout), result.stdout


FENCES = """#include <cuda/atomic>
#include <cstdio>
#include <cstdlib>
// Each block leaves a number, and the last one adds them.
template <int kKind>
__global__ void last_adds(int* parts, unsigned* arrived, int* sum) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = 1;
    if (kKind == 1) __threadfence_block();
    if (kKind == 2) __threadfence();
    last = atomicAdd(arrived, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    int all = 0;
    for (int i = 0; i < gridDim.x; ++i) all += parts[i];
    *sum = all;
  }
}
// Block 1 waits for a number of block 0.
template <int kKind>
__global__ void flag(int* data, volatile int* ready, int* sum) {
  if (blockIdx.x == 0) {
    data[0] = 5;
    if (kKind != 1) __threadfence();
    if (kKind == 3) data[0] = 6;
    *ready = 1;
  } else {
    while (*ready == 0) {
    }
    if (kKind != 2) __threadfence();
    *sum = data[0];
  }
}
// The same with libcu++, and a fence in the wrong scope or order.
template <cuda::thread_scope kScope, bool kMixed>
__global__ void reference(int* data, int* ready, int* sum) {
  cuda::atomic_ref<int, kScope> at(*ready);
  if (blockIdx.x == 0) {
    data[0] = 5;
    at.store(1, cuda::memory_order_release);
  } else if (kMixed) {
    while (at.load(cuda::memory_order_relaxed) == 0) {
    }
    __threadfence();
    *sum = data[0];
  } else {
    while (at.load(cuda::memory_order_acquire) == 0) {
    }
    *sum = data[0];
  }
}
__global__ void lock(int* mutex, int* sum) {
  for (bool done = false; !done;) {
    if (atomicCAS(mutex, 0, 1) == 0) {
      __threadfence();
      *sum += 1;
      __threadfence();
      atomicExch(mutex, 0);
      done = true;
    }
  }
}
__global__ void fence_and_barrier(int* parts, unsigned* arrived, int* sum) {
  parts[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  __threadfence();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == gridDim.x - 1;
  __syncthreads();
  if (last) atomicAdd(sum, parts[(gridDim.x - 1 - blockIdx.x) * blockDim.x + threadIdx.x]);
}
int main(int, char** words) {
  int* d;
  cudaMalloc(&d, 4096);
  cudaMemset(d, 0, 4096);
  int *data = d, *ready = d + 512, *sum = d + 600;
  unsigned* arrived = (unsigned*)d + 700;
  switch (atoi(words[1])) {
    case 0: last_adds<0><<<4, 32>>>(data, arrived, sum); break;
    case 1: last_adds<1><<<4, 32>>>(data, arrived, sum); break;
    case 2: flag<1><<<2, 1>>>(data, ready, sum); break;
    case 3: flag<2><<<2, 1>>>(data, ready, sum); break;
    case 4: flag<2><<<2, 1>>>(data, ready, sum); break;
    case 5: reference<cuda::thread_scope_block, false><<<2, 1>>>(data, ready, sum); break;
    default:
      last_adds<2><<<4, 32>>>(data, arrived, sum);
      cudaMemset(d, 0, 4096);
      flag<0><<<2, 1>>>(data, ready, sum);
      cudaMemset(d, 0, 4096);
      reference<cuda::thread_scope_device, false><<<2, 1>>>(data, ready, sum);
      cudaMemset(d, 0, 4096);
      reference<cuda::thread_scope_device, true><<<2, 1>>>(data, ready, sum);
      cudaMemset(d, 0, 4096);
      lock<<<4, 32>>>(ready, sum);
      cudaMemset(d, 0, 4096);
      fence_and_barrier<<<4, 32>>>(data, arrived, sum);
  }
  int result;
  cudaMemcpy(&result, sum, 4, cudaMemcpyDeviceToHost);
  cudaFree(d);
  printf("%d\\n", result);
}
"""


@pytest.fixture(scope="module")
def fences(tmp_path_factory):
    return kept(tmp_path_factory, "fences", FENCES)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.extensive
def test_fences_that_are_missing(fences, number):
    """No fence, one of a block in place of the device's, one on one side only, a scope that is too small."""
    result = execute([*TRY, fences, "--race", "--", number], timeout=300)
    assert result.rc == 1
    assert "A race: the same memory is used twice" in result.stdout, result.stdout + result.stderr


@pytest.mark.extensive
def test_fences_that_are_there(fences):
    result = execute([*TRY, fences, "--race", "--", 99], timeout=300)
    assert result.rc == 0, result.stdout + result.stderr
    assert "No race" in result.stdout


def test_the_line_of_a_launch(tried):
    """It is the line of the call, also where a function of a header launches the kernel."""
    source = """#include "primitives/early_launch.cuh"
__global__ void endless() { while (clock64()) {} }
int main(int, char** words) {
  cudaLaunchConfig_t config = {};
  config.gridDim = config.blockDim = 1;
  if (atoi(words[1])) primitives::launch_early(endless, 1, 1, 0);
  else cudaLaunchKernelEx(&config, endless);
  cudaDeviceSynchronize();
}
"""
    for early, line in (0, 7), (1, 6):
        result = tried(source, options=("--quick", "--seconds", "1", "-I", str(ROOT), "--", str(early)))
        said = f"kernel endless, launched at program.cu:{line}, had finished 0 of its 1 blocks"
        assert said in result.stdout, result.stdout


def test_a_host_thread_for_each_device(tried):
    """Each launches kernels at the same time as the others, and all of these are counted."""
    result = tried("""#include <cstdio>
#include <thread>
#include <vector>
__global__ void add(float* x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] += 1;
}
int main() {
  std::vector<std::thread> all;
  float results[4];
  for (int device = 0; device < 4; ++device)
    all.emplace_back([device, &results] {
      cudaSetDevice(device);
      float* x;
      cudaMalloc(&x, 4000);
      cudaMemset(x, 0, 4000);
      for (int i = 0; i < 50; ++i) add<<<1, 64>>>(x, 1000 - i % 2);
      cudaMemcpy(&results[device], x, 4, cudaMemcpyDeviceToHost);
      cudaFree(x);
    });
  for (auto& each : all) each.join();
  for (float each : results) printf("%g ", each);
}
""")
    assert result.rc == 0, result.stdout + result.stderr
    assert "50 50 50 50" in result.stdout
    assert re.search(r"^add +1 +64 +200 +6400 ", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.extensive
def test_more_threads_than_a_sanitizer_has_room_for(tried):
    result = tried("""#include <cooperative_groups.h>
__global__ void both(int* x) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  x[i] = i;
  cooperative_groups::this_grid().sync();
  x[n + i] = x[n - 1 - i];
}
int main() {
  int* x;
  cudaMalloc(&x, 8192 * 8);
  void* arguments[] = {&x};
  cudaLaunchCooperativeKernel((void*)both, dim3(8), dim3(1024), arguments, 0, 0);
  cudaDeviceSynchronize();
  cudaFree(x);
}
""", options=("--race",))
    assert "Not known: whether there is a race. So many threads wait for each other" in result.stdout, result.stdout
    assert "crashed" not in result.stdout and result.rc == 0


def test_nothing_is_left_in_the_repository(tmp_path):
    """And ./try runs by itself, as a reader runs it."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    (tmp_path / "program.cu").write_text(program(WRITE, "f<<<1, 32>>>(d)"))
    before = execute(["git", "status", "--porcelain"], cwd=ROOT).stdout
    result = execute([ROOT / "try", tmp_path / "program.cu", "--quick"], timeout=300)
    assert result.rc == 0, result.stdout + result.stderr
    assert execute(["git", "status", "--porcelain"], cwd=ROOT).stdout == before
