"""Lessons with one planted mistake each, which a sanitizer, or the lesson itself, has to report.

A check that stays silent proves something only if it would have spoken. SConstruct makes every
mutant below from the lesson's source, in the build with the mutant's sanitizer, which
test_sanitizers.py runs; or, where a wrong result is the mistake, in the plain CPU build for
test_verification.py. A mistake that no longer fits the source fails the build. To compile a lesson
takes long, so all of its mistakes that one sanitizer has to report are in one program, whose environment
says which; where hopper_mutants.py has a program of the lesson, its races are in that, with what makes
results wrong.
"""

from dataclasses import dataclass, replace
from pathlib import Path
import re
import sys

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpu"))
from cu2cpp import with_headers  # noqa: E402
import hopper_mutants  # noqa: E402


@dataclass(frozen=True)
class Mutant:
    """The `nth` occurrence of `old` after `function`, the text that its definition starts with."""

    name: str
    sanitizer: str  # "": none, the lesson's own verification has to find it
    lesson: str
    function: str
    old: str
    new: str
    report: str  # a regular expression
    arguments: tuple  # to run it with
    nth: int = 0
    number: int = 0  # not 0: the program has several mistakes, and makes the one that MISTAKE says
    operator: str = ""  # the file of problems/ that has the mistake, if it is not the lesson's own
    capability: str = "80"  # of the device that it runs on

    @property
    def build(self):
        """The sanitizers' build that the program belongs to: one checks addresses and the rest."""
        return "address" if self.sanitizer == "undefined" else self.sanitizer

    @property
    def program(self):
        if not self.number:
            return self.name
        if self.build != "address" and self.lesson in hopper_mutants.PROGRAMS:
            return hopper_mutants.name_of(self.lesson)
        return f"{self.lesson}_{PROGRAMS[self.sanitizer]}"

    def where(self, text):
        """Where in the lesson's source `text` the mistake is planted."""
        start = text.find(self.function)
        if start < 0:
            raise ValueError(f"mutant {self.name}: {self.operator or self.lesson} has no '{self.function}'")
        end = _end_of_function(text, start)
        found = [match.start() for match in re.finditer(re.escape(self.old), text[start:end])]
        if len(found) <= self.nth:
            raise ValueError(
                f"mutant {self.name}: '{self.function}' of {self.operator or self.lesson} has"
                f" {len(found)} times '{self.old}'; number {self.nth + 1} was to be changed"
            )
        return start + found[self.nth]


# What a program with several mistakes is called.
PROGRAMS = {"": "wrong", "thread": "races", "address": "out_of_bounds", "undefined": "undefined"}


def whole(lesson, text):
    """A lesson's source with the headers that mistakes may be in, too."""
    return with_headers(text, *HEADERS.get(lesson, ()))


def plant(program, lesson, text):
    """The lesson's source `text` with the mistakes of all mutants that share a program."""
    mutants = [mutant for mutant in MUTANTS if mutant.program == program]
    choice = CHOICE if any(mutant.number for mutant in mutants) else ""
    there = ()
    if program == hopper_mutants.name_of(lesson):
        text, choice = hopper_mutants.plant(text, lesson), hopper_mutants.CHOICE
        there = hopper_mutants.HEADERS.get(lesson, ())
    if not any(mutant.operator for mutant in mutants):  # else `text` is not the lesson's
        text = with_headers(text, *(each for each in HEADERS.get(lesson, ()) if each not in there))
        for each in there:  # whose text is there already, and whom those of HEADERS may include, too
            text = text.replace(f'#include "{each}"\n', "\n")
    text = hopper_mutants.made_smaller(text, lesson, SMALLER)
    places = {}  # (where, what stands there) -> what becomes of it: several mistakes may have one place
    for mutant in mutants:
        place = mutant.where(text), mutant.old
        right = places.get(place, mutant.old)
        if not mutant.number:
            places[place] = mutant.new
        elif mutant.old.endswith(";"):
            places[place] = f"{{ if (kMistake == {mutant.number}) {{ {mutant.new} }} else {right} }}"
        else:
            places[place] = f"(kMistake == {mutant.number} ? {mutant.new} : {right})"
    for (at, old), new in sorted(places.items(), reverse=True):
        text = text[:at] + new + text[at + len(old) :]
    return f"{choice}#line 1\n{text}" if choice else text


CHOICE = """#include <cstdlib>
static const int kMistake = std::getenv("MISTAKE") ? std::atoi(std::getenv("MISTAKE")) : 0;
"""


def _end_of_function(text, start):
    """clang-format puts the brace that ends a definition at the start of a line."""
    end = re.compile(r"^\}", re.MULTILINE).search(text, start)
    return end.end() if end else len(text)


MATMUL = "2_matmul_sharedmem"
TENSOR_CORES = "3_matmul_tensorcore"
UNFUSED = "5_gating_unfused"
FUSED = "6_gating_fused"
DIFFUSION = "7_diffusion_fused"
SPATIAL = "8_spatial_gradients"
SOFTMAX = "9_matmul_softmax"
TRAINING = "9_softmax_training"
CLIFFORD = "10_clifford_gp"
STATIONARY = "bonus_matmul_A_stationary"
CONNECTED = "bonus_clifford_fully_connected"
ATTENTION, BACKWARD = "bonus_attention", "bonus_attention_backward"
GPUS = "bonus_diffusion_gpus"
MEMORY = "bonus_memory"
PRODUCT, OF_SOFTMAX, OF_ATTENTION = "operators_product", "operators_softmax", "operators_attention"
OF_CLIFFORD = "operators_clifford"

