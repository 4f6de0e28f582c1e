// Bonus. One mesh on several GPUs: the exchange inside the kernel
//
//     spectral = exp(-evalues[:, None] * times[None, :]) * (basis^T (mass[:, None] * x))    (E, W)
//     out      = basis spectral                                                             (V, W)
//
// and the gradients, see lesson 7. What to do when one GPU's memory or patience is not enough for a
// mesh? Lesson 7's kernel has the answer in it: each of its blocks has a slice of the vertices, and
// what they tell each other is their sums for the spectrum, 128 KB. So the vertices are split over
// the GPUs, too. Each adds up its own spectrum, the spectra are added, and everybody goes on:
//
//     one GPU          lesson 7's one launch, for what the others are compared with
//     NCCL             the kernel is cut where its blocks meet, and the library adds the spectra
//     fused exchange   one launch on each GPU, whose blocks write what they have into the memory of
//                      the other GPUs, and wait there for what comes
//
// NCCL is how this is done in practice, and its all-reduce is fast. What it costs is the kernel
// that ends, two that start, and the basis on chip that the second one has lost. Two GPUs are
// joined by NVLink, which carries 450 GB/s each way and takes a good half microsecond.
//
// --gpus G runs on 1 to as many GPUs as there are. Every GPU's rows are compared with fp64, and
// every GPU's spectrum with that of the first, bit by bit.

#include <deque>
#include <optional>

#include "common/diffusion_gpus.cuh"

using bf16 = __nv_bfloat16;
using Shape = DiffusionShape;
using Operands = DiffusionOperands;

constexpr int kMostGpus = 8;

// ---- Fused exchange -----------------------------------------------------------------------------

// What a launch knows of all GPUs. For each: where its inbox, its sums and its counters are.
// Everything is zero before the first launch; and all GPUs have made as many launches.
//
// inbox (2, gpus, blocks, 4 kQuads): numbers that came from each GPU; launches use the two in turn.
// A word is a number and, above it, that of the launch: it comes as a whole or not at all, so no
// other flag has to follow it and no fence to wait for it. Whoever finds the launch's number above
// has the number below.
// sums_ready (gpus, blocks): how many parts of the sum have been stored, by each GPU that adds.
struct Gpus {
  int count, me;
  int parts;  // of a rank's sum, each of which is added by a block: as many as there are clusters
  uint64_t patience;  // nanoseconds until one that waits gives up
  uint64_t* inbox[kMostGpus];
  float4* totals[kMostGpus];
  unsigned* sums_ready[kMostGpus];
  unsigned* silent;  // this GPU's own; 0, or 1 + the GPU that it has waited for in vain
};

#if HOPPER_CODE
// The sum over the blocks of all GPUs, for a block. When those of its own GPU have met, there is
// one sum on each GPU, and it is in as many parts as there are clusters:
//
//   1. a block writes its part of the own GPU's sum into the inboxes of the other GPUs,
//   2. takes the same part of theirs from its own inbox, as it comes, and adds all up in the order
//      of the GPUs, whichever came first: the sums have the same bits everywhere,
//   3. puts that behind the own GPU's sum, and counts itself in; and everybody waits for
//      the parts of all blocks.
//
// Between two GPUs this is the shortest way: each number travels once, and both add. With G GPUs
// everyone would send all to G - 1. So from three on a part is sent to one GPU only, `group` % G,
// which adds and sends the sum round, into the places of all: 2 (G - 1) / G of the sum leave a GPU,
// whatever G is, in two journeys.
template <typename Part>
struct GpuMeeting {
  using Counter = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;
  static constexpr int kNumbers = 4 * Part::kQuads;
  const Part& part;
  const Meeting<Part>& own;
  const Gpus& gpus;
  // Lane l's: the count of what GPU l adds, before this launch.
  unsigned before = 0;

