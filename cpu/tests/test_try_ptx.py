"""Inline PTX in programs of ./try: what instructions compute, what is refused, races and wrong addresses in it; and
our own primitives, whose PTX goes through the same door as other people's."""

import re
import shutil
import struct
import sys

from conftest import ROOT, execute
import pytest

sys.path.insert(0, str(ROOT / "cpu"))
from cu2cpp import TranslationError  # noqa: E402
from ptx import translate_preprocessed  # noqa: E402

TRY = [sys.executable, ROOT / "try"]  # as in test_try.py


def tried(path, *arguments, options=("--quick",)):
    return execute([*TRY, path, *options, *arguments], timeout=300, cwd=path.parent)


def bits(value):
    """Of a float."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


# Each an asm of %0, the result, and %1 to %3, and what it is of which operands; all of 32 bits. A float among the
# operands, and the results, is one of constraint "f". The instruction's section of the PTX ISA says what it does.
OPERANDS = [
    ("add.s32 %0, %1, %2;", (-5, 3), -2),
    ("add.u32 %0, %1, 0xffffffff;", (5,), 4),
    ("add.sat.s32 %0, %1, %2;", (0x7fffffff, 3), 0x7fffffff),
    ("sub.u32 %0, %1, %2;", (3, 5), -2),
    ("mul.lo.s32 %0, %1, %2;", (0x10001, 0x10001), 0x20001),
    ("mul.hi.u32 %0, %1, %2;", (0x80000000, 6), 3),
    ("mul.hi.s32 %0, %1, %2;", (-2, 3), -1),
    ("mad.lo.s32 %0, %1, %2, %3;", (-4, 5, 6), -14),
    ("{ .reg .u64 t; mul.wide.u32 t, %1, %2; shr.u64 t, t, 32; cvt.u32.u64 %0, t; }", (0x80000000, 8), 4),
    ("{ add.cc.u32 %0, %1, %2; addc.u32 %0, 0, 0; }", (0xffffffff, 1), 1),
    ("div.s32 %0, %1, %2;", (-7, 2), -3),
    ("rem.s32 %0, %1, %2;", (-7, 2), -1),
    ("min.s32 %0, %1, %2;", (-7, 2), -7),
    ("max.u32 %0, %1, %2;", (-7, 2), -7),
    ("abs.s32 %0, %1;", (-7,), 7),
    ("and.b32 %0, %1, %2;", (12, 10), 8),
    ("xor.b32 %0, %1, %2;", (12, 10), 6),
    ("not.b32 %0, %1;", (0,), -1),
    ("shl.b32 %0, %1, %2;", (3, 32), 0),
    ("shr.s32 %0, %1, %2;", (-8, 40), -1),
    ("shr.u32 %0, %1, %2;", (0x80000000, 31), 1),
    ("shf.l.wrap.b32 %0, %1, %2, %3;", (0x80000000, 1, 33), 3),
    ("shf.r.clamp.b32 %0, %1, %2, %3;", (1, 7, 40), 7),
    ("prmt.b32 %0, %1, %2, %3;", (0x33221100, 0x77665544, 0x7531), 0x77553311),
    ("lop3.b32 %0, %1, %2, %3, 0x96;", (12, 10, 9), 15),
    ("lop3.b32 %0, %1, %2, %3, 0xEA;", (12, 10, 1), 9),
    ("bfe.u32 %0, %1, 4, 8;", (0xabcd,), 0xbc),
    ("bfe.s32 %0, %1, 4, 4;", (0x80,), -8),
    ("bfi.b32 %0, %1, %2, 8, 4;", (0xf, 0), 0xf00),
    ("popc.b32 %0, %1;", (0xff0,), 8),
    ("clz.b32 %0, %1;", (1,), 31),
    ("brev.b32 %0, %1;", (1,), 0x80000000),
    ("bfind.u32 %0, %1;", (0x40,), 6),
    ("dp4a.s32.s32 %0, %1, %2, %3;", (0xff010203, 0x01010101, 10), 15),
    ("dp4a.u32.s32 %0, %1, %2, %3;", (0xff, 0xff, 0), -255),
    ("{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.s32 %0, %1, %2, p; }", (-1, 1), -1),
    ("{ .reg .pred p, q; setp.gt.u32 p|q, %1, %2; selp.u32 %0, 5, 6, q; }", (7, 8), 5),
    ("{\n .reg .pred %%p;\n setp.eq.u32 %%p, %1, 2;\n mov.u32 %0, 1; // two\n @!%%p mov.u32 %0, 3;\n}", (2,), 1),
    ("{ .reg .pred p; .reg .b32 r<2>; mov.u32 r0, 0; mov.u32 r1, 0; again: add.u32 r1, r1, r0; add.u32 r0, r0, 1; "
     "setp.le.u32 p, r0, %1; @p bra again; mov.u32 %0, r1; }", (10,), 55),
    ("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, lo}; }", (0x12345678,), 0x56781234),
    ("{ .reg .b64 t; mov.b64 t, {%1, %2}; shr.b64 t, t, 16; cvt.u32.u64 %0, t; }", (0x11112222, 0x33334444),
     0x44441111),
    ("cvt.rni.s32.f32 %0, %1;", (2.5,), 2),
    ("cvt.rzi.s32.f32 %0, %1;", (-2.7,), -2),
    ("cvt.rpi.u32.f32 %0, %1;", (-2.7,), 0),
    ("cvt.rn.f16x2.f32 %0, %1, %2;", (1.0, 2.0), 0x3c004000),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", (1.0, -2.0), 0x3f80c000),
    ("cvt.rna.tf32.f32 %0, %1;", (1 + 2.0**-11,), bits(1 + 2.0**-10)),
    ("fma.rn.f16x2 %0, %1, %2, %3;", (0x3c004000, 0x40004000, 0x3c003c00), 0x42004500),
    ("add.rn.f32 %0, %1, %2;", (1.5, 2.25), 3.75),
    ("fma.rn.f32 %0, %1, %2, %3;", (2.0, 3.0, 0.5), 6.5),
    ("mul.f32 %0, %1, 0f40000000;", (1.25,), 2.5),
    ("mul.rn.ftz.f32 %0, %1, 0.5;", (1.25,), 0.625),
    ("add.sat.f32 %0, %1, %2;", (0.75, 0.5), 1.0),
    ("max.f32 %0, %1, %2;", (float("nan"), 2.0), 2.0),
    ("ex2.approx.ftz.f32 %0, %1;", (3.0,), 8.0),
    ("lg2.approx.f32 %0, %1;", (8.0,), 3.0),
    ("rcp.approx.ftz.f32 %0, %1;", (4.0,), 0.25),
    ("rsqrt.approx.f32 %0, %1;", (4.0,), 0.5),
    ("sqrt.rn.f32 %0, %1;", (2.25,), 1.5),
    ("tanh.approx.f32 %0, %1;", (0.0,), 0.0),
    ("cvt.rn.f32.s32 %0, %1;", (-3,), -3.0),
    ("cvt.rm.f32.u32 %0, %1;", (0x01000003,), 16777218.0),
    ("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h; }", (0.1,), 0.0999755859375),
    ("copysign.f32 %0, %2, %1;", (1.5, -0.0), -1.5),
    ("mov.u32 %0, %laneid;", (), 0),
    ("mov.u32 %0, %%ntid.x;", (), 1),
    ("mov.u32 %0, %lanemask_gt;", (), 0xfffffffe),
    ("activemask.b32 %0;", (), 1),
]


def test_what_instructions_compute(tmp_path):
    """All of them in one kernel of one thread."""
    body, expected = [], []
    for number, (text, operands, result) in enumerate(OPERANDS):
        inputs = [f'"f"(__uint_as_float({bits(each):#x}u))' if isinstance(each, float) else
                  f'"r"({each & 0xffffffff:#x}u)' for each in operands]
        is_float = isinstance(result, float)
        escaped = text.replace("\n", "\\n")
        body.append(f'{{ {"float" if is_float else "unsigned"} y = {"0" if is_float else "7"}; asm("{escaped}" : '
                    f'"={"f" if is_float else "r"}"(y) : {", ".join(inputs)}); '
                    f'out[{number}] = {"__float_as_uint(y)" if is_float else "y"}; }}')
        expected.append(bits(result) if is_float else result & 0xffffffff)
    newline = "\n  "
    path = tmp_path / "program.cu"
    path.write_text(f"""#include <cstdio>
