"""Answers to the exercises that students would give, and that are wrong: `./exercise` has to say so.

To compile a lesson takes long, so all that is wrong of a lesson's exercises is in one program, made
from the lesson as the readers' files are (exercises/exercises.py). It is compiled once for the plain
CPU build, and once for each sanitizer that an exercise needs. MISTAKE in its environment says which
answer it has: 0 is the exercise as it is given, 1 and so on are those below. Of exercises with a
mistake to be found it is 100, 101 and so on: their kernels have a piece cut out for another exercise.
"""

from dataclasses import dataclass
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpu"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "exercises"))
from cu2cpp import with_headers  # noqa: E402
from exercises import EXERCISES, leave_out  # noqa: E402

FIRST_MISTAKE = 100


@dataclass(frozen=True)
class Answer:
    """Each edit is (old, new), in the first of the exercise's functions that has `old`. A statement takes
    the place of a statement; what stands before a comment, that of the comment; and an expression that
    of an expression, which may be given as (where it stands, old, new)."""

    finds: str  # a regular expression: what is said of it
    edits: tuple
    like: int = None  # which other answer has the same effect, so that nothing tells one from the other


def answer(finds, *edits, like=None):
    return Answer(finds, edits, like)


# What several places of an answer have in common.
ROW, COL = ("const int row = 0;", "0"), ("const int col = 0;", "0")
TILE_PRODUCT = "for (int k = 0; k < kTile; ++k) sum += a_tile[y][k] * b_tile[k][x];"
START_COPIES = "for (int step = 0; step < kStages - 1; ++step) start_copies(step);"
CLOSE, START = "// TODO: close what this thread", "// TODO: start the copies of the"
WAIT, NEXT = "// TODO: wait until", "// TODO: start the copies that"
CLOSE_GROUP, GO_ON = "copy_async_commit();", "start_copies(step + kStages - 1);"
WAIT_FOR_ALL = "copy_async_wait<kStages - 2>(); __syncthreads();"
SWIZZLED = "store_matrices(&out[c / 64].elements[row * 64 + (c % 64 / 8 + piece) * 8], registers);"
ADVANCE = "// TODO: the next step is in"
GIVE_BACK = "// TODO: give the stage"
GATE = "// TODO: sigmoid(gate)"
SLICES = "partials[rank][row][lane] = rank == 0 && inside ? sums[at] : 0;"
MERGED = "return {largest, a.sum + b.sum};"
FACTOR, RESULTS = "factor[r] = 1;", "// TODO: what is to be done with the results"
NEW_FACTOR = "factor[r] = exp2_approximate((largest[r] - from[r]) * scale);"
SCALE_RESULTS = """for (int j = 0; j < kWidth / 8; ++j) {
        for (int i = 0; i < 4; ++i) result[m][j][i] *= factor[i / 2];
      }"""
LOSS, GRADIENT = "// TODO: one lane writes", "out[col] = expf(out[col] - largest) / sum;"
LABEL = "out[col] = expf(out[col] - largest) / sum - (col == label ? 1 : 0);"
READ_LABEL = "if (lane == 0) results.loss[row] = logf(sum) - (out[label] - largest);"
HEAD = "const int head = 0, row0 = group * kTile;"
HEAD_OF_ROW = "return static_cast<size_t>(row);"
HEAD_OF_W = "static_cast<size_t>(k) * C + col0 + line"
DX, DY = ("const float sum = 0;", "0"), ("const float sum = 0;", "0", 1)


def stored(first, second, third, fourth):
    """The four stores of exercise padding."""
    return ("// TODO: `a` has", f"{first} = a.x; {second} = a.y; {third} = a.z; {fourth} = a.w;")


def in_all(loop):
    return f"for (int e = 0; e < gate[i][j].num_elements; ++e) {{ {loop} }}"


def sums(loop, end="", begin=""):
    return (SLICES, f"{begin} float sum = 0; {loop} partials[rank][row][lane] = sum; {end}")


SHARE = "for (int s = slices * rank / kRowWarps; s < slices * (rank + 1) / kRowWarps; ++s)"

