// Planes and weights of the fully connected product as wgmma reads them, for its kernel on Hopper.
#pragma once

#include "common/connected.cuh"
#include "common/hopper.cuh"

// The instructions of wgmma take both operands from shared memory, rows along k, 128 bytes each, of
// which a step of k, 8 floats, is a quarter: four "slices", which may be of four different
// matrices. A slice of planes is that of one triple: rows are its planes' (up to 3 blades, 64 rows
// of the batch each), so that one instruction multiplies all planes that share the weights. Weights
// are the left operand, 64 columns of the result: z comes out transposed, a warpgroup has 64
// columns of 4 blades of 64 rows, 128 sums a thread.
constexpr int kCrewRows = 64, kCrewCols = 128, kMakers = 128, kCrewThreads = kMakers + 256;
constexpr int kPlaneStages = 2, kWeightStages = 3, kSliceFloats = 32;

// Where the slices of a part are. Weights: slice number 10 g + slot of consumer g, in boxes of 64
// rows. Planes: for each grade, slice number triples(c) stage + i, in boxes of 64 blades(c) rows.
template <typename A>
struct CrewMemory {
  static constexpr int kTriples = Part<A, 0>::kTriples;
  static_assert(2 * kTriples % 4 == 0 && kParts<A> <= 2);
  static constexpr int kWeightRows = 2 * kTriples / 4 * 64;  // of a stage
  static constexpr int kWeightFloats = kWeightRows * kSliceFloats;

  template <int part>
  __host__ __device__ static constexpr int plane_floats(int end) {
    int sum = 0;
    for (int c = Part<A, part>::kFirstGrade; c < end; ++c) {
      const int boxes = (kPlaneStages * Part<A, part>::triples(c) + 3) / 4;
      sum += boxes * A::blades_of(c) * kCrewRows * kSliceFloats;
    }
    return sum;
  }
  static constexpr int kPlaneFloats = plane_floats<0>(Part<A, 0>::kEndGrade);

  float weights[kWeightStages][kWeightFloats];
  float planes[kPlaneFloats];
  Barrier planes_full[kPlaneStages], planes_empty[kPlaneStages];
  Barrier weights_full[kWeightStages], weights_empty[kWeightStages];
};

// The weights as CrewMemory has them, rounded: for each part, 128 columns and step of k, the rows
// of a stage. A thread makes 8 floats of k of one column, for each triple.
template <typename A>
__global__ void __launch_bounds__(kCrewCols)
    arrange_weights(const float* w, float* to, int features) {
  const int step = blockIdx.x, column = blockIdx.y * kCrewCols + threadIdx.x;
  const int consumer = threadIdx.x / 64, row = threadIdx.x % 64;
  const size_t stage =
      (static_cast<size_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + step;
  unroll<0, kParts<A>>([&](auto part) {
    using Own = Part<A, part>;
    if (static_cast<int>(blockIdx.z) != part) return;
    Own::for_triples([&](auto c, auto i) {
      constexpr int t = Own::triple(c, i), slot = Own::before(c) + i;
      float eight[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int k = 8 * step + e;
        const bool inside = k < features && column < features;
        eight[e] =
            inside ? rounded_to_tf32(w[(static_cast<size_t>(t) * features + k) * features + column])
                   : 0;
      }
      const int slice = consumer * Own::kTriples + slot;
      float4* const at = reinterpret_cast<float4*>(
          to + (stage * CrewMemory<A>::kWeightRows + slice / 4 * 64 + row) * kSliceFloats +
          slice % 4 * 8);
      at[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
      at[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    });
  });
}