__global__ void f(unsigned* out) {{
  {newline.join(body)}
}}
int main() {{
  unsigned *d, h[{len(expected)}];
  cudaMalloc(&d, sizeof h);
  f<<<1, 1>>>(d);
  cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost);
  for (unsigned x : h) printf("%x ", x);
  puts("");
  cudaFree(d);
}}
""")
    result = tried(path)
    assert result.rc == 0, result.stdout + result.stderr
    found = [int(word, 16) for line in result.stdout.splitlines() if re.fullmatch(r"([0-9a-f]+ )+", line)
             for word in line.split()]
    wrong = [(OPERANDS[k][0], hex(found[k]), hex(expected[k])) for k in range(len(expected)) if found[k] != expected[k]]
    assert not wrong


MEMORY = """
#include <cstdint>
#include <cuda.h>
#include <cuda_fp16.h>
#include "common/try.h"
#define COPY(to, from, bytes) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2;\\n" \\
                                           ::"r"(to), "l"(from), "n"(bytes))
#define WAIT_FOR_ALL_BUT(count) asm volatile("cp.async.wait_group %0;\\n" ::"n"(count))
#define LDMATRIX_X4(r, at) \\
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" \\
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at))
__device__ uint32_t window(const void* p) {
  uint32_t at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
  return at;
}
/// x, four numbers at a time, through shared memory; the number of a warp's negative ones; the sum of all.
__global__ void everyday(const int* x, int* y, int* negative, int* sum, int n) {
  __shared__ __align__(16) int4 s[32];
  int i = 4 * (blockIdx.x * 32 + threadIdx.x), lanes;
  if (i < n) COPY(window(s + threadIdx.x), x + i, 16);
  asm volatile("cp.async.commit_group;");
  WAIT(WAIT_FOR_ALL_BUT(0));
  asm volatile("bar.sync 0;");
  int4 v = {0, 0, 0, 0};
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %5, %6; @p ld.shared.v4.s32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "r"(window(s + (threadIdx.x ^ 1))), "r"(4 * (blockIdx.x * 32 + (threadIdx.x ^ 1))), "r"(n));
  if ((i ^ 4) < n) {
    asm volatile("st.global.cs.v4.b32 [%0 + 16], {%1, %2, %3, %4};"
                 ::"l"(y + (i ^ 4) - 4), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; popc.b32 %0, %0; }"
               : "=r"(lanes) : "r"(v.x));
  if (threadIdx.x == 0) asm volatile("red.global.add.s32 [%0], %1;" ::"l"(negative), "r"(lanes) : "memory");
  int mine = v.x + v.y + v.z + v.w, other;
  for (int step = 16; step > 0; step /= 2) {
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(other) : "r"(mine), "r"(step));
    mine += other;
  }
  if (threadIdx.x == 0) {
    asm volatile("atom.global.add.s32 %0, [%1], %2;" : "=r"(other) : "l"(sum), "r"(mine) : "memory");
  }
}
/// c (16 x 8) = a (16 x 16) b (16 x 8), a row-major, b column-major.
__global__ void product(const half* a, const half* b, float* c) {
  __shared__ __align__(16) half tile[16][16];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int twice = 0; twice < 2; ++twice) {
    COPY(window(&tile[lane / 2][lane % 2 * 8]), a + 8 * lane, 16);
    asm volatile("cp.async.commit_group;");
    if (twice) WAIT_FOR_ALL_BUT(0); else asm volatile("cp.async.wait_all;");
  }
  __syncwarp();
  uint32_t r[4];
  LDMATRIX_X4(r, window(&tile[lane % 16][lane / 16 * 8]));
  const uint32_t b0 = *(const uint32_t*)(b + g * 16 + 2 * t), b1 = *(const uint32_t*)(b + g * 16 + 2 * t + 8);
  float d[4] = {};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(b0), "r"(b1));
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
/// The copy engine brings n numbers, and a loop of a label waits for them.
__global__ void bulk(const int* x, int* y, int n) {
  __shared__ __align__(16) int s[1024];
  __shared__ uint64_t barrier;
  const int bytes = (4 * n + 15) / 16 * 16;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(window(&barrier)));
    asm volatile("fence.proxy.async.shared::cta;");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];"
                 ::"r"(window(&barrier)), "r"(bytes), "r"(window(s)), "l"(x) : "memory");
  }
  asm volatile("{\\n.reg .pred P1;\\nLAB_WAIT:\\nmbarrier.try_wait.parity.shared::cta.b64 P1, [%0], 0;\\n"
               "@P1 bra DONE;\\nbra LAB_WAIT;\\nDONE:\\n}" ::"r"(window(&barrier)));
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = s[i];
}
#define REDUCE(how, to) asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." how " [%0], [%1], %2;" \\
                                     ::"l"(to), "r"(window(s)), "n"(sizeof s) : "memory")