# What a program has to be made into before an answer can be chosen while it runs.
PREPARED = {
    "padding": [("__shared__ __align__(16) float a_tile[BK][BM];",
                 "__shared__ __align__(16) float a_memory[BK * (BM + 4)];\n"
                 "  const struct { float* memory; int length;\n"
                 "    float* operator[](int k) const { return memory + k * length; } } a_tile{a_memory,\n"
                 "    kMistake == 2 ? BM + 1 : kMistake > 2 ? BM + 4 : BM};")],
}

UNSCALED = ("return pack2<T>(pair.x, pair.y);", "return pack2<T>(pair.x, pair.y);", 1)  # the second is of dK

WRONG = {
    "coalesce": [
        answer("^Right, but sectors for each load of a warp: 16.5",
               (*ROW, "blockIdx.x * blockDim.x + threadIdx.x"), (*COL, "blockIdx.y * blockDim.y + threadIdx.y")),
        answer("^Wrong from element 32 .*it is NaN", (*ROW, "threadIdx.y"), (*COL, "threadIdx.x")),
        answer("^Out of bounds|^Wrong from element",
               (*ROW, "blockIdx.y * blockDim.y + threadIdx.y"), (*COL, "blockIdx.x * blockDim.x + threadIdx.x"),
               ("if (row >= n || col >= n) return;", ";")),
        answer("^Out of bounds|^Wrong from element",
               (*ROW, "blockIdx.y * blockDim.y + threadIdx.y"), (*COL, "blockIdx.x * blockDim.x + threadIdx.x"),
               ("if (row >= n || col >= n) return;", "if (row >= n) return;"), like=3),
        answer(r"Does something call exit\(\)", (
            "if (row >= n || col >= n) return;", "if (row + col == 0) exit(0); if (row >= n || col >= n) return;")),
    ],
    "barriers": [
        answer("\nThis race is between the reads of a tile and the writes of the next one",
               ("// TODO: the threads", "__syncthreads();")),
        answer("\nThis race is between the writes of a tile and the reads of it",
               (TILE_PRODUCT, f"{TILE_PRODUCT} __syncthreads();")),
        answer("has exited|^A deadlock|does not define",
               ("// TODO: the threads", "if (row < n && col < n) __syncthreads();"),
               (TILE_PRODUCT, f"{TILE_PRODUCT} if (row < n && col < n) __syncthreads();")),
        answer("\nThere are two races", ("// TODO: the threads", "__syncwarp();"),
               (TILE_PRODUCT, f"{TILE_PRODUCT} __syncwarp();")),
        answer("^Right, but barriers for each pair of tiles: 3", ("// TODO: the threads", "__syncthreads();"),
               (TILE_PRODUCT, f"{TILE_PRODUCT} __syncthreads(); __syncthreads();")),
    ],
    "registers": [
        answer("^Wrong", ("// TODO: add to sum", """for (int i = 0; i < TM; ++i) for (int j = 0; j < TN; ++j)
          sum[i][j] += a_tile[y * TM + i][k] * b_tile[k][x * TN + j];""")),
        answer("^Wrong", ("// TODO: add to sum", """for (int i = 0; i < TM; ++i) for (int j = 0; j < TN; ++j)
          sum[j][i] += a_tile[y + i * kThreadsY][k] * b_tile[k][x + j * kThreadsX];""")),
        answer("^Wrong", ("// TODO: add to sum", """for (int i = 0; i < TM; ++i)
          sum[i][i] += a_tile[y + i * kThreadsY][k] * b_tile[k][x + i * kThreadsX];""")),
        answer("^Right, but numbers that a thread reads .*: [0-9]+, where 16", ("// TODO: add to sum", """for (int i = 0; i < TM; ++i) for (int j = 0; j < TN; ++j)
          sum[i][j] += a_tile[y + i * kThreadsY][k] * b_tile[k][x + j * kThreadsX];""")),
    ],
    "padding": [
        answer("^Right, but bank conflicts",
               stored("a_tile[k][row]", "a_tile[k + 1][row]", "a_tile[k + 2][row]", "a_tile[k + 3][row]")),
        answer("^Undefined: .*misaligned|^Right, but bank",
               stored("a_tile[k][row]", "a_tile[k + 1][row]", "a_tile[k + 2][row]", "a_tile[k + 3][row]")),
        answer("^Wrong", stored("a_tile[k + 3][row]", "a_tile[k + 2][row]", "a_tile[k + 1][row]", "a_tile[k][row]")),
        answer("^Wrong|^Out", stored("a_tile[k][row]", "a_tile[k + 2][row]", "a_tile[k + 1][row]", "a_tile[k + 3][row]")),
    ],
    "double_buffer": [
        # A group only where there are copies.
        answer("^Wrong", (CLOSE, "if (step < steps) copy_async_commit();"), (START, START_COPIES),
               (WAIT, WAIT_FOR_ALL), (NEXT, GO_ON)),
        answer("^Wrong", (CLOSE, CLOSE_GROUP), (START, START_COPIES),
               (WAIT, "copy_async_wait<kStages - 1>(); __syncthreads();"), (NEXT, GO_ON)),
        answer("^A race|^Wrong", (CLOSE, CLOSE_GROUP), (START, START_COPIES),
               (WAIT, "copy_async_wait<kStages - 2>();"), (NEXT, GO_ON)),
        answer("^A race|^Wrong", (CLOSE, CLOSE_GROUP), (START, START_COPIES),
               (WAIT, "__syncthreads(); copy_async_wait<kStages - 2>();"), (NEXT, GO_ON)),
        answer("^Right, but barriers for each step: 2", (CLOSE, CLOSE_GROUP), (START, START_COPIES),
               (WAIT, WAIT_FOR_ALL), (NEXT, f"__syncthreads(); {GO_ON}")),
    ],
    "fragment": [
        answer("^Wrong", (*ROW, "lane / 4"), (*COL, "lane % 4")),
        answer("^Wrong", (*ROW, "lane % 8"), (*COL, "lane / 8 * 2")),
        answer("^Wrong", (*ROW, "lane / 8"), (*COL, "lane % 8")),
    ],
    "swizzle": [
        answer("^Wrong|does not define|^A deadlock|^Out|^It crashed",
               (SWIZZLED, "store_matrices(&out[c / 64].elements[row * 64 + ((c % 64 / 8 + piece) ^ row) * 8], registers);")),
        answer("^Wrong|does not define|^A deadlock",
               (SWIZZLED, "store_matrices(&out[c / 64].elements[row * 64 + (c % 64 / 8 + piece) ^ row % 8 * 8], registers);")),
        answer("^Wrong",
               (SWIZZLED, "store_matrices(&out[c / 64].elements[row * 64 + (c % 64 / 8 + piece + row) % 8 * 8], registers);")),
    ],
    "phase": [
        answer("to 1 of its barriers.* phase 0, of parity 0, .* told parity 1, at line",
               (ADVANCE, "if (++stage == kStages) stage = 0; parity ^= 1;")),
        answer("to 2 of its barriers.* phase 1, of parity 1, .* told parity 0, at line[\\s\\S]*N = 264",
               (ADVANCE, "if (++stage == kStages) stage = 0;")),
        answer("not in this block's shared memory", (ADVANCE, "++stage;")),
    ],
    "give_back": [
        answer("one arrival too many|arrivals",
               (GIVE_BACK, "if (step > 0) barrier_arrive(&empty[(ring.stage + kStages - 1) % kStages]);")),
        answer("^Wrong", (GIVE_BACK, "if (threadIdx.x % 128 == 0) barrier_arrive(&empty[ring.stage]);")),
        answer("^A deadlock[\\s\\S]* 1 of 2 arrivals",
               (GIVE_BACK, "if (step > 0 && threadIdx.x == 128) barrier_arrive(&empty[(ring.stage + kStages - 1) % kStages]);")),
        answer("", (GIVE_BACK, "if (threadIdx.x % 128 == 0) barrier_arrive(&empty[(ring.stage + kStages - 1) % kStages]);")),
    ],
    "gate": [
        answer("^Wrong", (GATE, in_all("gate[i][j].x[e] = gate[i][j].x[e] * value[i][j].x[e];"))),
        answer("^Wrong", (GATE, in_all("gate[i][j].x[e] = gate[i][j].x[e] * sigmoid(value[i][j].x[e]);"))),
        answer("^Wrong.*it is NaN.*\n.*--hard-gates",
               (GATE, in_all("const float g = __expf(gate[i][j].x[e]); gate[i][j].x[e] = g / (1 + g) * value[i][j].x[e];"))),
        answer("^Wrong", (GATE, "for (int e = 0; e < 4; ++e) gate[i][j].x[e] = sigmoid(gate[i][j].x[e]) * value[i][j].x[e];")),
    ],
    "split_k": [
        # The rest of the slices is nobody's.
        answer("^Wrong", sums("const int share = slices / kRowWarps;"
                              " if (inside) for (int s = rank * share; s < (rank + 1) * share; ++s) sum += sums[s * stride + at];",
                              "__syncthreads();")),
        # Elements outside of the matrix.
        answer("^Out of bounds", sums(f"{SHARE} sum += sums[s * stride + at];", "__syncthreads();")),
        # Not all come to the barrier.
        answer("has exited", sums(f"{SHARE} sum += sums[s * stride + at];", "__syncthreads();", "if (!inside) return;")),
        # No barrier, as in the file that is given.
        answer("A race: ", sums(f"if (inside) {SHARE} sum += sums[s * stride + at];"), like=0),
        # Each warp all slices.
        answer("^Wrong", sums("if (inside) for (int s = 0; s < slices; ++s) sum += sums[s * stride + at];",
                              "__syncthreads();")),
        # Only one of the two sides of the matrix is looked at: E, then W, has to be a size that fits no tile.
        answer("^Out of bounds", sums(f"if (w < in.W) {SHARE} sum += sums[s * stride + at];", "__syncthreads();"),
               like=2),
        answer("^Out of bounds", sums(f"if (e < in.E) {SHARE} sum += sums[s * stride + at];", "__syncthreads();"),
               like=2),
        # Whole warps that stay away.
        answer("has exited", sums(f"if (inside) {SHARE} sum += sums[s * stride + at];", "__syncthreads();",
                                  "if (e >= in.E) return;")),
    ],
    "rebase": [
        # No part of 600 classes is empty.
        answer("it is NaN.*\n.*--hard-rows",
               (MERGED, "return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};")),
        answer("it is NaN.*\n.*--hard-rows",
               (MERGED, "return {largest, a.sum * expf(a.largest) / expf(largest) + b.sum * expf(b.largest) / expf(largest)};"),
               like=1),
        answer("^Wrong", (MERGED, "return {largest, a.sum * rebase(largest, a.largest) + b.sum * rebase(largest, b.largest)};")),
        answer("^Wrong", (MERGED, "return {largest, a.sum * rebase(a.largest, b.largest) + b.sum};")),
    ],
    "cross_entropy": [
        # The logarithm of the probability.
        answer("^Wrong.*it is inf.*\n.*--hard-rows",
               (LOSS, "if (lane == 0) results.loss[row] = -logf(expf(out[label] - largest) / sum); __syncwarp();"),
               (GRADIENT, LABEL)),
        answer("^A race|^Wrong", (LOSS, READ_LABEL), (GRADIENT, LABEL)),
        answer("^Wrong", (LOSS, f"{READ_LABEL} __syncwarp();"),
               (GRADIENT, "out[col] = expf(out[col] - largest) / sum - (col == 0 ? 1 : 0);")),
        answer("^Wrong", (LOSS, "if (lane == 0) results.loss[row] = out[label] - largest - logf(sum); __syncwarp();"),
               (GRADIENT, LABEL)),
    ],
    "heads": [
        # Right for 64 rows and fewer.
        answer("^Wrong.*\n.*N = 70", (HEAD, "0", "group % H"), (HEAD, "group * kTile", "0"),
               (HEAD_OF_ROW, "return static_cast<size_t>(row) * H + head;"),
               (HEAD_OF_W, "(static_cast<size_t>(k) * H + head) * C + col0 + line")),
        answer("^Wrong", (HEAD, "0", "group % H"), (HEAD, "group * kTile", "group / H * kTile"),
               (HEAD_OF_ROW, "return static_cast<size_t>(head) * B + row;"),
               (HEAD_OF_W, "(static_cast<size_t>(k) * H + head) * C + col0 + line")),
        answer("^Wrong", (HEAD, "0", "group % H"), (HEAD, "group * kTile", "group / H * kTile"),
               (HEAD_OF_ROW, "return static_cast<size_t>(row) * H + head;"),
               (HEAD_OF_W, "(static_cast<size_t>(head) * D + k) * C + col0 + line")),
        answer("^Wrong", (HEAD, "0", "group % H"), (HEAD, "group * kTile", "group / H * kTile"),
               (HEAD_OF_ROW, "return static_cast<size_t>(row) * H + head;")),
    ],
    "gradient": [
        answer("^Wrong", (*DX, "(terms_of_dx<A, t, i>(right, d).v[0])"),
               (*DY, "(terms_of_dy<A, t, j>(left, d).v[0])")),  # and dw is forgotten
        answer("^Wrong", (*DX, "(dw += left.blade[i].v[0] * terms_of_dx<A, t, i>(right, d).v[0],"
                          " terms_of_dx<A, t, i>(d, right).v[0])"),
               (*DY, "(terms_of_dy<A, t, j>(d, left).v[0])")),
        answer("^Wrong", (*DX, "(dw += weight * left.blade[i].v[0] * terms_of_dx<A, t, i>(right, d).v[0],"
                          " terms_of_dx<A, t, i>(right, d).v[0])"),
               (*DY, "(terms_of_dy<A, t, j>(left, d).v[0])")),
    ],
    "rescale": [
        answer("^Wrong", (FACTOR, f"{NEW_FACTOR} sum[r] *= factor[r];")),  # the sum alone
        answer("^Wrong", (FACTOR, NEW_FACTOR), (RESULTS, SCALE_RESULTS)),  # the results alone
        answer("^Wrong", (FACTOR, "factor[r] = exp2_approximate((from[r] - largest[r]) * scale); sum[r] *= factor[r];"),
               (RESULTS, SCALE_RESULTS)),
        # The maximum without the scale; and rows that have nothing but -infinity so far.
        answer("^Wrong", (FACTOR, "factor[r] = exp2_approximate(largest[r] - most[r]); sum[r] *= factor[r];"),
               (RESULTS, SCALE_RESULTS)),
        answer("it is NaN.*\n.*--hard-rows",
               (FACTOR, "factor[r] = exp2_approximate((largest[r] - most[r]) * scale); sum[r] *= factor[r];"),
               (RESULTS, SCALE_RESULTS)),
        # Both rows by the factor of one.
        answer("^Wrong", (FACTOR, f"{NEW_FACTOR} sum[r] *= factor[r];"),
               (RESULTS, SCALE_RESULTS.replace("i / 2", "i % 2"))),
    ],
    # ---- Find the mistake: what is mended in a wrong way.
    "right_by_luck": [
        answer("^A race", ("/* right_by_luck */;", "__syncwarp();")),
        answer("^A race", ("copy_async_wait<0>();", "copy_async_wait<0>(); __syncthreads();")),
        answer("^A race", ("/* right_by_luck */;", "if (warp == 0) __syncwarp(); __threadfence_block();")),
    ],
    "last_tile": [
        answer("^Out of bounds|^Wrong", ("if (col < n) C", "col < n", "row < n")),
        answer("^Out of bounds|^Wrong", ("if (col < n) C", "col < n", "x < n && y < n")),
        answer("^Wrong|^Out", ("if (col < n) C", "col < n", "row * n + col < n * n")),
        answer("has exited", ("float sum = 0;", "0", "({ if (row >= n || col >= n) return; 0; })")),
    ],
    "too_early": [
        answer("", ("if (step > 0 && threadIdx.x % 128 == 0) {", "step > 0", "step > 1")),
        answer("1 of 2 arrivals", ("if (step > 0 && threadIdx.x % 128 == 0) {", "threadIdx.x % 128 == 0",
                                   "threadIdx.x == 128")),
        answer("^Wrong", ("wgmma_wait<2>();", ";")),
    ],
    "different_each_time": [
        answer("^Wrong", ("wmma::mma_sync(sum, a, b, sum);", "wmma::fill_fragment(sum, 0.0f); wmma::mma_sync(sum, a, b, sum);")),
        answer("^Wrong", ("/* different_each_time */;", "wmma::fill_fragment(sum, 1.0f);")),
        answer("^Wrong", ("/* different_each_time */;", "if (threadIdx.y == 0) wmma::fill_fragment(sum, 0.0f);")),
    ],
    "on_some_gpus": [
        answer("^A race", ("/* on_some_gpus */;", "__threadfence();")),
        answer("^A race", ("/* on_some_gpus */;", "__threadfence_block(); __syncwarp();")),
        answer("^A race", ("/* on_some_gpus */;", "named_barrier(1 + consumer, 128);")),
    ],
    "unscaled": [
        answer("^Wrong", (*UNSCALED, "return pack2<T>(in.scale * pair.x, pair.y);")),  # every other column
        answer("^Wrong", (*UNSCALED, "return pack2<T>(in.scale * in.scale * pair.x, in.scale * in.scale * pair.y);")),
        answer("^Wrong", (*UNSCALED, "return pack2<T>(scale * pair.x, scale * pair.y);")),  # that of powers of 2
    ],
}

