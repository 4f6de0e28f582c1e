// Bonus. One mesh on several GPUs: the exchange inside the kernel
//
//     spectral = exp(-evalues[:, None] * times[None, :]) * (basis^T (mass[:, None] * x))    (E, W)
//     out      = basis spectral                                                             (V, W)
//
// and the gradients, see lesson 7. What to do when a mesh is too large for one GPU, or one GPU too
// slow? Lesson 7's kernel has the answer in it: each of its blocks has a slice of the vertices, and
// what they tell each other is their sums for the spectrum, 131 kB. So the vertices are split over
// the GPUs, too. Each adds up its own spectrum, the spectra are added, and everybody goes on:
//
//     one GPU          lesson 7's any shape, for what the others are compared with
//     NCCL             the kernel is cut where its blocks meet, and the library adds the spectra
//     fused exchange   one launch on each GPU, whose blocks write what they have into the memory of
//                      the other GPUs, and wait there for what comes
//     NCCL window      the same kernel; NCCL allocates the inboxes and says who sees them where
//
// NCCL, NVIDIA's library for several GPUs, is how this is done in practice; its all-reduce, which
// gives every GPU the sum of all, is fast. But the kernel ends, another one starts, and it has to
// load the basis again. NVLink joins two GPUs: 450 GB/s each way, half a microsecond on the way.
//
// --gpus G runs on 1 to as many GPUs as there are. All rows are compared with fp64, and every GPU's
// spectrum (backward its dTimes) with that of the first, bit by bit.

#include <deque>
#include <optional>

#include "checks/diffusion/gpus.cuh"
#include "operators/diffusion/one_launch.cuh"
#include "primitives/peers.cuh"

using namespace checks;
using namespace operators::diffusion;

// ---- What a row launches ------------------------------------------------------------------------

/// Which kernels, by a GPU's number of vertices, as in operators/diffusion/fused.cuh. Few of them:
/// narrow blocks.
using Narrow = OneLaunchTile<128, 64, 9>;
using Wide = OneLaunchTile<128, 128, 6>;
inline bool is_narrow(int64_t rows, int64_t W) { return rows <= 32768 || W <= 64; }

/// The clusters of a kernel on each GPU.
template <class Tile>
struct Clusters {
  static constexpr int kBytes = sizeof(OneLaunchShared<Tile>);
  unsigned blocks;  // of a cluster
  int capacity;     // how many clusters a GPU holds

  template <typename Kernel>
  Clusters(Kernel* kernel, int gpus, int64_t W)
      : blocks(static_cast<unsigned>((W + Tile::kColumns - 1) / Tile::kColumns)) {
    on_each_gpu(gpus, [&](int) { allow_shared_bytes(kernel, kBytes); });
    capacity = resident_clusters(kernel, blocks, kOneLaunchThreads, kBytes);
  }
  /// None may wait for one that cannot start: all of them are there at the same time.
  unsigned count(int64_t rows) const { return persistent((rows + 63) / 64, capacity); }
  template <typename Kernel, typename... Arguments>
  void launch(Kernel* kernel, const DiffusionOperands& in, const Arguments&... arguments) const {
    launch_clusters(kernel, blocks, true, dim3(blocks, count(in.V)), kOneLaunchThreads, kBytes,
                    DiffusionMaps(in), in, arguments...);
  }
};

/// How far a row may be from fp64: lesson 7's bound, by how many vertices a block adds up.
template <Pass kPass, class Tile>
std::vector<Check> checks_of(const Mesh& mesh, const Clusters<Tile>& clusters) {
  const int64_t tiles = (mesh.most_rows() + 63) / 64, count = clusters.count(mesh.most_rows());
  return mesh.table().checks((tiles + count - 1) / count * 64, 0, kPass == Pass::forward ? 2 : 1,
                             1);
}

using bf16 = __nv_bfloat16;
using Shape = DiffusionShape;
using Operands = DiffusionOperands;

constexpr int kMostGpus = 8;

// ---- Fused exchange -----------------------------------------------------------------------------