__global__ void reduces(const int* x, int* sum, int* most, half* halves, int* own,
                        const __grid_constant__ CUtensorMap map) {
  __shared__ alignas(128) int s[64], twice[64];
  __shared__ alignas(128) half h[64];
  __shared__ std::uint64_t barrier;
  const int i = threadIdx.x;
  s[i] = twice[i] = x[i] % 100 + blockIdx.x;
  h[i] = __float2half(s[i]);
  if (i == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(window(&barrier)));
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  if (i == 0) {
    REDUCE("add.s32", sum);
    REDUCE("max.s32", most);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;"
                 ::"l"(halves), "r"(window(h)), "n"(sizeof h) : "memory");
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(0), "r"(-4), "r"(window(s)) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\\n"
                 "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
                 " [%2], [%3], %1, [%0];"
                 ::"r"(window(&barrier)), "n"(sizeof s), "r"(window(twice)), "r"(window(s)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
  asm volatile("{\\n.reg .pred p;\\nwait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\\n@!p bra wait;\\n}"
               ::"r"(window(&barrier)));
  own[64 * blockIdx.x + i] = twice[i];
}
__device__ unsigned long long descriptor(const void* p) {
  return (window(p) & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__global__ void half_sums(const half* a, const half* b, half* c) {
  __shared__ alignas(1024) half sa[64 * 64];
  __shared__ alignas(1024) half sb[8 * 64];
  const auto place = [](int row, int k) { return 64 * row + ((k / 8 ^ row % 8) * 8 + k % 8); };
  for (int i = threadIdx.x; i < 64 * 16; i += 128) sa[place(i / 16, i % 16)] = a[i];
  sb[place(threadIdx.x / 16, threadIdx.x % 16)] = b[threadIdx.x];
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  unsigned sums[2] = {0x3C003C00, 0x3C003C00};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%0, %1}, %2, %3, p, 1, 1, 0, 0; }"
               : "+r"(sums[0]), "+r"(sums[1]) : "l"(descriptor(sa)), "l"(descriptor(sb)), "r"(1));
  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int r = 0; r < 2; ++r) std::memcpy(&c[8 * (row + 8 * r) + threadIdx.x % 4 * 2], &sums[r], 4);
}
/// A box of 8 rows, as it lies in shared memory, and stored to where the map of `to` says.
__global__ void swizzles(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, int* raw,
                         int bytes) {
  __shared__ alignas(1024) int s[128];
  __shared__ uint64_t barrier;
  const int i = threadIdx.x;
  if (i == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\\nfence.proxy.async.shared::cta;" ::"r"(window(&barrier)));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\\n"
                 "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3, {%4, %4}], [%0];"
                 ::"r"(window(&barrier)), "r"(bytes), "r"(window(s)), "l"(&from), "r"(0) : "memory");
  }
  __syncthreads();
  asm volatile("{\\n.reg .pred p;\\nwait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\\n@!p bra wait;\\n}"
               ::"r"(window(&barrier)));
  for (int k = i; k < bytes / 4; k += blockDim.x) raw[k] = s[k];
  if (i == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %1}], [%2];\\n"
                 "cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;"
                 ::"l"(&to), "r"(0), "r"(window(s)) : "memory");
  }
}
/// A map for a box of 8 rows of so many bytes.
CUtensorMap map_of(int* matrix, unsigned bytes, CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint64_t extents[2] = {16, 8}, strides[1] = {64};
  const cuuint32_t box[2] = {bytes / 4, 8}, steps[2] = {1, 1};
  cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_INT32, 2, matrix, extents, strides, box, steps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // CUTLASS clears this bit, which older drivers set.
  reinterpret_cast<unsigned long long*>(&map)[1] &= ~(1ull << 21);
  return map;
}
void test(Try& t, int n) {
  auto matrix = t.input<int>(128);
  for (const unsigned bytes : {32, 64}) {
    const auto swizzle = bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_64B;
    auto raw = t.result<int>(2 * bytes), copy = t.result<int>(128, 0);
    const CUtensorMap from = map_of(const_cast<int*>(matrix.data()), bytes, swizzle), to = map_of(copy, bytes, swizzle);
    t.run("swizzles", [=] { swizzles<<<1, 32>>>(from, to, raw, 8 * bytes); });
    const int row = bytes / 4;
    t.expect(raw, [=](int i) {  // 16 bytes are at another place of their row: by the row's number in pairs or fours
      const int r = i / row, piece = i % row / 4 ^ (bytes == 32 ? r / 4 % 2 : r / 2 % 4);
      return matrix[16 * r + 4 * piece + i % 4];
    });
    t.expect(copy, [=](int i) { return i % 16 < row ? matrix[i] : 0; });
  }
  auto x = t.input<int>((n + 3) / 4 * 4);
  const int all = (n + 3) / 4 * 4;
  auto y = t.result<int>(all);
  auto negative = t.result<int>(1, 0), sum = t.result<int>(1, 0);
  t.run("everyday", [=] { everyday<<<(n + 127) / 128, 32>>>(x, y, negative, sum, all); });
  t.expect(y, [=](int i) { return x[i]; });
  t.expect(negative, [=](int) { int k = 0; for (int i = 0; i < all; i += 4) k += x[i] < 0; return k; });
  t.expect(sum, [=](int) { int k = 0; for (int i = 0; i < all; ++i) k += x[i]; return k; });
  auto a = t.input<half>(256), b = t.input<half>(128);
  auto c = t.result<float>(128);
  t.run("product", [=] { product<<<1, 32>>>(a, b, c); });
  t.expect(c, [=](int i) {
    float s = 0;
    for (int k = 0; k < 16; ++k) s += __half2float(a[i / 8 * 16 + k]) * __half2float(b[i % 8 * 16 + k]);
    return s;
  }, 1e-5);
  t.run("bulk", [=] { bulk<<<1, 64>>>(x, y, n); });
  t.expect(y, [=](int i) { return i < n ? x[i] : int(0xA5A5A5A5); });
  auto few = t.input<int>(64);
  auto totals = t.result<int>(64, 0), most = t.result<int>(64, 0), own = t.result<int>(256);
  auto table = t.result<int>(96, 7);
  auto halves = t.result<half>(64, 0);
  CUtensorMap map;
  const cuuint64_t extents[2] = {8, 12}, strides[1] = {32};
  const cuuint32_t box[2] = {8, 8}, steps[2] = {1, 1};
  cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_INT32, 2, table, extents, strides, box, steps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  t.run("reduces", [=] { reduces<<<4, 64>>>(few, totals, most, halves, own, map); });
  t.expect(totals, [=](int i) { return 4 * (few[i] % 100) + 6; });
  t.expect(most, [=](int i) { return std::max(few[i] % 100 + 3, 0); });
  t.expect(halves, [=](int i) { return 4 * (few[i] % 100) + 6; });
  t.expect(own, [=](int i) { return 2 * (few[i % 64] % 100 + i / 64); });
  t.expect(table, [=](int i) { return i < 32 ? 7 + 4 * (few[i + 32] % 100) + 6 : 7; });
  auto left = t.input<half>(64 * 16), right = t.input<half>(8 * 16), products = t.result<half>(64 * 8);
  t.run("half sums", [=] { half_sums<<<1, 128>>>(left, right, products); });
  t.expect(products, [=](int i) {
    float s = 1;
    for (int k = 0; k < 16; ++k) s += __half2float(left[i / 8 * 16 + k]) * __half2float(right[i % 8 * 16 + k]);
    return __half2float(__float2half(s));
  }, 1e-3);
}
"""
WAITS = ("-D", "WAIT(x)=x")


def program(tmp_path, source):
    path = tmp_path / "program.cu"
    path.write_text(source)
    return path


def test_memory_warps_and_copies(tmp_path):
    result = tried(program(tmp_path, MEMORY), options=("--quick", *WAITS))
    assert result.stdout.count(": right") == 45 and result.rc == 0, result.stdout + result.stderr
    # One load and one store of 16 bytes a warp, and what a line costs that has an ldmatrix.
    assert re.search(r"^everyday +8 +32 +2 +16 +253 +16 +253 +16 +0 +32 ", result.stdout, re.MULTILINE), result.stdout
    assert re.search(r"program.cu:\d+: 4 bank conflicts .*LDMATRIX_X4", result.stdout), result.stdout


STRAY = """__global__ void f(int* x) {{
  int y;
  asm volatile(
    "{}"
    : "=r"(y) : "l"(x));
  x[0] = y;
}}
"""
MAIN = "int main() { int* d; cudaMalloc(&d, 400); f<<<1, 1>>>(d); cudaDeviceSynchronize(); cudaFree(d); }\n"


def test_a_stray_access_has_the_line_of_its_asm(tmp_path):
    result = tried(program(tmp_path, STRAY.format("ld.global.s32 %0, [%1 + 400];") + MAIN))
    assert re.search(r"in f, .*reads 4 bytes, 4 bytes behind the end of 400 bytes, at program.cu:3", result.stdout), (
        result.stdout + result.stderr)


REFUSALS = {
    "add.q17.u32 %0, %0, 1;": "the CPU backend does not have the instruction add.q17.u32",
    "mov.u32 %0, %nosuch;": "the CPU backend does not have the special register %nosuch",
    "mov.u32 %0, t;": "t is not declared in this asm",
    "{ add.u32 %0, %0, 1;": "a { in an asm without its }",
    "add.u32 %0;": "add.u32 needs more than 1 operand",
    "add.u32 %0, %7, 1;": "there is no operand %7",
    "mov.u32 %1, 0;": "mov.u32 writes %1, which is an input of the asm",
    ".shared .b32 t;": "the CPU backend does not have .shared in an asm",
    "ld.global.v4.u32 {%0, %0}, [%1];": "2 registers for a vector of 4",
    "add.u32 %0, [%0, 1;": "the address [%0, 1 is not understood",
}


def test_an_unknown_instruction_is_named(tmp_path):
    result = tried(program(tmp_path, STRAY.format("frobnicate.b32 %0, %1;") + MAIN))
    assert result.rc == 1 and result.stderr == (
        "program.cu:3: the CPU backend does not have the instruction frobnicate.b32. docs/cpu.md lists what the CPU"
        " backend can do.\n")


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals(text):
    with pytest.raises(TranslationError) as refusal:
        translate_preprocessed(f'# 1 "program.cu"\n{STRAY.format(text)}', {"program.cu"})
    assert str(refusal.value).startswith(f"program.cu:3: {REFUSALS[text]}")


LIBRARY = """#pragma once
__device__ inline int used(int x) {
  union { int whole; unsigned bits; };
  whole = x;
  asm volatile("add.u32 %0, %0, 1;" : "+r"(bits));
  asm volatile("setmaxnreg.frobnicate %0;" :: "r"(x));
  return whole;
}
"""


def test_what_a_program_does_not_use_of_a_library_is_not_refused(tmp_path):
    """Only when a kernel comes to it; but beside the program an unknown instruction is refused before it runs."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "lib/library.h").write_text(LIBRARY)
    source = tmp_path / "own/program.cu"
    source.write_text("#include <library.h>\n__global__ void f(int* x) {\n  if (x[0] != 7) x[1] = used(x[0]);\n}\n" + MAIN)
    late = tried(source, options=("--quick", "-I", tmp_path / "lib"))
    said = "library.h:6: the CPU backend does not have the instruction setmaxnreg.frobnicate"
    assert f"A mistake in f, block (0,0,0), thread (0,0,0): ../lib/{said}" in late.stdout, late.stdout + late.stderr
    sources = f'# 1 "library.h"\n{LIBRARY}'
    with pytest.raises(TranslationError):
        translate_preprocessed(sources, {"library.h"})
    assert "cuda_cpu::fail(" in translate_preprocessed(sources, {"library.h"}, late={"library.h"})