CHOICE = """#include <cstdlib>
static const int kMistake = std::getenv("MISTAKE") ? std::atoi(std::getenv("MISTAKE")) : 0;
#line 1
"""


def number_of(exercise, which=0):
    """What MISTAKE is for its answer number `which`, from 1; 0: the exercise as it is given."""
    return (FIRST_MISTAKE if exercise.is_mistake else 0) + which


def programs():
    """{program: exercises}. Without what must not compile."""
    found = {}
    for exercise in EXERCISES:
        if "compile" not in exercise.finds:
            found.setdefault(f"exercises_{exercise.lesson}", []).append(exercise)
    return found


def builds(exercises):
    """The builds that the program of these exercises is part of: "" is the plain one."""
    return {"", *(sanitizer for each in exercises for sanitizer in each.sanitizers)}


def _body(exercise, old, text):
    """Start and end of the first of an exercise's functions that has `old`."""
    for cut in exercise.cuts:
        start = text.find(cut.function)
        end = re.compile(r"^\}", re.MULTILINE).search(text, start).end()
        if old in text[start:end]:
            return start, end
    raise ValueError(f"wrong answer to {exercise.name}: no '{old}'")


def _changed(old, new, number, before):
    """What stands in the place of `old` if the program has a choice, and `before` that of others."""
    if old.startswith("//"):
        return f"if (kMistake == {number}) {{ {new} }}\n{before}"
    if old.endswith(";"):
        return f"if (kMistake == {number}) {{ {new} }} else {before}"
    return f"(kMistake == {number} ? {new} : {before})"