// What a launch knows of all GPUs.
//
// inbox (4, gpus + 1, blocks, kQuads), one on each GPU, of quads of floats: what came from each GPU
// and, last, the sums of all. An empty place holds a NaN that arithmetic does not make, so a number
// is its own flag: no other flag follows it, no fence has to be waited for. Launches take the four
// in turn. Launch n empties that of n - 1, and n + 3 fills it again: by then n is over everywhere,
// for a GPU that is in n + 3 has received what each other GPU sent in n + 2, after its own n + 1
// had ended. (Three would do, but launch numbers wrap at 2^16.)
struct Gpus {
  int count, me;
  int pieces;                // into which a rank's sum is cut: no GPU has fewer clusters
  uint64_t patience;         // nanoseconds until one that waits gives up
  float4* inbox[kMostGpus];  // where this GPU sees it
  unsigned* silent;          // this GPU's own; 0, or 1 + the GPU that it has waited for in vain
};

#if HOPPER_CODE
// What a block gets is the sum over the blocks of all GPUs. When the blocks of one GPU have met,
// that GPU has its own sum, cut into gpus.pieces pieces, and the block of cluster p sends piece p.
//
// With two GPUs no more is needed. The piece goes into the other GPU's inbox, and every block reads
// both sums, its own GPU's and the one that comes, and adds them; a + b = b + a, to the bit. If G
// GPUs did this, G - 1 sums would leave each of them, and each block would read G. So from three on
// a piece is sent to one GPU only, `group` % G. Its block adds up the pieces of all and sends the
// sum round: 2 (G - 1) / G of a sum leave a GPU, whatever G is, in two journeys, and each block
// reads one sum.
template <typename Work>
struct GpuMeeting {
  const Work& work;
  const Meeting<Work>& own;
  const Gpus& gpus;

  __device__ bool are_two() const { return gpus.count == 2; }
  // What is in GPU `gpu`'s inbox from GPU `from`; the sums are from number gpus.count. `ago`: for
  // the launch before it is 1.
  __device__ float4* slot(int gpu, int from, int ago = 0) const {
    const int turn = ((own.start >> 16) - ago) & 3;
    return gpus.inbox[gpu] +
           ((turn * (gpus.count + 1) + from) * work.cluster.blocks + work.cluster.rank) *
               Work::kQuads;
  }
  // The GPU that adds up a piece.
  __device__ int adder(int piece) const { return are_two() ? gpus.me : piece % gpus.count; }
  __device__ int begin(int piece) const { return Work::kQuads * piece / gpus.pieces; }
  // begin(piece_of(quad)) <= quad < begin(piece_of(quad) + 1)
  __device__ int piece_of(int quad) const { return ((quad + 1) * gpus.pieces - 1) / Work::kQuads; }

  // Waits for quads k of the inbox, which are at place(k) and come from GPU from(k). Nothing is to
  // be waited for if place(k) is null. Looks at one of them until it has come, then at all.
  template <int n, typename Place, typename From>
  __device__ __forceinline__ void receive(float4 (&quads)[n], Place place, From from,
                                          Patience& patience) const {
#pragma unroll
    for (int k = 0; k < n; ++k) quads[k] = place(k) ? empty_quad() : float4{};
    for (;;) {
      float4* missing = nullptr;
      int gpu = 0;
#pragma unroll
      for (int k = n - 1; k >= 0; --k) {
        if (!is_whole(quads[k])) missing = place(k), gpu = from(k);
      }
      if (!missing) return;
      while (!is_whole(look_at_quad(missing))) {
        if (patience.ends(gpu)) return;
      }
#pragma unroll
      for (int k = 0; k < n; ++k) {
        if (!is_whole(quads[k])) quads[k] = look_at_quad(place(k));
      }
    }
  }

  __device__ float4* inbox() const { return slot(gpus.me, are_two() ? 1 - gpus.me : gpus.count); }

  // sums[k] = quad place(k) of this GPU's own sum; with three GPUs and more zero: what take_other()
  // receives has it then
  template <int n, typename Place>
  __device__ __forceinline__ void take_own(float4 (&sums)[n], Place place) const {
#pragma unroll
    for (int k = 0; k < n; ++k) sums[k] = float4{};
    if (are_two()) Totals{own.totals}.take(sums, place);
  }
  // sums[k] = quad place(k) of what the inbox gets, when it has come
  template <int n, typename Place>
  __device__ __forceinline__ void take_other(float4 (&sums)[n], Place place) const {
    float4* const from = inbox();
    // The adder may wait, too: it gives up first, and names the GPU that is silent.
    Patience patience{are_two() ? gpus.patience : 2 * gpus.patience, gpus.silent};
    receive(
        sums, [&](int k) { return from + place(k); },
        [&](int k) { return are_two() ? 1 - gpus.me : adder(piece_of(place(k))); }, patience);
  }
  template <int n, typename Place>
  __device__ __forceinline__ void take(float4 (&sums)[n], Place place) const {
    float4 mine[n];
    take_own(mine, place);
    take_other(sums, place);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if (are_two()) add(sums[k], mine[k]);
    }
  }
};