  __device__ __forceinline__ GpuMeeting(const Part& part, const Meeting<Part>& own,
                                        const Gpus& gpus, bool several)
      : part(part), own(own), gpus(gpus) {
    if (several && lane() < gpus.count) before = ready(lane()).load(cuda::memory_order_relaxed);
  }
  // The sums of all GPUs, behind the two of this GPU's blocks.
  __device__ float4* sums() const { return own.totals + 2 * part.blocks * Part::kQuads; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ AtSystem<unsigned> ready(int adder) const {
    return AtSystem<unsigned>(gpus.sums_ready[gpus.me][adder * part.blocks + part.rank]);
  }
  __device__ bool both_add() const { return gpus.count == 2; }
  __device__ bool adds(int gpu) const {
    return both_add() ? gpu == gpus.me : gpu == part.group % gpus.count;
  }
  // How many parts of this GPU's sum a GPU adds.
  __device__ unsigned parts_of(int adder) const {
    if (both_add()) return adder == gpus.me ? gpus.parts : 0;
    return (gpus.parts - adder + gpus.count - 1) / gpus.count;
  }

  // The word for number i from GPU `from`, in GPU `to`.
  __device__ AtSystem<uint64_t> word(int to, int from, int i) const {
    const int turn = own.start >> 16 & 1;
    const size_t slot = (turn * gpus.count + from) * part.blocks + part.rank;
    return AtSystem<uint64_t>(gpus.inbox[to][slot * kNumbers + i]);
  }
};

// The consumers' part of it, up to the count; afterwards see wait_for_sums().
template <typename Part>
__device__ __forceinline__ void sum_over_gpus(const GpuMeeting<Part>& meeting) {
  const Gpus& gpus = meeting.gpus;
  const int thread = static_cast<int>(threadIdx.x) - 128, group = meeting.part.group;
  if (group >= gpus.parts) return;
  const unsigned launch = (meeting.own.start >> 16) + 1;  // never 0
  const int first = meeting.kNumbers * group / gpus.parts;
  const int end = meeting.kNumbers * (group + 1) / gpus.parts;
  const ptrdiff_t place = meeting.sums() - gpus.totals[gpus.me];  // the same on all GPUs
  const auto sums_of = [&](int gpu) { return reinterpret_cast<float*>(gpus.totals[gpu] + place); };
  const bool adds = meeting.adds(gpus.me);
  Patience patience{gpus.patience, gpus.silent};
  // Several numbers of a thread are on their way at the same time.
  constexpr int kAtOnce = 4;
  for (int start = first + thread; start < end; start += kAtOnce * kConsumers) {
    const auto for_each = [&](auto f) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (start + k * kConsumers < end) f(k, start + k * kConsumers);
      }
    };
    float own[kAtOnce], sums[kAtOnce] = {};
    for_each([&](int k, int i) {
      own[k] = __ldcg(reinterpret_cast<const float*>(meeting.own.totals) + i);
    });
    for (int gpu = 0; gpu < gpus.count; ++gpu) {
      if (gpu == gpus.me || !(meeting.both_add() || meeting.adds(gpu))) continue;
      for_each([&](int k, int i) {
        const uint64_t word = uint64_t{launch} << 32 | __float_as_uint(own[k]);
        meeting.word(gpu, gpus.me, i).store(word, cuda::memory_order_relaxed);
      });
    }
    for (int gpu = 0; adds && gpu < gpus.count; ++gpu) {
      uint64_t got[kAtOnce] = {};
      const auto look = [&](int k, int i) {
        got[k] = meeting.word(gpus.me, gpu, i).load(cuda::memory_order_relaxed);
      };
      if (gpu != gpus.me) {
        for_each(look);
        for_each([&](int k, int i) {
          while (got[k] >> 32 != launch && !patience.ends(gpu)) look(k, i);
        });
      }
      for_each([&](int k, int) {
        sums[k] += gpu == gpus.me ? own[k] : __uint_as_float(static_cast<unsigned>(got[k]));
      });
    }
    for (int gpu = 0; adds && gpu < gpus.count; ++gpu) {
      if (gpu != gpus.me && meeting.both_add()) continue;
      for_each([&](int k, int i) { sums_of(gpu)[i] = sums[k]; });
    }
  }
  if (!adds) return;
  named_barrier(kConsumersBarrier, kConsumers);  // this block's part has been stored
  if (thread < gpus.count && (thread == gpus.me || !meeting.both_add())) {
    unsigned& ready = gpus.sums_ready[thread][gpus.me * meeting.part.blocks + meeting.part.rank];
    if (meeting.both_add()) {  // the others do not look: no need to wait for what they were sent
      typename GpuMeeting<Part>::Counter(ready).fetch_add(1, cuda::memory_order_release);
    } else {
      AtSystem<unsigned>(ready).fetch_add(1, cuda::memory_order_release);
    }
  }
}

