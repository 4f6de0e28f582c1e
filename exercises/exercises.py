"""The exercises: lessons with a piece cut out, or with a mistake in them.

No source of an exercise is kept. Each is made from its lesson, by the table below: what is cut out is
found by the function that it is in and by the text of its first and last line, as tests/lessons/mutants.py
finds its places. So an exercise cannot drift from its lesson: a piece that is no longer there is an
error. `./exercise` writes the files and checks them, exercises/check.py does the work.
"""

from dataclasses import dataclass
from pathlib import Path
import re
import sys

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "exercises"
sys.path.insert(0, str(ROOT / "cpu"))
from cu2cpp import with_headers  # noqa: E402


def source_of(lesson):
    """The file of a program, as seen from the root: solved exercises stand beside the others, and the benchmarks
    of operators in their room."""
    if lesson.startswith("operators_"):
        return f"operators/bench/{lesson.removeprefix('operators_')}.cu"
    solved = f"exercises/{lesson}.cu"
    return solved if (ROOT / solved).exists() else f"{lesson}.cu"


def text_of(file):
    """A reader's file, in whatever encoding an editor has left it."""
    return Path(file).read_text(encoding="utf-8-sig", errors="surrogateescape")


@dataclass(frozen=True)
class Cut:
    """The lines from the one with `first` (its occurrence number `nth`, from 0) to the one with `last`
    ("": only the first) in the definition that starts with `function`. `new` stands in their place."""

    function: str
    first: str
    last: str
    new: str
    nth: int = 0

    def where(self, text, name):
        """Start and end of these lines in the lesson's source `text`."""
        start = text.find(self.function)
        if start < 0:
            raise ValueError(f"exercise {name}: the lesson has no '{self.function}'")
        # clang-format puts the brace that ends a definition at the start of a line.
        brace = re.compile(r"^\}", re.MULTILINE).search(text, start)
        end = brace.end() if brace else len(text)
        at = start
        for _ in range(self.nth + 1):
            at = text.find(self.first, at + 1, end)
            if at < 0:
                raise ValueError(f"exercise {name}: '{self.function}' has no '{self.first}'")
        close = text.find(self.last, at + len(self.first), end) if self.last else at
        if close < 0:
            raise ValueError(f"exercise {name}: no '{self.last}' after '{self.first}'")
        stop = close + len(self.last or self.first)
        return text.rindex("\n", 0, at) + 1, text.index("\n", stop) + 1


@dataclass(frozen=True)
class Goal:
    """What a right kernel has to reach, in what the CPU backend counts: `count` for each of `per`, at
    most `most`. The names are those of cpu/watch/counts.h; where a record has no counts there is no goal."""

    count: str
    per: str
    most: float
    words: str  # "Right, but " + words + ": 16.5, where " + best
    best: str
    unit: float = 1  # so many of `per` are one of what the words say

    def missed(self, counts):
        """What to say if the goal is missed; None if it is reached, or if nothing was counted."""
        if not counts or not counts.get(self.per) or self.count not in counts:
            return None
        value = counts[self.count] / counts[self.per] * self.unit
        if value <= self.most:
            return None
        return f"{self.words}: {value:.3g}, where {self.best}"


@dataclass(frozen=True)
class Exercise:
    name: str
    lesson: str
    title: str
    kernel: str  # its row in the lesson's table
    arguments: tuple  # a small problem, for the CPU
    cuts: tuple
    finds: str  # a regular expression: what the check says of the file as it is given
    columns: str = ""  # of the result, if it is a matrix: N, or the option that says how many
    more: tuple = ()  # further small problems: what does not fit tiles, hard inputs
    sanitizers: tuple = ()  # what looks at a file with right results: address, thread
    wrong_too: bool = False  # and at one with wrong results
    one_step: tuple = ()  # a problem whose tiles nothing overwrites: tells which of two races there is
    gpu_arguments: tuple = ()  # besides the default size, where the row needs an option
    multiprocessors: int = 0  # of the device that the CPU plays; 0: as it likes
    goal: Goal = None
    headers: tuple = ()  # of operators/ or primitives/, which the reader's file has in it, to be cut as well
    # Find the mistake: the mutant (tests/lessons/mutants.py), or the function and the change
    # (tests/lessons/hopper_mutants.py), that the file has; "" if it is none of these.
    mutant: tuple = None

    @property
    def is_mistake(self):
        return self.mutant is not None

    @property
    def number(self):
        return EXERCISES.index(self) + 1

    @property
    def page(self):
        return FOLDER / f"{self.number:02}_{self.name}.md"

    @property
    def file(self):
        """The reader's, which git ignores."""
        return FOLDER / "my" / f"{self.name}.cu"

    @property
    def row(self):
        """The lesson's arguments that select the kernel."""
        return ("--kernel", f"^{self.kernel}$")

    @property
    def problems(self):
        return (self.arguments, *self.more)

    def columns_of(self, arguments):
        """Columns of the result in one of the small problems; 0 if it is no matrix."""
        if self.columns.startswith("--"):
            return int(arguments[arguments.index(self.columns) + 1])
        return int(arguments[0]) if self.columns else 0

    def places(self, text):
        """(start, end, what stands there instead), in order."""
        return sorted((*cut.where(text, self.name), cut.new) for cut in self.cuts)

    def skeleton(self, text):
        """The lesson's source without the pieces, and the pieces."""
        pieces, cut_out, end = [], [], 0
        for start, stop, new in self.places(text):
            pieces += [text[end:start], new]
            cut_out.append(text[start:stop])
            end = stop
        return "".join(pieces) + text[end:], cut_out

    def whole(self):
        """The lesson's source, with the headers in it."""
        return with_headers((ROOT / source_of(self.lesson)).read_text(), *self.headers)

    def source(self):
        """What the reader starts with."""
        return self.skeleton(self.whole())[0]