@pytest.mark.extensive
def test_a_race_in_inline_ptx(tmp_path):
    """A copy that nobody waits for."""
    race = tried(program(tmp_path, MEMORY), "--", "64", options=("-D", "WAIT(x)="))
    assert "A race: the same memory is used twice" in race.stdout, race.stdout + race.stderr
    right = tried(program(tmp_path, MEMORY), "--", "100", options=WAITS)
    assert "No race" in right.stdout and "No stray access" in right.stdout and right.rc == 0, right.stdout


def through_the_door(folder):
    """The semantics of primitives/, and a copy of these in which the CPU has no words of its own, but the PTX."""
    shutil.copytree(ROOT / "primitives", folder / "primitives")
    for file in [folder / "primitives/mma.cuh", folder / "primitives/approximate.cuh",
                 *folder.glob("primitives/hopper/*.cuh")]:
        text = file.read_text()
        file.write_text(text.replace("#ifdef CUDA_CPU\n", "#if 0\n").replace("#ifndef CUDA_CPU\n", "#if 1\n"))
    # The last part is of mistakes, in the words of primitives/.
    cases, _, _ = (ROOT / "cpu/tests/hopper_semantics.cu").read_text().partition("#ifdef CUDA_CPU\n")
    end = (ROOT / "cpu/tests/hopper_semantics.cu").read_text().rpartition("#endif  // CUDA_CPU\n")[2]
    (folder / "semantics.cu").write_text(cases + end)
    return folder / "semantics.cu", re.findall(r"^CASE\((\w+)\)", cases, re.MULTILINE)


def test_primitives_through_the_door_have_ptx(tmp_path):
    """An instruction that nobody knows is found in the copy: so its asm is what counts there."""
    source, _ = through_the_door(tmp_path)
    wgmma = tmp_path / "primitives/hopper/wgmma.cuh"
    wgmma.write_text(wgmma.read_text().replace("wgmma.commit_group", "wgmma.nosuch"))
    result = tried(source, options=("--quick", "-I", tmp_path))
    assert re.search(r"^primitives/hopper/wgmma.cuh:\d+: .*instruction wgmma.nosuch", result.stderr), result.stderr


@pytest.mark.extensive
def test_primitives_mean_on_the_cpu_what_their_ptx_means(tmp_path):
    """Their cases pass with the CPU's words (cpu/tests), and so with the text that the GPU gets."""
    source, cases = through_the_door(tmp_path)
    result = tried(source, options=("--quick", "-I", tmp_path))
    passed = re.findall(r"^(\w+) +ok$", result.stdout, re.MULTILINE)
    assert len(cases) > 20 and sorted(passed) == sorted(cases) and result.rc == 0, result.stdout + result.stderr