// A warp waits until the sums of all parts are there: lane l for those that GPU l adds.
template <typename Part>
__device__ __forceinline__ void wait_for_sums(const GpuMeeting<Part>& meeting) {
  const int gpu = meeting.lane();
  if (gpu < meeting.gpus.count) {
    Patience patience{meeting.gpus.patience, meeting.gpus.silent};
    const auto all_there = [&] {
      return meeting.ready(gpu).load(cuda::memory_order_acquire) - meeting.before >=
             meeting.parts_of(gpu);
    };
    while (!all_there()) {
      if (patience.ends(gpu)) break;
    }
  }
  __syncwarp();
}
#endif

// Lesson 7's kernel; on several GPUs their sums meet when the blocks of each have met. dSpectral is
// added once, by the first GPU. dTimes and the spectrum, of all vertices, every GPU has.
template <Pass kPass, int kColumns, int kStages, bool kSeveralGpus>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    diffusion(const __grid_constant__ DiffusionMaps maps, const Operands operands,
              unsigned* arrivals, const __grid_constant__ Gpus gpus) {
#if HOPPER_CODE
  using Part = MeshPart<128, kColumns, kStages>;
  extern __shared__ __align__(1024) char bytes[];
  const Part part(bytes, maps, operands);
  if (threadIdx.x == 0) prepare_barriers(part);
  start_next_kernel();
  wait_for_previous_kernel();
  const Meeting<Part> meeting(part, arrivals, gpus.totals[gpus.me]);
  const GpuMeeting<Part> all(part, meeting, gpus, kSeveralGpus);
  if (threadIdx.x == 0) load_x(part, 0);
  cluster_meet();

  Phases<kStages> phases;
  if (threadIdx.x < 128) {
    registers_shrink_to<56>();
    if (threadIdx.x == 0) {
      load_forth(part, phases);
      load_back<kStages>(part, phases);
    } else if (threadIdx.x >= 32) {  // the spare warps
      zero_totals(part, meeting.next_totals);
      if constexpr (kPass == Pass::backward) {
        if (gpus.me == 0) add_d_spectral(part, meeting.totals);
        barrier_arrive(&part.shared.spare);
        while (!meeting.all_have_arrived()) {
        }
        if constexpr (kSeveralGpus) wait_for_sums(all);
        store_d_times(part, kSeveralGpus ? all.sums() : meeting.totals);
      }
    }
  } else {
    registers_grow_to<224>();
    SpectrumShare<Part::kTiles, kColumns> share;
    damping_factors(part, share);  // while the first tiles are on their way
    project<kPass>(part, share, phases);
    add_to_totals(part, share, meeting.totals);
    meet<kPass>(part, meeting);
    if constexpr (kSeveralGpus) {
      sum_over_gpus(all);
      if (threadIdx.x < 160) wait_for_sums(all);
      named_barrier(kConsumersBarrier, kConsumers);
    }
    damp_spectrum<kPass>(part, share, kSeveralGpus ? all.sums() : meeting.totals);
    expand<kPass, kStages>(part, phases);
  }
#endif
}

// ---- NCCL ---------------------------------------------------------------------------------------