MATMUL = "2_matmul_sharedmem"
TENSOR_CORES = "3_matmul_tensorcore"
CLIFFORD = "10_clifford_gp"
ATTENTION, BACKWARD = "bonus_attention", "bonus_attention_backward"

# What an exercise can do without: other algebras than 3,0,0, and other widths than 64, take minutes to
# compile. The lines stay in the reader's file; the compiler does not see them.
LEAVE_OUT = {
    CLIFFORD: re.compile(r"^  if \(lesson\.choice\(\"--algebra\"\) == .*$", re.MULTILINE),
    ATTENTION: re.compile(r"^ +table->template add_lesson_kernels<(?:128|256)>\(\);$", re.MULTILINE),
    BACKWARD: re.compile(r"^ +table->template add_lesson_kernels<128>\(\);$", re.MULTILINE),
}


def leave_out(text, lesson):
    return LEAVE_OUT[lesson].sub("", text) if lesson in LEAVE_OUT else text


EXERCISES = [
    Exercise(
        "coalesce", "1_matmul_basic", "which element does a thread compute?",
        "coalesced", ("64",),
        (Cut("void matmul_coalesced(", "const int row =", "const int col =", """\
  // TODO: which element of C does this thread compute? Neighbours in threadIdx.x are neighbours in
  // a warp: they should read neighbouring elements of B.
  const int row = 0;
  const int col = 0;
"""),),
        finds=r"^Wrong from element 1 \(row 0, column 1\) on: it is NaN", columns="N", more=(("33",),),
        sanitizers=("address",),
        goal=Goal("global_load_sectors", "global_load_requests", 2.5, "sectors for each load of a warp",
                  "2.5 are possible: 1 of A and 4 of B"),
    ),
    Exercise(
        "barriers", MATMUL, "two barriers, and the race that each of them prevents",
        "tile", ("33",),
        (Cut("void matmul_tile(", "__syncthreads();", "", """\
    // TODO: the threads of a block have to wait for each other, in two places of this loop.
"""), Cut("void matmul_tile(", "__syncthreads();", "", "", nth=1)),
        finds=r"A race: [\s\S]*\nThere are two races: .*\nIn this run .* met at no barrier", columns="N",
        sanitizers=("thread",), wrong_too=True, one_step=("32",),
        goal=Goal("barriers", "shared_store_requests", 2.02, "barriers for each pair of tiles", "two are enough",
                  unit=2),  # a thread stores two numbers
    ),
    Exercise(
        "registers", MATMUL, "64 sums in the registers of a thread",
        "registers", ("33",),
        (Cut("matmul_registers(const float* A", "float a[TM], b[TN];", "+= a[i] * b[j];\n      }", """\
      // TODO: add to sum[i][j] what this k contributes to the thread's TM x TN elements. Its rows
      // of the tile are y, y + kThreadsY, ...; its columns are x, x + kThreadsX, ...
"""),),
        finds="^Wrong from element 0 .*it is 0,", columns="N",
        goal=Goal("shared_load_requests", "shared_store_requests", 16.1,  # a thread stores one for each k
                  "numbers that a thread reads from shared memory for each k",
                  "16 are enough, 8 of a_tile and 8 of b_tile"),
    ),
    Exercise(
        "padding", MATMUL, "a tile that is transposed on the way, without bank conflicts",
        "vectors", ("36",),
        (Cut("matmul_vectors(const float* A", "a_tile[BK][BM + 4];", "", """\
  // TODO: how long are the rows, if no two lanes of a warp may write to the same bank?
  __shared__ __align__(16) float a_tile[BK][BM];
"""), Cut("matmul_vectors(const float* A", "a_tile[k][row] = a.x;", "a_tile[k + 3][row] = a.w;", """\
      // TODO: `a` has four neighbours of a row of A. Where are they in a_tile[k][row]?
""")),
        finds="^Wrong from element 0 ", columns="N", sanitizers=("address",),
        goal=Goal("shared_store_conflicts", "shared_store_requests", 0.1,
                  "bank conflicts for each store of a warp", "none is necessary"),
    ),
    Exercise(
        "double_buffer", MATMUL, "the next tiles arrive while these are multiplied",
        "async", ("69",),
        (Cut("matmul_async(const float* A", "copy_async_commit();", "", """\
    // TODO: close what this thread copies for this step as a group.
"""), Cut("matmul_async(const float* A", "for (int step = 0; step < kStages - 1; ++step) start_copies(", "", """\
  // TODO: start the copies of the first kStages - 1 steps.
"""), Cut("matmul_async(const float* A", "copy_async_wait<kStages - 2>();", "__syncthreads();", """\
    // TODO: wait until the tiles of this step are there, for all threads.
"""), Cut("matmul_async(const float* A", "start_copies(step + kStages - 1);", "", """\
    // TODO: start the copies that will be needed kStages - 1 steps from now.
""")),
        finds="^Wrong from element 0 ", columns="N", sanitizers=("thread",), wrong_too=True,
        goal=Goal("barriers", "shared_load_requests", 1.01, "barriers for each step", "one is enough",
                  unit=64),  # a thread loads 2 + 2 times for each of 16 k
    ),
    Exercise(
        "fragment", TENSOR_CORES, "which element of the result does a lane hold?",
        "swizzled tiles", ("136",),
        (Cut("PairPlace place_of_pair(", "const int row =", "const int col =", """\
  // TODO: in which row of the 16 x 8 matrix are the lane's elements 0 and 1, and in which column
  // is element 0?
  const int row = 0;
  const int col = 0;
"""),),
        finds="^Wrong from element ", columns="N", sanitizers=("thread",),
    ),
    Exercise(
        "swizzle", TENSOR_CORES, "a box whose pieces have changed places (Hopper)",
        "tile scheduler", ("392",),
        (Cut("void store_tile(", "store_matrices(&out[c / 64].elements[swizzled(", "registers);", """\
      // TODO: the copy engine expects a swizzled box: piece p of row r lies where piece
      // p ^ (r % 8) would be. Here nothing is swizzled. (A row has 64 elements, a piece 8.)
      store_matrices(&out[c / 64].elements[row * 64 + (c % 64 / 8 + piece) * 8], registers);
"""),),
        finds="^Wrong from element ", columns="N", multiprocessors=4,
    ),
    Exercise(
        "phase", TENSOR_CORES, "the phase of an mbarrier (Hopper)",
        "one warpgroup", ("192",),  # every stage once; then the first ones again
        (Cut("matmul_wgmma(const __grid_constant__", "Ring ring{kStages};", "", """\
  struct {
    int stage = 0, parity = 0;
    __device__ void advance() {
      // TODO: the next step is in the next of kStages stages; after the last one comes the first
      // again, whose barrier is then in another phase.
    }
  } ring;
"""),),
        finds=r"^A GPU does not define .* in phase 0, and no barrier_wait\(\) was called for it", columns="N",
        more=(("264",),), sanitizers=("thread",),
    ),
    Exercise(
        "give_back", TENSOR_CORES, "a stage is given back (Hopper)",
        "warp specialization", ("456",),  # twice as many steps as stages: to give back too early shows
        (Cut("matmul_specialized(const __grid_constant__", "if (step > 0 && threadIdx.x % 128 == 0) {",
             "      }", """\
      // TODO: give the stage of the step before back to the producer. Each of the two consumers
      // arrives once.
"""),),
        finds=r"^A deadlock[\s\S]*barrier_wait\(\)[\s\S]*2 of 2 arrivals", columns="N",
        sanitizers=("thread",),
    ),
    Exercise(
        "gate", "6_gating_fused", "the gate as an epilogue",
        "tensor cores", ("1", "--channels", "72", "--hidden", "8"),
        (Cut("struct GateSums {", "for (int e = 0; e < gate[i][j].num_elements; ++e) {",
             "        }", """\
        // TODO: sigmoid(gate) * value, element by element, into gate[i][j]. A fragment has
        // num_elements elements in each lane, x[0], x[1], ...
"""),),
        finds="^Wrong from element 0 ", columns="--hidden",
        more=(("1", "--channels", "72", "--hidden", "40", "--hard-gates"),),
    ),
    Exercise(
        "split_k", "7_diffusion_fused", "the slices of a sum add up",
        "split-K", ("260", "--eigen", "64", "--width", "64"),
        (Cut("add_slices(Operands in", "float sum = 0;", "__syncthreads();", """\
  // TODO: s, the total of element (e, w), is the sum of partials[0][row][lane] to
  // partials[kRowWarps - 1][row][lane] further down. The element's sums in the `slices` slices are
  // at sums[at], sums[at + stride], and so on. Each of the kRowWarps warps that work for the row
  // adds up its share of them. Now the first slice is all there is.
  partials[rank][row][lane] = rank == 0 && inside ? sums[at] : 0;
"""),),
        finds="^Wrong from element 0 ", columns="--width", sanitizers=("thread", "address"), wrong_too=True,
        more=(("260", "--eigen", "24", "--width", "40"),
              ("100", "--eigen", "24", "--width", "40", "--batch", "4")), multiprocessors=4,
    ),
    Exercise(
        "rebase", "9_matmul_softmax", "two parts of a softmax become one",
        "fused rows", ("3", "--inputs", "5", "--classes", "600", "--all"),
        (Cut("MaxSum merge(MaxSum a", "return {largest,", "};", """\
  // TODO: a.sum is relative to a.largest, and b.sum to b.largest. What is the sum of both, relative
  // to `largest`?
  return {largest, a.sum + b.sum};
"""),),
        finds="^Wrong from element ", columns="--classes", more=(
            ("5", "--inputs", "40", "--classes", "300", "--all", "--hard-rows"),
            ("3", "--inputs", "5", "--classes", "7", "--all")),
        gpu_arguments=("4096", "--inputs", "1024", "--classes", "1000", "--all"),
    ),
    Exercise(
        "cross_entropy", "9_softmax_training", "a loss and its gradient beside the softmax",
        "half fused", ("5", "--inputs", "9", "--classes", "10"),
        (Cut("void finish_row(float", "label = results.labels[row];", "__syncwarp();", """\
    label = results.labels[row];
    // TODO: one lane writes loss[row] = -log(probability of the label). The row's logits are still
    // in `out`.
"""), Cut("void finish_row(float", "out[col] = expf(", "", """\
    // TODO: with a label it is the gradient of the loss that is wanted: the probability, less 1 at
    // the label. (`label` is -1 where there is none.)
    out[col] = expf(out[col] - largest) / sum;
""")),
        finds="^Wrong from element 0 ", sanitizers=("thread",),
        more=(("40", "--inputs", "9", "--classes", "70", "--hard-rows"),),
    ),
    Exercise(
        "heads", "9_softmax_training", "a softmax for each head of a row",
        "heads", ("5", "--inputs", "9", "--heads", "3", "--classes", "10"),
        (Cut("head_tiles(Layer<T> layer", "const int head = group % H,", "size_t>(row) * H + head; };", """\
  // TODO: which head do the blocks of this group have, and from which row on? And where among the
  // B * H rows of the result is that head of a row?
  const int head = 0, row0 = group * kTile;
  const auto row_of_head = [&](int row) { return static_cast<size_t>(row); };
"""), Cut("head_tiles(Layer<T> layer", "return inside ? layer.W[", "", """\
        // TODO: a row of W has the C columns of each head, one head after the other.
        return inside ? layer.W[static_cast<size_t>(k) * C + col0 + line] : T(0);
""")),
        finds="^Wrong from element 0 ", columns="--classes",
        more=(("70", "--inputs", "9", "--heads", "3", "--classes", "66"),),
    ),
    Exercise(
        "blade_sign", CLIFFORD, "the sign of a product of blades",
        "fused product", ("3", "--features", "40"),
        (Cut("struct Cl {", "int swaps = 0;", "return sign;", """\
    // TODO: the sign of blade a times blade b. Each swap of two different vectors changes it; what
    // is in both meets itself, and becomes its square: 1 for the first p vectors, -1 for the next
    // q, 0 for the rest.
    return 1;
"""),),
        finds="^It does not compile: .*static assertion failed",
    ),
    Exercise(
        "gradient", CLIFFORD, "the gradient of the geometric product",
        "unfused", ("3", "--features", "40"),
        (Cut("void multiply_grades_gradient(", "const float sum = terms_of_dx<A, t, i>",
             "dw += left", """\
      // TODO: of z_k = w sign x_i y_j: dx_i is w times a sum, and dw is x_i times the same sum.
      // Which function writes that sum out, of which two factors?
      const float sum = 0;
"""), Cut("void multiply_grades_gradient(", "const float sum = terms_of_dy<A, t, j>", "", """\
      // TODO: the same for dy_j.
      const float sum = 0;
""")),
        finds="^Wrong from element ", columns="--features",
    ),
    Exercise(
        "rescale", ATTENTION, "attention, when a larger maximum comes",
        "tensor cores", ("20", "--keys", "200", "--width", "64", "--heads", "1", "--batch", "1", "--full"),
        (Cut("struct OnlineRows {", "factor[r] = exp2_approximate(", "sum[r] *= factor[r];", """\
        // TODO: what has been summed up of the row so far, here and in the kernel, is relative to
        // largest[r], and has to become relative to most[r]. By which factor? (2^x is computed, of
        // logits that are multiplied by `scale`; from[r] is most[r], or 0 where that is -infinity.)
        factor[r] = 1;
        largest[r] = most[r];
"""), Cut("attention_mma(Operands<T> in)", "#pragma unroll\n      for (int j = 0; j < kWidth / 8; ++j) {",
          "result[m][j][i] *= factor[i / 2];\n      }", """\
      // TODO: what is to be done with the results so far, result[m][j][i], before this tile's are
      // added? Of the four numbers of each j two are of the first row, then two of the second.
""")),
        finds="^Wrong from element ",
        more=(("70", "--keys", "130", "--width", "64", "--heads", "2", "--batch", "1", "--causal", "--hard-rows"),),
    ),
    # ---- Find the mistake
    Exercise(
        "right_by_luck", TENSOR_CORES, "the table says ok",
        "wmma shared", ("33",),
        (Cut("matmul_wmma_shared(const half*", "__syncthreads();", "", "", nth=1),),
        finds="^A race", columns="N", sanitizers=("thread",),
        mutant=("3_matmul_tensorcore_matmul_wmma_shared_without_barrier_2",),
    ),
    Exercise(
        "last_tile", MATMUL, "right for N = 64, and for N = 33?",
        "tile", ("33",),
        (Cut("void matmul_tile(", "if (row < n && col < n) C", "", """\
  if (col < n) C[static_cast<size_t>(row) * n + col] = sum;
"""),),
        finds="^Out of bounds", columns="N", sanitizers=("address",),
        mutant=("2_matmul_sharedmem_writes_below_matrix",),
    ),
    Exercise(
        "too_early", TENSOR_CORES, "right up to N = 256, and NaN from there on (Hopper)",
        "warp specialization", ("264",),
        (Cut("matmul_specialized(const __grid_constant__", "wgmma_wait<1>();", "", """\
      wgmma_wait<2>();  // the step before is done: its stage may be refilled
"""),),
        finds="^Wrong from element ", columns="N", sanitizers=("thread",),
        mutant=("matmul_specialized", "wgmma_wait<1>() with + 1"),
    ),
    Exercise(
        "different_each_time", TENSOR_CORES, "another result in each run",
        "wmma global", ("33",),
        (Cut("matmul_wmma_global(const half*", "wmma::fill_fragment(sum, 0.0f);", "", ""),),
        finds="^Wrong from element ", columns="N",
        mutant=("",),
    ),
    Exercise(
        "on_some_gpus", TENSOR_CORES, "right here, wrong elsewhere (Hopper)",
        "tile scheduler", ("392",),
        (Cut("void store_tile(", "shared_fence();", "", ""),),
        finds="^A race", columns="N", sanitizers=("thread",), multiprocessors=4,
        mutant=("store_tile", "shared_fence() without"),
    ),
    Exercise(
        "unscaled", BACKWARD, "two gradients are right, and the third is too large",
        "tensor cores", ("20", "--keys", "70", "--width", "64", "--heads", "1", "--batch", "1", "--full"),
        (Cut("attention_backward_mma(Operands<T> in)", "return pack2<T>(in.scale * pair.x, in.scale * pair.y);", "", """\
                                return pack2<T>(pair.x, pair.y);
"""),),
        finds="^Wrong from element ",
        mutant=("bonus_attention_backward_dK_without_scale",),
    ),
]


def find(word):
    """The exercises that a number, a name or the start of one can mean."""
    if word.isdigit():
        return EXERCISES[int(word) - 1 : int(word)] if int(word) > 0 else []
    same = [exercise for exercise in EXERCISES if exercise.name == word]
    return same or [exercise for exercise in EXERCISES if exercise.name.startswith(word)]