# Headers that mistakes are made in.
RING = "primitives/async_copy.cuh"
HEADERS = {
    OF_CLIFFORD: ("operators/clifford/layer.cuh", "operators/clifford/streamed.cuh", "operators/clifford/unfused.cuh",
                  "operators/clifford/row_exchange.cuh", "operators/clifford/rows.cuh",
                  "operators/clifford/storage.cuh", "operators/clifford/clifford.cuh",
                  "operators/clifford/algebra.cuh"),
    ATTENTION: (RING,),
    BACKWARD: (RING,),
    OF_ATTENTION: ("operators/attention/layer.cuh", "operators/attention/hopper.cuh",
                   "operators/attention/portable.cuh", RING),
    PRODUCT: ("operators/product/fp32/fp32.cuh", "operators/product/fp32/blocks.cuh",
              "operators/product/fp32/steps.cuh"),
    TENSOR_CORES: (RING,),
    FUSED: ("primitives/wmma_fragments.cuh", RING),
    DIFFUSION: (RING,),
    SPATIAL: (RING,),
    SOFTMAX: (RING,),
    OF_SOFTMAX: ("operators/softmax/softmax_product.cuh", "operators/softmax/hopper/cluster.cuh",
                 "operators/softmax/hopper/plans.cuh", "operators/softmax/hopper/exchange.cuh",
                 "operators/softmax/hopper/narrow.cuh", "operators/softmax/hopper/transposed_product.cuh",
                 "operators/softmax/few.cuh", "operators/softmax/tiles.cuh", "operators/softmax/layer.cuh",
                 "operators/softmax/rows.cuh", "operators/product/portable/fp32_tiles.cuh",
                 "operators/product/split_tf32.cuh", "primitives/row_parts.cuh", RING),
    TRAINING: ("primitives/row_parts.cuh",),
}

# As hopper_mutants.SMALLER, for the programs here: the mistakes of this one are in the fp32 product.
SMALLER = {
    PRODUCT: [(r'table\.(?:template )?add<(?:HalfProduct<T>|Tf32Product<[\w:]+>)>\("[^"]+", shape\)',
               "static_cast<Kernel*>(nullptr)")],
}

# What the mutants run with: the slices of a sum follow from how many multiprocessors there are, and
# two hold no cluster of four.
FEW_MULTIPROCESSORS = {"CUDA_CPU_MULTIPROCESSORS": "2", "CUDA_CPU_COMPUTE_CAPABILITY": "80"}
# Several steps along k, and tiles that stick out of the matrix.
MATMUL_ARGUMENTS = ("33",)
# Blocks share tiles, and one has the end of one and the begin of the next.
SHARED_TILES = ("513",)
# Of short sums small blocks compute a product, of long ones the slices of a block; and few blocks share three tiles.
SHORT_PRODUCT = ("33", "--type", "fp32")
SMALL_PRODUCT = ("33", "--depth", "600", "--type", "fp32")
SHARED_PRODUCT = ("65", "--columns", "129", "--depth", "1500", "--type", "fp32")
# The layer's M = 1024 rows are enough for many blocks; one odd and one even step along K.
LAYER_ARGUMENTS = ("1", "--channels", "72", "--hidden", "8")
# One tile of the spectrum and three slices of V, one of them of two steps.
DIFFUSION_ARGUMENTS = ("200", "--eigen", "64", "--width", "64")
# Two tiles of vertices, two of the inner dimension.
SPATIAL_ARGUMENTS = ("100", "--eigen", "80", "--width", "16")
# Several warps for a row, in packs.
CLIFFORD_ARGUMENTS = ("3", "--features", "260")

# Several steps along features and the batch.
CONNECTED_ARGUMENTS = ("40", "--features", "72", "--algebra", "2,0,0")
# Three tiles of keys, of which the last one is not full.
ATTENTION_ARGUMENTS = ("20", "--keys", "140", "--width", "64", "--heads", "1", "--batch", "1", "--full")
# Three tiles of queries, and two of keys.
BACKWARD_ARGUMENTS = ("70", "--keys", "140", "--width", "64", "--heads", "1", "--batch", "1", "--full")
# Heads that share keys; queries that see no key; maxima that grow in one of a thread's rows, and -infinity.
SHARED_HEADS = ("5", "--keys", "70", "--heads", "4", "--kv-heads", "2", "--width", "64", "--batch", "1", "--full")
NO_KEYS = ("70", "--keys", "33", "--heads", "2", "--kv-heads", "1", "--width", "64", "--batch", "1", "--causal")
HARD_ROWS = ("70", "--keys", "150", "--heads", "2", "--kv-heads", "1", "--width", "64", "--batch", "1", "--full",
             "--hard-rows")
# One query of one head: its keys are divided among the two multiprocessors.
MERGED_ATTENTION_ARGUMENTS = ("1", "--keys", "700", "--width", "64", "--heads", "1", "--batch", "1", "--full")