#if HAS_NCCL
// The kernel up to where its blocks meet: the sum of this GPU's vertices. The end of the kernel is
// the meeting. totals (blocks, kQuads) are zeros at first.
template <Pass kPass, int kColumns, int kStages>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    sum_vertices(const __grid_constant__ DiffusionMaps maps, const Operands operands,
                 float4* totals, bool adds_d_spectral) {
#if HOPPER_CODE
  using Part = MeshPart<128, kColumns, kStages>;
  extern __shared__ __align__(1024) char bytes[];
  const Part part(bytes, maps, operands);
  if (threadIdx.x == 0) prepare_barriers(part);
  start_next_kernel();
  wait_for_previous_kernel();
  totals += part.rank * part.kQuads;
  if (threadIdx.x == 0) load_x(part, 0);
  cluster_meet();

  Phases<kStages> phases;
  if (threadIdx.x < 128) {
    registers_shrink_to<56>();
    if (threadIdx.x == 0) {
      load_forth(part, phases);
    } else if (threadIdx.x >= 32) {
      if (kPass == Pass::backward && adds_d_spectral) add_d_spectral(part, totals);
    }
  } else {
    registers_grow_to<224>();
    SpectrumShare<Part::kTiles, kColumns> share;
    project<kPass>(part, share, phases);
    add_to_totals(part, share, totals);
  }
#endif
}

// And from there on, with the sum of all GPUs. The basis has to come again; and the next call finds
// zeros in `own`, this GPU's sum.
template <Pass kPass, int kColumns, int kStages>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    expand_sums(const __grid_constant__ DiffusionMaps maps, const Operands operands, float4* totals,
                float4* own) {
#if HOPPER_CODE
  using Part = MeshPart<128, kColumns, kStages>;
  extern __shared__ __align__(1024) char bytes[];
  const Part part(bytes, maps, operands);
  if (threadIdx.x == 0) prepare_barriers(part);
  start_next_kernel();
  wait_for_previous_kernel();
  totals += part.rank * part.kQuads;
  cluster_meet();

  Phases<kStages> phases;
  if (threadIdx.x < 128) {
    registers_shrink_to<56>();
    if (threadIdx.x == 0) {
      load_back<0>(part, phases);
    } else if (threadIdx.x >= 32) {
      zero_totals(part, own + part.rank * part.kQuads);
      if constexpr (kPass == Pass::backward) store_d_times(part, totals);
    }
  } else {
    registers_grow_to<224>();
    SpectrumShare<Part::kTiles, kColumns> share;
    damping_factors(part, share);
    damp_spectrum<kPass>(part, share, totals);
    expand<kPass, 0>(part, phases);
  }
#endif
}
#endif  // HAS_NCCL

// ---- Rows --------------------------------------------------------------------------------------

struct Settings {
  uint64_t patience;  // nanoseconds
  bool silent;        // the last GPU is not launched
};