// The consumers send the block's piece and, with three GPUs and more, add it up if it is theirs.
template <typename Work>
__device__ __forceinline__ void send_piece(const GpuMeeting<Work>& meeting) {
  const Gpus& gpus = meeting.gpus;
  const int group = meeting.work.group, me = gpus.me;
  if (group >= gpus.pieces) return;
  const int thread = static_cast<int>(threadIdx.x) - 128, adder = meeting.adder(group);
  Patience patience{gpus.patience, gpus.silent};
  for (int i = meeting.begin(group) + thread; i < meeting.begin(group + 1); i += kConsumers) {
    const float4 quad = __ldcg(meeting.own.totals + i);
    if (meeting.are_two()) {
      send_quad(meeting.slot(1 - me, me) + i, quad);
    } else if (adder != me) {
      send_quad(meeting.slot(adder, me) + i, quad);
    } else {
      float4 pieces[kMostGpus], sum = {};
      meeting.receive(
          pieces,
          [&](int gpu) {
            return gpu < gpus.count && gpu != me ? meeting.slot(me, gpu) + i : nullptr;
          },
          [](int gpu) { return gpu; }, patience);
#pragma unroll
      for (int gpu = 0; gpu < kMostGpus; ++gpu) {
        if (gpu < gpus.count) add(sum, gpu == me ? quad : pieces[gpu]);
      }
      for (int gpu = 0; gpu < gpus.count; ++gpu) {
        send_quad(meeting.slot(gpu, gpus.count) + i, sum);
      }
    }
  }
}

// The spare warps empty the inbox of the launch before, by the kind of store that filled it.
template <typename Work>
__device__ __forceinline__ void empty_inbox(const GpuMeeting<Work>& meeting) {
  for (int from = 0; from <= meeting.gpus.count; ++from) {
    float4* const slot = meeting.slot(meeting.gpus.me, from, 1);
    visit_quads(meeting.work, [&](int i) { send_quad(slot + i, empty_quad()); });
  }
}
#endif

// The kernel of lesson 7's *any shape*; on several GPUs their sums meet when the blocks of each
// have met. The first GPU alone adds dSpectral. Every GPU computes the whole spectrum and dTimes,
// of all vertices. Up to 14 registers spill in the code that waits for another GPU.
template <Pass kPass, class Tile, bool kSeveralGpus>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    diffusion(const __grid_constant__ DiffusionMaps maps, const Operands operands,
              unsigned* arrivals, float4* totals, const __grid_constant__ Gpus gpus) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  const Meeting<Work> meeting(work, arrivals, totals);
  const GpuMeeting<Work> all{work, meeting, gpus};
  if (warp == 0 && elect_one()) put_first_x(work);
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(work.shared.pipeline);
      load_forth(work, writer);
      load_back(work, writer.back(), Tile::kStages);
    } else {  // the spare warps
      zero_totals(work, meeting.next_totals);
      if constexpr (kSeveralGpus) empty_inbox(all);
      if constexpr (kPass == Pass::backward) {
        if (gpus.me == 0) add_d_spectral(work, meeting.totals);
        barrier_arrive(&work.shared.spare);
        if constexpr (kSeveralGpus) {
          store_d_times(
              work, [&](auto& sums, auto quad) { all.take_own(sums, quad); },
              [&](auto& sums, auto quad) { all.take_other(sums, quad); });
        } else {
          store_d_times(work, Totals{meeting.totals});
        }
      }
    }
  } else {
    registers_grow_to<224>();
    Reader reader(work.shared.pipeline, work.cluster);
    SpectrumShare<Work> share;
    damping_factors(work, share);  // while the first tiles are on their way
    project<kPass>(work, share, reader);
    add_to_totals(share, meeting.totals);
    meet<kPass>(work, meeting);
    if constexpr (kSeveralGpus) {
      send_piece(all);
      damp_spectrum<kPass>(work, share, all);
    } else {
      damp_spectrum<kPass>(work, share, Totals{meeting.totals});
    }
    expand<kPass>(work, reader.back());
  }
#endif
}