# Where barriers are: lesson, kernel's name, its function, how many barriers it has.
BARRIERS = [
    (MATMUL, "tile", "void matmul_tile(", 2, MATMUL_ARGUMENTS),
    (MATMUL, "registers", "matmul_registers(", 2, MATMUL_ARGUMENTS),
    (MATMUL, "vectors", "matmul_vectors(", 2, MATMUL_ARGUMENTS),
    (MATMUL, "async", "matmul_async(", 1, MATMUL_ARGUMENTS),
    (MATMUL, "ahead", "void multiply_ahead(", 1, MATMUL_ARGUMENTS),
    (MATMUL, "lean", "matmul_lean(", 1, MATMUL_ARGUMENTS),
    (MATMUL, "stream-K", "void give(", 1, SHARED_TILES),
    (MATMUL, "stream-K", "void add(", 1, SHARED_TILES),
    (MATMUL, "stream-K", "matmul_stream_k(", 1, ("300",)),
    (PRODUCT, "operator", "fp32_product(Fp32Operands", 1, SHARED_PRODUCT),
    (PRODUCT, "operator", "void add_slices(", 2, SMALL_PRODUCT),
    (PRODUCT, "operator", "void add_fp32_steps(", 1, SHORT_PRODUCT),
    (TENSOR_CORES, "wmma shared", "matmul_wmma_shared(", 2, MATMUL_ARGUMENTS),
    (TENSOR_CORES, "swizzled tiles", "matmul_ldmatrix(", 2, MATMUL_ARGUMENTS),
    # The ring of *stages*; three steps and, of an odd N, copies by threads.
    (TENSOR_CORES, "stages", "int next() {", 1, ("65",)),
    # Three steps: after them, lagging warps still read the first of the three stages, which the
    # staging of C overwrites. It leaves the last stage alone, which they would read after five.
    (TENSOR_CORES, "double buffering", "matmul_mma(", 3, ("65",)),
    (FUSED, "tensor cores", "gating_tensor_cores(", 3, LAYER_ARGUMENTS),
    (FUSED, "async tiles", "gating_async(", 2, LAYER_ARGUMENTS),
    # The ring of copies that run ahead: each kernel that has one.
    (FUSED, "async tiles", "int next() {", 1, LAYER_ARGUMENTS),
    (DIFFUSION, "half fused", "int next() {", 1, DIFFUSION_ARGUMENTS),
    # So few elements that two warps share the slices of one.
    (DIFFUSION, "split-K", " add_slices(", 2, ("200", "--eigen", "16", "--width", "32")),
    (SPATIAL, "associated", "int next() {", 1, SPATIAL_ARGUMENTS),
    (SPATIAL, "associated", " add_warps(", 2, SPATIAL_ARGUMENTS),
    (SPATIAL, "associated", " accumulate_backward(", 1, SPATIAL_ARGUMENTS),
    (SPATIAL, "associated", " add_slices(", 1, SPATIAL_ARGUMENTS),
    (SOFTMAX, "fused rows", "block_merge(", 1, ("3", "--inputs", "9", "--classes", "40", "--all")),
    (OF_SOFTMAX, "library", "block_merge(", 1, ("3", "--inputs", "9", "--classes", "300")),
    # More tiles along D than stages.
    (OF_SOFTMAX, "fused: tiles", "int next() {", 1,
     ("3", "--inputs", "150", "--classes", "10", "--all", "--kinds")),
    (OF_SOFTMAX, "fused: rows, D split", "fused_rows_split(", 1,
     ("3", "--inputs", "40", "--classes", "10", "--kinds")),
    (OF_SOFTMAX, "fused: tiles", "all_columns(Factors", 1,
     ("3", "--inputs", "9", "--classes", "10", "--all", "--kinds")),
    (OF_SOFTMAX, "fused: tiles", "is_last_block(unsigned", 1,
     ("3", "--inputs", "260", "--classes", "10", "--all", "--kinds")),
    (SOFTMAX, "fused split-K", "fused_split_k(", 1, ("3", "--inputs", "40", "--classes", "10")),
    # More tiles along D than stages.
    (SOFTMAX, "unfused tiles", "int next() {", 1, ("3", "--inputs", "150", "--classes", "10")),
    # Three blocks that wait for each other.
    (SOFTMAX, "exchange tiles", "exchange_tiles(", 2, ("40", "--inputs", "9", "--classes", "200")),
    # More than a step, and two slices of the batch.
    (TRAINING, "half fused", "void multiply(", 1, ("3", "--inputs", "70", "--classes", "10")),
    (TRAINING, "dlogits in memory", "is_last_block(unsigned", 1,
     ("300", "--inputs", "9", "--classes", "10")),
    (OF_CLIFFORD, "unfused", "sum_partials(", 1, CLIFFORD_ARGUMENTS),
    (OF_CLIFFORD, "unfused", "add_up_row(", 1, CLIFFORD_ARGUMENTS),
    (CLIFFORD, "one launch", "void add_up_block(", 1, CLIFFORD_ARGUMENTS),
    (CLIFFORD, "both on chip", "void add_up_row(", 1, CLIFFORD_ARGUMENTS),
    (CLIFFORD, "one launch each", "sum_partials(", 1, CLIFFORD_ARGUMENTS),
    (CLIFFORD, "row on chip", "forward_on_chip(", 1, CLIFFORD_ARGUMENTS),
    (CLIFFORD, "both on chip", "backward_on_chip(", 1, CLIFFORD_ARGUMENTS),
    (STATIONARY, "tile stationary", "matmul_tile_stationary(", 2, ("129",)),
    (ATTENTION, "rows", "attention_rows(", 1, ATTENTION_ARGUMENTS),
    (ATTENTION, "tensor cores", "int next() {", 1, ATTENTION_ARGUMENTS),
    (BACKWARD, "tensor cores", "int next() {", 1, ATTENTION_ARGUMENTS),
    (BACKWARD, "tensor cores", "attention_backward_mma(", 2, BACKWARD_ARGUMENTS),
    (OF_ATTENTION, "operator", "attention_merge(", 1, MERGED_ATTENTION_ARGUMENTS),
    (OF_ATTENTION, "operator", "int next() {", 1, ATTENTION_ARGUMENTS),
    (CONNECTED, "planes in tiles", "void add_up_block(", 1, CONNECTED_ARGUMENTS),
    (CONNECTED, "planes in tiles", "void forward_tile(", 2, CONNECTED_ARGUMENTS),
    (CONNECTED, "planes in tiles", "void plane_gradients(", 3, CONNECTED_ARGUMENTS),
    (CONNECTED, "planes in tiles", "input_gradient_tiles(", 1, CONNECTED_ARGUMENTS),
    (CONNECTED, "planes in tiles", "void weight_gradient_tile(", 2, CONNECTED_ARGUMENTS),
    (CONNECTED, "planes first", "void transpose(", 1, CONNECTED_ARGUMENTS),
    (CONNECTED, "planes first", "void turn_grade(", 2, CONNECTED_ARGUMENTS),
    (MEMORY, "shared memory", "chase_shared(", 1, ("1",)),
    (MEMORY, "shared memory", "read_shared(", 1, ("1",)),
]