// Lesson 7's one launch on one GPU, or the fused exchange on several.
template <Pass kPass, typename TheTile, bool kSeveralGpus>
void add_diffusion(Mesh& mesh, Settings settings) {
  constexpr auto kernel = diffusion<kPass, TheTile::kColumns, TheTile::kStages, kSeveralGpus>;
  DiffusionProblem& table = mesh.table();
  const int gpus = mesh.gpus();
  const TheTile tile(kernel, gpus, table.shape.W);
  struct State {
    OnEach<unsigned> arrivals, ready, silent;
    OnEach<float4> totals;
    OnEach<uint64_t> inbox;
  };
  const auto state = std::make_shared<std::optional<State>>();
  const size_t blocks = tile.blocks;
  const size_t inbox = kSeveralGpus ? 2 * gpus * blocks * 4 * TheTile::kQuads : 1;
  mesh.at_start([=] {
    state->emplace(State{{gpus, blocks},
                         {gpus, gpus * blocks},
                         {gpus, 1},
                         {gpus, (kSeveralGpus ? 4 : 2) * blocks * TheTile::kQuads},
                         {gpus, inbox}});
  });
  const auto launch = [=, &mesh] {
    Gpus all{};
    all.count = gpus;
    all.patience = settings.patience;
    all.parts = static_cast<int>(tile.clusters(mesh.least_rows()));
    for (int gpu = 0; gpu < gpus; ++gpu) {
      all.inbox[gpu] = (*state)->inbox[gpu];
      all.totals[gpu] = (*state)->totals[gpu];
      all.sums_ready[gpu] = (*state)->ready[gpu];
    }
    on_each_gpu(settings.silent ? gpus - 1 : gpus, [&](int gpu) {
      all.me = gpu;
      all.silent = (*state)->silent[gpu];
      tile.launch(kernel, mesh.operands(gpu), (*state)->arrivals[gpu], all);
    });
  };
  const auto check = [=] {
    on_each_gpu(gpus, [&](int gpu) {
      unsigned silent = 0;
      CUDA_CHECK(cudaMemcpy(&silent, (*state)->silent[gpu], sizeof silent, cudaMemcpyDeviceToHost));
      if (silent == 0) return;
      fail(kDeviceCannot, "GPU %d has waited %llu ms for GPU %u, which does not answer", gpu,
           static_cast<unsigned long long>(settings.patience / 1000000), silent - 1);
    });
  };
  const std::string name =
      kSeveralGpus ? "fused exchange, " + std::to_string(gpus) + " GPUs" : "one GPU";
  Kernel& row = table.problem.kernel(name, kSeveralGpus ? Role::ours : Role::baseline, launch);
  row.hopper_only().resources(kernel, kOneLaunchThreads, TheTile::kBytes);
  row.checks = checks_of<kPass>(mesh, tile);
  if (kSeveralGpus) over_gpus(mesh, row, check);
}

#if HAS_NCCL
template <Pass kPass, typename TheTile>
void add_nccl(Mesh& mesh, Nccl& nccl) {
  constexpr auto sum = sum_vertices<kPass, TheTile::kColumns, TheTile::kStages>;
  constexpr auto expand = expand_sums<kPass, TheTile::kColumns, TheTile::kStages>;
  DiffusionProblem& table = mesh.table();
  const int gpus = mesh.gpus();
  const TheTile tile(sum, gpus, table.shape.W);
  const TheTile again(expand, gpus, table.shape.W);
  const size_t quads = tile.blocks * TheTile::kQuads;
  const auto totals = std::make_shared<std::optional<OnEach<float4>>>();
  mesh.at_start([=] { totals->emplace(gpus, 2 * quads); });
  const auto launch = [=, &mesh, &nccl] {
    std::vector<float*> own, sums;
    on_each_gpu(gpus, [&](int gpu) {
      float4* const totals_here = (**totals)[gpu];
      own.push_back(reinterpret_cast<float*>(totals_here));
      sums.push_back(reinterpret_cast<float*>(totals_here + quads));
      tile.launch(sum, mesh.operands(gpu), totals_here, gpu == 0);
    });
    nccl.all_reduce(own, sums, 4 * quads);
    on_each_gpu(gpus, [&](int gpu) {
      float4* const totals_here = (**totals)[gpu];
      again.launch(expand, mesh.operands(gpu), totals_here + quads, totals_here);
    });
  };
  Kernel& row =
      table.problem.kernel("NCCL, " + std::to_string(gpus) + " GPUs", Role::library, launch);
  row.hopper_only().checks = checks_of<kPass>(mesh, tile);
  over_gpus(mesh, row, [] {});
}
#endif  // HAS_NCCL

template <Pass kPass>
void add_one_gpu(Mesh& mesh) {
  const auto add = is_narrow(mesh.most_rows(), mesh.table().shape.W)
                       ? add_diffusion<kPass, Narrow, false>
                       : add_diffusion<kPass, Wide, false>;
  add(mesh, {});
}