def program(text, exercises):
    """The source of a program with all of these exercises, from that of the lesson."""
    text = with_headers(text, *dict.fromkeys(header for each in exercises for header in each.headers))
    mistaken = {each.kernel for each in exercises if each.is_mistake}
    edits = []
    for exercise in exercises:
        for start, end, new in exercise.places(text):
            old = text[start:end]
            if exercise.is_mistake:
                new = new or f"/* {exercise.name} */;\n"
                new = f"if (kMistake >= {FIRST_MISTAKE}) {{\n{new}  }} else {{\n{old}  }}\n"
            elif exercise.kernel in mistaken:
                new = f"if (kMistake >= {FIRST_MISTAKE}) {{\n{old}  }} else {{\n{new}  }}\n"
            edits.append((start, end, new))
    text = _edited(text, edits)
    for exercise in exercises:
        for old, new in PREPARED.get(exercise.name, ()):
            start, _ = _body(exercise, old, text)
            text = text[:start] + text[start:].replace(old, new, 1)
    places = {}  # start, end -> what becomes of it
    for exercise in exercises:
        for which, given in enumerate(WRONG[exercise.name], start=1):
            for edit in given.edits:
                nth = edit[2] if len(edit) == 4 and isinstance(edit[2], int) else 0
                context, old, new = edit[0], edit[0] if len(edit) == 2 else edit[1], edit[-1]
                start, end = _body(exercise, context, text)
                for _ in range(nth + 1):
                    start = text.index(context, start + 1, end)
                start = text.index(old, start)
                place = start, start + len(old)
                places[place] = _changed(old, new, number_of(exercise, which), places.get(place, old))
    text = _edited(text, [(*place, new) for place, new in places.items()])
    return CHOICE + leave_out(text, exercises[0].lesson)


def _edited(text, edits):
    pieces, end = [], 0
    for start, stop, new in sorted(edits):
        assert end <= start, f"two of them change the same: {text[start:stop]}"
        pieces += [text[end:start], new]
        end = stop
    return "".join(pieces) + text[end:]