// ---- NCCL ---------------------------------------------------------------------------------------

#if HAS_NCCL
// The kernel up to where its blocks meet: the sum of this GPU's vertices. The end of the kernel is
// the meeting. totals (blocks, kQuads) are zeros at first.
template <Pass kPass, class Tile>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    sum_vertices(const __grid_constant__ DiffusionMaps maps, const Operands operands,
                 float4* totals, bool adds_d_spectral) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  totals += work.cluster.rank * Work::kQuads;
  if (warp == 0 && elect_one()) put_first_x(work);
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(work.shared.pipeline);
      load_forth(work, writer);
    } else if (kPass == Pass::backward && adds_d_spectral) {
      add_d_spectral(work, totals);
    }
  } else {
    registers_grow_to<224>();
    Reader reader(work.shared.pipeline, work.cluster);
    SpectrumShare<Work> share;
    project<kPass>(work, share, reader);
    add_to_totals(share, totals);
  }
#endif
}

// And from there on, with the sum of all GPUs. The basis has to come again; and the next call finds
// zeros in `own`, this GPU's sum.
template <Pass kPass, class Tile>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    expand_sums(const __grid_constant__ DiffusionMaps maps, const Operands operands, float4* totals,
                float4* own) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  totals += work.cluster.rank * Work::kQuads;
  if (warp == 0 && elect_one()) barrier_arrive(&work.shared.met);  // all have met: see sum_vertices
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      load_back(work, Writer(work.shared.pipeline), 0);
    } else {
      zero_totals(work, own + work.cluster.rank * Work::kQuads);
      if constexpr (kPass == Pass::backward) store_d_times(work, Totals{totals});
    }
  } else {
    registers_grow_to<224>();
    SpectrumShare<Work> share;
    damping_factors(work, share);
    damp_spectrum<kPass>(work, share, Totals{totals});
    expand<kPass>(work, Reader(work.shared.pipeline, work.cluster));
  }
#endif
}
#endif  // HAS_NCCL

// ---- Rows --------------------------------------------------------------------------------------

struct Settings {
  uint64_t patience;  // nanoseconds
  bool silent;        // the last GPU is not launched
};