# Rows of Hopper, some of whose kernels have barriers and no word of Hopper.
OF_HOPPER = {"planes first"}
DATA_RACE = "ThreadSanitizer: data race"
# What the first thread reads without the barrier is where it reads next: it leaves the block's memory before
# another thread has written.
FOLLOWED = {"chase_shared("}

# Before these come the numbers of hopper_mutants.py.
FIRST_BARRIER, FIRST_WRONG_RESULT, FIRST_OTHER = 1000, 2000, 3000


def _missing_barriers():
    numbers = {}
    for lesson, kernel, function, count, arguments in BARRIERS:
        where = re.search(r"\w+", re.sub("(void|int) ", "", function))[0]
        for nth in range(count):
            numbers[lesson] = numbers.get(lesson, FIRST_BARRIER) + 1
            yield Mutant(
                number=numbers[lesson],
                name=f"{lesson}_{where}_without_barrier_{nth + 1}",
                sanitizer="thread",
                lesson=lesson,
                function=function,
                old="__syncthreads();",
                new=";",
                nth=nth,
                report="ThreadSanitizer: SEGV" if function in FOLLOWED else DATA_RACE,
                arguments=(*arguments, "--kernel", f"^{kernel}$"),
                capability="90" if kernel in OF_HOPPER else "80",
            )


def _mutant(name, sanitizer, lesson, function, old, new, report, *arguments, nth=0, number=0, operator=""):
    name = f"{lesson}_{name}"
    return Mutant(name, sanitizer, lesson, function, old, new, report, arguments, nth, number, operator)


def _other(which, name, sanitizer, lesson, function, old, new, report, *arguments, nth=0):
    """One of several that share a program: `old` and `new` are statements, or expressions."""
    return _mutant(name, sanitizer, lesson, function, old, new, report, *arguments, nth=nth,
                   number=FIRST_OTHER + which)


def _wrong(which, name, lesson, function, old, new, report, *arguments):
    """Of a lesson that hopper_mutants.py has a program of: `old` and `new` are statements, or expressions."""
    return _mutant(name, "", lesson, function, old, new, report, *arguments,
                   number=FIRST_WRONG_RESULT + which)


def _wrong_on_hopper(*mutant):
    """The same in a kernel that another device does not run."""
    return replace(_wrong(*mutant), capability="90")


NARROW = ("--eigen", "16", "--width", "16")
OUT_OF_BOUNDS_READ = r"heap-buffer-overflow[\s\S]*?\nREAD of size"
OUT_OF_BOUNDS_WRITE = r"heap-buffer-overflow[\s\S]*?\nWRITE of size"