template <Pass kPass>
void add_several_gpus(Mesh& mesh, [[maybe_unused]] Nccl* nccl, bool peers, Settings settings) {
  const bool narrow = is_narrow(mesh.most_rows(), mesh.table().shape.W);
#if HAS_NCCL
  if (nccl) (narrow ? add_nccl<kPass, Narrow> : add_nccl<kPass, Wide>)(mesh, *nccl);
#endif  // HAS_NCCL
  const auto add = narrow ? add_diffusion<kPass, Narrow, true> : add_diffusion<kPass, Wide, true>;
  if (peers) add(mesh, settings);
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_diffusion_gpus",
       .title = "spatial diffusion on a mesh that several GPUs share",
       .n_meaning = "V, vertices of the mesh",
       .n_gpu = 1048576,
       .n_cpu = 512,
       .options = {{"--eigen", "E, eigenvectors: a multiple of 8, at most 128", 128, 8},
                   {"--width", "W, features of a vertex: a multiple of 8, at most 512", 256, 8},
                   {"--gpus", "GPUs that share the mesh, at most 8", 2},
                   {"--patience", "ms that a GPU waits for another one (CPU: 60000)", 2000}},
       .flags = {{"--part", "also one GPU alone with its part: the difference is the exchange"},
                 {"--silent", "leave out the last GPU, to see the others give up"}}});
  const int64_t V = lesson.n(), E = lesson.option("--eigen"), W = lesson.option("--width");
  if (E > 128 || W > kMostWidth) {
    fail(kBadUsage, "--eigen is at most 128, --width at most %d", kMostWidth);
  }
  const int64_t asked = lesson.option("--gpus"), there = gpu_count();
  if (lesson.given("--gpus") && asked > std::min<int64_t>(there, kMostGpus)) {
    fail(kDeviceCannot, "--gpus %lld: there are %lld, and at most %d can share a mesh",
         static_cast<long long>(asked), static_cast<long long>(there), kMostGpus);
  }
  // Each has a tile of 64 vertices at least.
  const int gpus = static_cast<int>(std::min({asked, there, (V + 63) / 64}));
  const bool peers = gpus > 1 && lesson.device().is_hopper() && enable_peer_access(gpus);
  const bool patient = lesson.on_cpu() && !lesson.given("--patience");
  const Settings settings = {
      .patience = 1000000 * static_cast<uint64_t>(patient ? 60000 : lesson.option("--patience")),
      .silent = lesson.flag("--silent")};

  Nccl* nccl = nullptr;
#if HAS_NCCL
  Nccl library(gpus);
  if (library.missing().empty()) nccl = &library;
  if (!nccl) lesson.note("NCCL's row is left out: " + library.missing());
#else
  if (!lesson.on_cpu()) lesson.note("NCCL's row is left out: there was no nccl.h to build with.");
#endif  // HAS_NCCL
  if (gpus < asked) {
    lesson.note("On " + std::to_string(gpus) + " of " + std::to_string(asked) +
                " GPUs: there are no more, or no more tiles of 64 vertices.");
  }
  if (gpus > 1 && !peers) {
    lesson.note("The GPUs cannot write into each other's memory: no fused exchange.");
  }

  Cublas blas;
  std::deque<DiffusionProblem> tables;
  std::deque<Mesh> meshes;
  const auto add = [&]<Pass kPass>(int64_t vertices, int several) {
    DiffusionProblem& table = tables.emplace_back(lesson, blas, kPass, Shape{vertices, E, W});
    table.report_difference = [](double) {};
    add_one_gpu<kPass>(meshes.emplace_back(table, 1));
    if (several > 1) {
      add_several_gpus<kPass>(meshes.emplace_back(table, several), nccl, peers, settings);
      table.problem.compare("fused exchange, " + std::to_string(several) + " GPUs", "one GPU",
                            "Fused exchange: % times as fast as one GPU.");
    }
  };
  add.operator()<Pass::forward>(V, gpus);
  add.operator()<Pass::backward>(V, gpus);
  if (lesson.flag("--part") && gpus > 1) {
    add.operator()<Pass::forward>(meshes.back().most_rows(), 1);
    add.operator()<Pass::backward>(meshes.back().most_rows(), 1);
  }
  return lesson.run();
}