// Lesson 7's any shape on one GPU; on several the fused exchange, whose inboxes `make` allocates.
template <Pass kPass, class Tile, bool kSeveralGpus>
void add_diffusion(Mesh& mesh, const std::string& name, MakeInboxes make, Settings settings) {
  constexpr auto kernel = diffusion<kPass, Tile, kSeveralGpus>;
  DiffusionProblem& table = mesh.table();
  const int gpus = mesh.gpus();
  const Clusters<Tile> clusters(kernel, gpus, table.shape.W);
  struct State {
    OnEach<unsigned> arrivals, silent;
    OnEach<float4> totals;
    Inboxes inbox;
  };
  const auto state = std::make_shared<std::optional<State>>();
  const size_t blocks = clusters.blocks, quads = blocks * Tile::kQuads;
  const size_t inbox = kSeveralGpus ? 4 * (gpus + 1) * quads : 1;
  mesh.at_start([=] {
    state->emplace(State{{gpus, blocks}, {gpus, 1}, {gpus, 2 * quads}, make(gpus, inbox)});
  });
  const auto launch = [=, &mesh] {
    Gpus all{};
    all.count = gpus;
    all.patience = settings.patience;
    all.pieces = static_cast<int>(
        std::min(clusters.count(mesh.least_rows()), clusters.count(mesh.most_rows())));
    on_each_gpu(settings.silent ? gpus - 1 : gpus, [&](int gpu) {
      all.me = gpu;
      for (int peer = 0; peer < gpus; ++peer) all.inbox[peer] = (*state)->inbox(gpu, peer);
      all.silent = (*state)->silent[gpu];
      clusters.launch(kernel, mesh.operands(gpu), (*state)->arrivals[gpu], (*state)->totals[gpu],
                      all);
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
  Kernel& row = table.problem.kernel(name, kSeveralGpus ? Role::ours : Role::baseline, launch);
  row.hopper_only().needs_shared(clusters.kBytes);
  row.checks = checks_of<kPass>(mesh, clusters);
  if (kSeveralGpus) over_gpus(mesh, row, check);
}

#if HAS_NCCL
template <Pass kPass, class Tile>
void add_nccl(Mesh& mesh, const std::shared_ptr<Nccl>& nccl) {
  constexpr auto sum = sum_vertices<kPass, Tile>;
  constexpr auto expand = expand_sums<kPass, Tile>;
  DiffusionProblem& table = mesh.table();
  const int gpus = mesh.gpus();
  const Clusters<Tile> clusters(sum, gpus, table.shape.W);
  const Clusters<Tile> again(expand, gpus, table.shape.W);
  const size_t quads = clusters.blocks * Tile::kQuads;
  const auto totals = std::make_shared<std::optional<OnEach<float4>>>();
  mesh.at_start([=] { totals->emplace(gpus, 2 * quads); });
  const auto launch = [=, &mesh] {
    std::vector<float*> own, sums;
    on_each_gpu(gpus, [&](int gpu) {
      float4* const totals_here = (**totals)[gpu];
      own.push_back(reinterpret_cast<float*>(totals_here));
      sums.push_back(reinterpret_cast<float*>(totals_here + quads));
      clusters.launch(sum, mesh.operands(gpu), totals_here, gpu == 0);
    });
    nccl->all_reduce(own, sums, 4 * quads);
    on_each_gpu(gpus, [&](int gpu) {
      float4* const totals_here = (**totals)[gpu];
      again.launch(expand, mesh.operands(gpu), totals_here + quads, totals_here);
    });
  };
  Kernel& row =
      table.problem.kernel("NCCL, " + std::to_string(gpus) + " GPUs", Role::library, launch);
  row.hopper_only().checks = checks_of<kPass>(mesh, clusters);
  over_gpus(mesh, row, [] {});
}
#endif  // HAS_NCCL

template <Pass kPass>
void add_one_gpu(Mesh& mesh) {
  const auto add = is_narrow(mesh.most_rows(), mesh.table().shape.W)
                       ? add_diffusion<kPass, Narrow, false>
                       : add_diffusion<kPass, Wide, false>;
  add(mesh, "one GPU", peer_inboxes, {});
}

template <Pass kPass>
void add_several_gpus(Mesh& mesh, [[maybe_unused]] const std::shared_ptr<Nccl>& nccl,
                      [[maybe_unused]] bool windows, bool peers, Settings settings) {
  const bool narrow = is_narrow(mesh.most_rows(), mesh.table().shape.W);
  const std::string gpus = ", " + std::to_string(mesh.gpus()) + " GPUs";
#if HAS_NCCL
  if (nccl) (narrow ? add_nccl<kPass, Narrow> : add_nccl<kPass, Wide>)(mesh, nccl);
#endif  // HAS_NCCL
  const auto add = narrow ? add_diffusion<kPass, Narrow, true> : add_diffusion<kPass, Wide, true>;
  if (peers) add(mesh, "fused exchange" + gpus, peer_inboxes, settings);
#if HAS_NCCL_WINDOWS
  if (windows) add(mesh, "NCCL window" + gpus, window_inboxes(nccl), settings);
#endif  // HAS_NCCL_WINDOWS
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_diffusion_gpus",
       .title = "spatial diffusion on a mesh that several GPUs share",
       .n_meaning = "V, vertices of the mesh",
       .n_gpu = 1048576,
       .n_cpu = 512,
       .options = {{"--eigen", "E, eigenvectors, at most 128", 128, 8},
                   {"--width", "W, features of a vertex, at most 512", 256, 8},
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
  const bool peers = gpus > 1 && is_hopper() && enable_peer_access(gpus);
  const bool patient = lesson.on_cpu() && !lesson.given("--patience");
  const Settings settings = {
      .patience = 1000000 * static_cast<uint64_t>(patient ? 60000 : lesson.option("--patience")),
      .silent = lesson.flag("--silent")};

  std::shared_ptr<Nccl> nccl;
  bool windows = false;
#if HAS_NCCL
  nccl = std::make_shared<Nccl>(gpus);
  if (!nccl->missing().empty()) {
    lesson.note("NCCL's rows are left out: " + nccl->missing());
    nccl = nullptr;
  } else if (gpus > 1) {
    const std::string why = why_no_window(nccl);
    if (!why.empty()) lesson.note("NCCL's window is left out: " + why);
    windows = why.empty();
  }
#else
  if (!lesson.on_cpu()) lesson.note("NCCL's rows are left out: there was no nccl.h to build with.");
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
      add_several_gpus<kPass>(meshes.emplace_back(table, several), nccl, windows, peers, settings);
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