MUTANTS = [
    *_missing_barriers(),
    # ---- Races that are not a missing __syncthreads()
    _other(
        1, "tiles_used_before_they_arrive", "thread", MATMUL, "matmul_async(",
        "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();",
        DATA_RACE, "33", "--kernel", "^async$",
    ),
    _other(
        2, "sums_added_before_they_are_there", "thread", MATMUL, "void add(",
        "wait_for_count(flag, 1, \"the other block's sums\");", ";",
        DATA_RACE, *SHARED_TILES, "--kernel", "^stream-K$",
    ),
    _other(
        1, "sums_added_before_all_have_come", "thread", PRODUCT, "bool add_up(",
        "piece.last - piece.first + 1", "piece.last - piece.first",
        DATA_RACE, *SHARED_PRODUCT, "--kernel", "^operator$",
    ),
    _wrong(
        1, "last_piece_of_a_tile_left_out", PRODUCT, "bool add_up(",
        "block <= piece.last", "block < piece.last",
        "operator .*FAILED", *SHARED_PRODUCT, "--kernel", "^operator$",
    ),
    _other(
        1, "tiles_used_before_they_arrive", "thread", ATTENTION, "int next() {",
        "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();",
        DATA_RACE, *ATTENTION_ARGUMENTS, "--kernel", "^tensor cores$",
    ),
    _wrong(
        1, "mma_sync_without_rescaling", ATTENTION, "attention_mma(",
        "result[m][j][i] *= factor[i / 2];", "static_cast<void>(0);",
        "tensor cores .*FAILED", *ATTENTION_ARGUMENTS, "--kernel", "tensor cores",
    ),
    # The gradients: a factor and a term forgotten, another head of Q, queries that see what the mask hides, and a sum in
    # memory that does not begin with 0.
    *(
        _wrong(
            which, name, BACKWARD, function, old, new, "tensor cores .*FAILED", *arguments, "--kernel", "tensor cores",
        )
        for which, (name, function, old, new, arguments) in enumerate([
            ("dK_without_scale", "attention_backward_mma(", "pack2<T>(in.scale * pair.x, in.scale * pair.y)",
             "pack2<T>(pair.x, pair.y)", BACKWARD_ARGUMENTS),
            ("dS_without_row_sums", "attention_backward_mma(", "ds = p * (ds - row_sum);", "ds = p * ds;",
             BACKWARD_ARGUMENTS),
            ("another_head_of_queries", "attention_backward_mma(", "kv_head * in.group",
             "kv_head", SHARED_HEADS),
            ("no_mask", "attention_backward_mma(", "masked && 8 * r >= own_limit", "false", NO_KEYS),
            ("sums_not_cleared", "attention_row_sums(",
             "*reinterpret_cast<Neighbours<float, kOwn>*>(in.dq_sums + from) = {};", ";", BACKWARD_ARGUMENTS),
        ], start=1)
    ),
    # The same factor on Hopper; a consumer that computes the other one's queries of dQ; a query that sees a key more.
    *(
        _wrong_on_hopper(
            which, name, BACKWARD, function, old, new, "2 of 2 kernels FAILED", *arguments, "--kernel",
            "^(warp specialization|reduce-add)$",
        )
        for which, (name, function, old, new, arguments) in enumerate([
            ("dK_without_scale_on_hopper", "attention_backward_hopper(", "block.store(dK, in.scale, shared.K, maps.dK);",
             "block.store(dK, 1, shared.K, maps.dK);", BACKWARD_ARGUMENTS),
            ("halves_of_dQ_exchanged", "struct HopperBlock ", "halves ? consumer : 0", "halves ? 1 - consumer : 0",
             BACKWARD_ARGUMENTS),
            ("mask_by_a_key_off", "struct HopperBlock ",
             "own_key0 + Product::row(i) >= in.limit(query0 + Product::col(i))",
             "own_key0 + Product::row(i) > in.limit(query0 + Product::col(i))", NO_KEYS),
        ], start=6)
    ),
    _other(
        1, "staging_read_too_early", "thread", FUSED, "struct GateSums {",
        "__syncwarp();", ";",
        DATA_RACE, *LAYER_ARGUMENTS, "--kernel", "^tensor cores$",
    ),
    # The second __syncwarp() of the same loop is as necessary, but goes unnoticed: before the CPU
    # backend's store_matrix_sync() writes, it lets the warp's lanes wait for each other.
    _other(
        1, "sum_not_atomic", "thread", STATIONARY, "matmul_tile_stationary(",
        "atomicAdd(&C[static_cast<size_t>(row) * n + col], sum[i][j]);",
        "C[static_cast<size_t>(row) * n + col] += sum[i][j];",
        DATA_RACE, "129", "--kernel", "^tile stationary$",
    ),
    # ---- Shared memory, out of bounds
    _other(
        1, "reads_past_tile", "address", MATMUL, "void matmul_tile(",
        "k < kTile", "k <= kTile",
        OUT_OF_BOUNDS_READ, "33", "--kernel", "^tile$",
    ),
    _other(
        2, "writes_past_tile", "address", MATMUL, "matmul_registers(",
        "i < BM * BK", "i < BM * BK + kThreads",
        OUT_OF_BOUNDS_WRITE, "33", "--kernel", "^registers$",
    ),
    _other(
        1, "too_little_shared_memory", "address", FUSED, "void add_kernels(",
        "gating_async<Tiles, kStages><<<tiles, Tiles::kThreads, kBytes>>>(table.operands());",
        "gating_async<Tiles, kStages><<<tiles, Tiles::kThreads, kBytes - 32>>>(table.operands());",
        OUT_OF_BOUNDS_WRITE, *LAYER_ARGUMENTS, "--kernel", "^async tiles$",
    ),
    # ---- Global memory, out of bounds
    _mutant(
        "reads_outside_of_matrices", "address", "1_matmul_basic", "void matmul_coalesced(",
        "if (row >= n || col >= n) return;", "",
        OUT_OF_BOUNDS_READ, "33", "--kernel", "^coalesced$",
    ),
    _other(
        3, "writes_below_matrix", "address", MATMUL, "void matmul_tile(",
        "row < n && col < n", "col < n",
        OUT_OF_BOUNDS_WRITE, "33", "--kernel", "^tile$",
    ),
    _other(
        2, "writes_below_result", "address", FUSED, "void store_halves(",
        "row >= rows", "row > rows",
        OUT_OF_BOUNDS_WRITE, "1", "--channels", "7", "--hidden", "3", "--kernel", "^async tiles$",
    ),
    # ---- What C++ leaves undefined
    _other(
        1, "index_past_row_of_tile", "undefined", MATMUL, "void matmul_tile(",
        "k < kTile", "k <= kTile",
        "index 32 out of bounds for type 'float", "33", "--kernel", "^tile$",
    ),
    _other(
        2, "vectors_not_aligned", "undefined", MATMUL, "int main(",
        "n % 4 == 0", "true",
        "misaligned address .* for type .*float4", "33", "--kernel", "^vectors$",
    ),
    # ---- Wrong results
    # The reference's own gradients, which finite differences contradict.
    _mutant(
        "reference_of_d_times_with_the_wrong_sign", "", DIFFUSION, "void spectrum_gradient_fp64(",
        "sum += as_double(evalues[e])", "sum -= as_double(evalues[e])",
        "error: the reference's dTimes and finite differences", "33", *NARROW,
        operator="problems/diffusion/diffusion.cu",
    ),
    _mutant(
        "reference_of_d_x_half_of_it_not_damped", "", DIFFUSION, "void backward_fp64(",
        "(s, evalues, times, count,", "(s, evalues, times, count / 2,",
        "error: the reference's dX and finite differences", "33", *NARROW,
        operator="problems/diffusion/diffusion.cu",
    ),
    # A kernel's gradient, and the sum of a slice that another one's takes the place of.
    _wrong(
        1, "d_times_with_the_wrong_sign", DIFFUSION, " expand_spectrum(",
        "__float2bfloat16_rn(-sum)", "__float2bfloat16_rn(sum)",
        "split-K .* 2.0e\\+00 .*FAILED", "33", *NARROW,
    ),
    _wrong(
        2, "only_some_of_the_slices", DIFFUSION, " add_slices(",
        "slices * rank / kRowWarps", "end",
        "split-K .*FAILED", "2000", *NARROW, "--kernel", "split-K",
    ),
    # The last vertex alone in a step that is left out: of the sums it would be 1 / 64.
    _wrong(
        3, "last_vertex_left_out", DIFFUSION, " project_slices(",
        "(in.V + kV - 1) / kV", "in.V / kV",
        "split-K .*FAILED", "4097", *NARROW, "--kernel", "split-K",
    ),
    # The sums of *one launch* take turns: only the third launch finds one that was not cleared.
    _wrong_on_hopper(
        4, "next_sum_not_cleared", DIFFUSION, "diffusion_one_launch(",
        "next_total[j][thread] = float4{};", "static_cast<void>(0);",
        "one launch .*FAILED", "200", "--eigen", "64", "--width", "64", "--kernel", "^one launch$",
    ),
    _mutant(
        "reference_of_d_x_with_a_wrong_sign", "", SPATIAL, "void backward(const bf16* d_out",
        "product_fp64(blas_, -1, P, kPlain, Li_", "product_fp64(blas_, 1, P, kPlain, Li_",
        "error: the reference's dx and finite differences", "33", *NARROW,
        operator="problems/gradients/gradients.cu",
    ),
    # Complex products with a wrong sign, in ai and in dM2.
    _wrong(
        1, "ai_with_a_wrong_sign", SPATIAL, "void add_rotated(",
        "add_product(ai, xi, lr);", "add_product(ai, minus_xi, lr);",
        "one kernel .*FAILED", "33", *NARROW,
    ),
    _wrong(
        2, "d_M2_with_a_wrong_sign", SPATIAL, "void add_gradients(",
        "add_product(sums.dM2, minus_gi, right);", "add_product(sums.dM2, gi, right);",
        "associated .*FAILED", "33", *NARROW,
    ),
    _wrong(
        3, "only_the_first_slice", SPATIAL, " add_slices(",
        "slice < slices", "slice < 1",
        "associated .*FAILED", "192", *NARROW, "--kernel", "associated",
    ),
    # tanh of large arguments, where exponentials are infinite.
    _wrong(
        4, "tanh_of_exponentials", SPATIAL, "unsigned features(",
        "tanh_approximate", "+[](float u) { return (expf(2 * u) - 1) / (expf(2 * u) + 1); }",
        "associated .* -?nan .*FAILED", "33", *NARROW,
    ),
    _wrong(
        5, "last_vertex_left_out", SPATIAL, " accumulate_backward(",
        "(in.V + BV - 1) / BV", "in.V / BV",
        "associated .*FAILED", "4097", *NARROW, "--kernel", "associated",
    ),
    # Where |tanh(u)| is near 1 hardly a digit is left of the difference.
    _wrong(
        6, "slope_of_a_difference", SPATIAL, "float tanh_slope(",
        "inverse * (four_e * inverse)", "1 - tanhf(u) * tanhf(u)",
        "associated .*FAILED", "100", "--eigen", "48", "--width", "64", "--steep", "--kernel", "associated",
    ),
    # At the sizes that lessons take on the CPU: what is right as long as a loop runs once or twice, as long as a ring
    # of stages has not come around, or where the last step is a whole one.
    _wrong(
        1, "sum_begins_again_in_each_step", MATMUL, "void matmul_tile(",
        "sum += a_tile[y][k] * b_tile[k][x];", "sum = (k > 0 ? sum : 0) + a_tile[y][k] * b_tile[k][x];",
        "tile .*FAILED", "--kernel", "^tile$",
    ),
    _wrong(
        2, "end_of_k_left_out", MATMUL, "matmul_registers(",
        "k0 < n", "k0 + BK <= n",
        "registers .*FAILED", "--kernel", "^registers$",
    ),
    _wrong(
        3, "third_step_left_out", MATMUL, "matmul_async(",
        "start_copies(step + kStages - 1);", "start_copies(step + kStages);",
        "2 of 2 kernels FAILED", "--kernel", "^(async|large tiles)$",
    ),
    _wrong(
        4, "columns_of_A_that_stay_the_same", MATMUL, "matmul_lean(",
        "a_from += BK;", "static_cast<void>(0);",
        "lean .*FAILED", "--kernel", "^lean$",
    ),
    _wrong(
        1, "stage_read_before_it_has_come", TENSOR_CORES, "int next() {",
        "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();",
        "stages .*FAILED", "--kernel", "^stages$",
    ),
    _wrong(
        2, "stage_filled_once", TENSOR_CORES, "matmul_mma(",
        "copies.start(writing, offsets);", "step == 0 ? copies.start(writing, offsets) : static_cast<void>(0);",
        "double buffering .*FAILED", "--kernel", "^double buffering$",
    ),
    *(
        _wrong_on_hopper(
            which, f"{function}_begins_again_with_the_ring", TENSOR_CORES, f"{function}(const __grid_constant__",
            "step > 0", "step % kStages > 0",
            f"{row} .*FAILED", "--kernel", f"^{row}$",
        )
        for which, (function, row) in enumerate(
            [("matmul_wgmma", "one warpgroup"), ("matmul_specialized", "warp specialization")], start=3)
    ),
    _wrong(
        1, "weights_of_the_first_slices_again", FUSED, "gating_tensor_cores(",
        "Tiles::load_weights(W_tiles, in, k0, col0);", "Tiles::load_weights(W_tiles, in, k0 % 128, col0);",
        "1 of 2 kernels FAILED", "--kernel", "^tensor cores$",
    ),
    _wrong(
        2, "weights_of_the_stage_before", FUSED, "gating_async(",
        "Tiles::load_weights(x_tile + Tiles::kTileX, in, step * Tiles::BK, col0);",
        "Tiles::load_weights(x_tile + Tiles::kTileX, in, step % kStages * Tiles::BK, col0);",
        "1 of 2 kernels FAILED", "--kernel", "^async tiles$",
    ),
    _wrong(
        5, "vertices_of_the_first_stages_again", DIFFUSION, " project_slices(",
        "(first + step)", "(first + step % kStages)",
        "2 of 2 kernels FAILED", "--kernel", "^split-K$",
    ),
    *(
        _wrong_on_hopper(
            which, f"{name}_begins_again_with_the_ring", DIFFUSION, function,
            "t > 0", f"t % {stages} > 0",
            f"{row} .*FAILED", "--kernel", f"^{row}$",
        )
        for which, (name, function, stages, row) in enumerate(
            [("one_launch", "diffusion_one_launch(", "kStages", "one launch"),
             ("clusters", "void project(", "kClusterStages", "clusters")], start=6)
    ),
    _wrong_on_hopper(
        1, "sum_begins_again_with_the_ring", GPUS, "void project(",
        "t > 0", "t % Work::kStages > 0",
        "4 of 4 kernels FAILED", "--width", "72", "--patience", "20000",
    ),
    _wrong(
        7, "one_kernel_with_two_boxes_of_columns", SPATIAL, "void __launch_bounds__(kThreads) gradient_features(",
        "xi_rows + box * kTile", "xi_rows + box % 2 * kTile",
        "one kernel .*FAILED", "--kernel", "^one kernel$",
    ),
    _wrong(
        8, "right_factors_of_the_first_box_again", SPATIAL, "accumulate_backward(Operands",
        "right_tiles + 3 * box * kBox * BN", "right_tiles",
        "associated .*FAILED", "--kernel", "^associated$",
    ),
    _wrong_on_hopper(
        9, "M1_of_the_first_step_again", SPATIAL, "void multiply_tile(",
        "right[step].M1", "right[0].M1",
        "2 of 3 kernels FAILED", "--kernel", "^(warp specialization|cluster)$",
    ),
    _wrong(
        1, "sums_that_take_the_place_of_others", STATIONARY, "matmul_tile_stationary(",
        "atomicAdd(&C[static_cast<size_t>(row) * n + col], sum[i][j]);",
        "C[static_cast<size_t>(row) * n + col] = sum[i][j];",
        "tile stationary .*FAILED", "--kernel", "^tile stationary$",
    ),
    _wrong(
        2, "last_columns_left_out", STATIONARY, "matmul_tile_stationary(",
        "col0 < n", "col0 + kCols <= n",
        "tile stationary .*FAILED", "--kernel", "^tile stationary$",
    ),
    _wrong(
        1, "last_features_left_out", CONNECTED, "void forward_tile(",
        "k < layer.features", "k + 8 <= layer.features",
        "2 of 2 kernels FAILED", "--kernel", "^planes in tiles$",
    ),
    _wrong(
        2, "second_step_again", CONNECTED, "void plane_gradients(",
        "fetch(step + 1);", "fetch(1);",
        "1 of 2 kernels FAILED", "--kernel", "^planes in tiles$",
    ),
    _wrong(
        3, "last_rows_left_out", CONNECTED, "void weight_gradient_tile(",
        "n < end", "n + kWeightDepth <= end",
        "1 of 2 kernels FAILED", "--kernel", "^planes in tiles$",
    ),
    # A part of a row that has only -infinity, beside others that have finite numbers.
    _wrong(
        1, "infinity_minus_infinity", SOFTMAX, "MaxSum exponentials(",
        "base_of(largest)", "largest",
        "online tiles .*FAILED", "18", "--inputs", "36", "--classes", "700", "--hard-rows", "--kernel",
        "^online tiles$",
    ),
    # Attention at the sizes that it takes on the CPU, but for the width: what the tiles of keys so far have left is
    # not scaled to a larger maximum. (A width of 64, since these programs have no other.)
    *(
        _wrong_on_hopper(
            which, f"{function}_without_rescaling", ATTENTION, f"{function}(const __grid_constant__ HopperMaps",
            "block.scale_rows(result, factor);", "static_cast<void>(0);",
            f"{row} .*FAILED", "--width", "64", "--full", "--kernel", f"^{row}$",
        )
        for which, (function, row) in enumerate(
            [("attention_hopper", "warp specialization"), ("attention_ping_pong", "ping-pong"),
             ("attention_overlap", "overlap")],
            start=2)
    ),
    _wrong_on_hopper(
        5, "sum_without_rescaling", ATTENTION, "struct OnlineRows {",
        "sum[r] *= factor[r];", "static_cast<void>(0);",
        "4 of 4 kernels FAILED", "--width", "64", "--full", "--kernel", "^(tensor cores|warp specialization|ping-pong|overlap)$",
    ),
    # Another head of K and V: two of them, each for two heads of Q.
    *(
        _wrong_on_hopper(
            which, f"{function}_of_another_head_of_keys", ATTENTION, where,
            f"{head}head / in.group", f"{head}head % (in.heads / in.group)",
            f"{row} .*FAILED", *SHARED_HEADS, "--kernel", f"^{row}$",
        )
        for which, (function, where, head, row) in enumerate([
            ("rows", "attention_rows(", "", "rows"), ("mma_sync", "attention_mma(", "", "tensor cores"),
            ("hopper", "struct HopperBlock ", "", "warp specialization"),
            ("tile_scheduler", "void bring_pieces(", "piece.", "tile scheduler"),
        ], start=6)
    ),
    # Rows that see no key, and keys of which all logits are -infinity.
    _wrong_on_hopper(
        10, "one_over_the_sum_of_no_keys", ATTENTION, "struct OnlineRows {",
        "sum[r] > 0 ? 1 / sum[r] : 0", "1 / sum[r]",
        "2 of 2 kernels FAILED", *NO_KEYS, "--kernel", "^(tensor cores|warp specialization)$",
    ),
    _wrong_on_hopper(
        11, "one_over_the_lazy_sum_of_no_keys", ATTENTION, "struct LazyRows {",
        "none ? 0 : 1 / sum[r]", "1 / sum[r]",
        "tile scheduler .*FAILED", *NO_KEYS, "--kernel", "^tile scheduler$",
    ),
    _wrong_on_hopper(
        12, "infinity_minus_infinity", ATTENTION, "struct OnlineRows {",
        "base_of(most[r])", "most[r]",
        "2 of 2 kernels FAILED", *HARD_ROWS, "--kernel", "^(tensor cores|warp specialization)$",
    ),
    # A maximum that grows is looked for in one of a thread's two rows only. Of the other one exponentials are infinite.
    *(
        _wrong_on_hopper(
            which, f"only_row_{1 - r}_grows{of}", ATTENTION, f"struct {struct} {{", old, new,
            f"{row} .*FAILED", *HARD_ROWS, "--kernel", f"^{row}$",
        )
        for which, (struct, of, r, old, new, row) in enumerate([
            *(("OnlineRows", "", r, f"(most[{r}] - largest[{r}]) * scale > 8", "false", "rare factors")
              for r in (0, 1)),
            *(("LazyRows", "_lazily", r, f"more[{r}] <= most", "true", "tile scheduler") for r in (0, 1)),
        ], start=13)
    ),
    # Three warps that have a row are added up as if they were four.
    _wrong(
        5, "warps_of_a_power_of_two", CLIFFORD, "void add_up_row(",
        "sums = RowReduction<kCount>::collect(partials + warp / warps * warps, warps);",
        "sums = RowReduction<kCount>::collect(partials + warp / warps * warps, 1 << (32 - __clz(warps - 1)));",
        r"\nrow on chip .* FAILED", "2", "--features", "260", "--kernel", "^row on chip$",
    ),
    # e^s / (1 + e^s) is infinity over infinity where s is large.
    _mutant(
        "sigmoid_that_overflows", "", UNFUSED, "float sigmoid(",
        "1 / (1 + __expf(-s))", "__expf(s) / (1 + __expf(s))",
        r"t3 = sigmoid\(t2\) .*FAILED", "1",
    ),
    # One wrong sign among the 64 products of two blades, in what is computed for z, x or y.
    *(
        _wrong(
            which, f"sign_flipped_in_{of}", CLIFFORD, f"Pack<W> terms_of_{of}(",
            f"add_product<A::sign(t, i, j)>(sum, {factors});",
            f"add_product<({term} ? -1 : 1) * A::sign(t, i, j)>(sum, {factors});",
            rf"\n{row} .* FAILED", "5", "--features", "40",
        )
        for which, (of, factors, term, row) in enumerate([
            ("z", "x.blade[i], y.blade[j]", "k == 6 && i == 3", "row on chip"),
            ("dx", "y.blade[j], dz.blade[k]", "i == 6 && k == 3", "both on chip"),
            ("dy", "x.blade[i], dz.blade[k]", "j == 6 && k == 3", "both on chip"),
        ], start=1)
    ),
    # The same where the weight goes into a common factor.
    _wrong(
        4, "sign_flipped_of_a_weighted_factor", CLIFFORD, "W> weighted_product(",
        "add_product<A::sign(t, i, j)>(z.blade[k], weighted, y.blade[j]);",
        "add_product<(k == 6 ? -1 : 1) * A::sign(t, i, j)>(z.blade[k], weighted, y.blade[j]);",
        r"\nrow on chip .* FAILED", "5", "--features", "40",
    ),
    # The same in the operator.
    *(
        _wrong_on_hopper(
            which, f"sign_flipped_in_{of}_of_the_operator", OF_CLIFFORD, "Pack<W> sum_terms(",
            "first.blade[start + n].v[e]",
            f"(of == Of::{of} && fixed == 6 && start + n == 2 ? -1 : 1) * first.blade[start + n].v[e]",
            rf"\n{row} .* FAILED", "5", "--features", "40",
        )
        for which, (of, row) in enumerate(
            [("result", "rows streamed"), ("x", "both streamed"), ("y", "both streamed")], start=1)
    ),
    _wrong_on_hopper(
        4, "sign_flipped_of_a_weighted_factor_of_the_operator", OF_CLIFFORD, "void add_triple(",
        "weighted.v[e]", "(blade == 6 ? -1 : 1) * weighted.v[e]",
        r"\nrows streamed .* FAILED", "5", "--features", "40",
    ),
]

SANITIZED = [mutant for mutant in MUTANTS if mutant.sanitizer]
# ThreadSanitizer's programs with mistakes that are chosen when they run: without one they are the lesson.
INSTEAD = {
    **{hopper_mutants.built_as(name): hopper_mutants.name_of(name) for name in hopper_mutants.PROGRAMS},
    **{mutant.lesson: mutant.program for mutant in MUTANTS if mutant.sanitizer == "thread" and mutant.number},
}
WRONG = [mutant for mutant in MUTANTS if not mutant.sanitizer]
