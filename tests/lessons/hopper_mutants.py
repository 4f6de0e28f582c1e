"""Every wait, arrival, expected byte count, fence and barrier of the Hopper kernels, taken out or shifted.

The mistakes are not listed here but derived from a lesson's source: each call of a word of
primitives/hopper/ that makes somebody wait, or lets somebody go on, is one, also in the lesson's own
helper functions and lambdas. So it is with operators, in their benchmarks (operators/bench/), and with the product
that operators share, in operators/product/, whose words hopper_product.cu uses. Named barriers are such words, too,
and some kernels of older GPUs have them: other_kernels.cu runs these. SConstruct compiles a program with all of them
once for the plain CPU build and once for ThreadSanitizer, with those of mutants.py; MISTAKE in the environment says
which one the program makes.

    hopper_mutants.py PROGRAM [NUMBER...]   runs a program's mistakes, all or some, and says what finds each

where PROGRAM is a lesson, operators_NAME, hopper_product or other_kernels.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import functools
import os
from pathlib import Path
import re
import subprocess
import sys

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cpu"))
from cu2cpp import _NOT_CODE, _blank, _closing  # noqa: E402

PRODUCT, OTHER_KERNELS = "hopper_product", "other_kernels"
TESTS = {PRODUCT: "operators/tests/hopper_product", OTHER_KERNELS: "operators/tests/kernels/other_kernels"}
GPUS = "bonus_diffusion_gpus"
CONNECTED = "bonus_clifford_fully_connected"
ATTENTION, BACKWARD = "bonus_attention", "bonus_attention_backward"
SHARED = ("primitives/hopper/tiles.cuh", "primitives/hopper/block_grid.cuh", "primitives/hopper/pipeline.cuh")
# Whose runs come to a struct or function of these. All others are judged with hopper_product.
REACHED_BY = {
    "Maker": "operators_gradients", "BlockRow": "operators_gradients",
    "wait_for_oldest": "operators_gradients", "give_back": "operators_gradients",
    "next": "operators_gradients", "start_products": "operators_diffusion", "take": "bonus_clifford_fully_connected",
    "wait_for": "operators_softmax", "done_with": "operators_softmax",
}
KERNEL = "operators/product/product.cuh"  # judged with hopper_product
# What is put in the place of the program's #include of it, and has the mistakes.
HEADERS = {
    PRODUCT: (*SHARED, KERNEL, "operators/product/plan.cuh", "operators/product/sliced.cuh",
              "operators/product/tf32.cuh", "operators/product/split_tf32.cuh",
              "operators/product/store_sums.cuh", "operators/product/portable/fp32_tiles.cuh",
              "operators/product/portable/half.cuh",
              "operators/product/portable/tf32_tiles.cuh", "operators/product/portable/tf32.cuh",
              "operators/product/tf32_product.cuh", "operators/product/shifted.cuh",
              "operators/product/layouts/gathered.cuh"),
    OTHER_KERNELS: ("operators/gradients/held.cuh", "operators/attention/backward_portable.cuh",
                    "operators/product/layouts/aligned_rows.cuh"),
    "operators_gating": ("operators/gating/rows.cuh", "operators/gating/resident.cuh", "operators/gating/portable.cuh",
                         "operators/gating/layer.cuh"),
    "operators_diffusion": (*SHARED, "operators/diffusion/fused.cuh", "operators/diffusion/one_launch.cuh"),
    GPUS: ("problems/diffusion/gpus.cuh",),
    "8_spatial_gradients": SHARED,
    "9_matmul_softmax": SHARED,
    CONNECTED: SHARED,
    "operators_attention": ("operators/attention/hopper.cuh", "operators/attention/layer.cuh"),
    "operators_gradients": (*SHARED, "operators/gradients/features.cuh", "operators/gradients/forward.cuh",
                            "operators/gradients/backward.cuh", "operators/gradients/tiles.cuh"),
    "operators_softmax": (*SHARED, KERNEL, "operators/softmax/softmax_product.cuh",
                          "operators/softmax/hopper/cluster.cuh", "operators/softmax/hopper/plans.cuh",
                          "operators/softmax/hopper/exchange.cuh", "operators/softmax/hopper/narrow.cuh",
                          "operators/softmax/hopper/transposed_product.cuh", "operators/product/split_tf32.cuh",
                          "operators/softmax/few.cuh"),
    "operators_clifford": ("operators/clifford/row_exchange.cuh", "operators/clifford/streamed.cuh",
                           "operators/clifford/layer.cuh"),
    "operators_clifford_connected": (
        "operators/clifford_connected/planes.cuh", "operators/clifford_connected/few_rows.cuh",
        "operators/clifford_connected/tasks.cuh", "operators/clifford_connected/layer.cuh"),
}
OPERATORS = tuple(f"operators_{name}" for name in (
    "gating", "diffusion", "gradients", "softmax", "clifford", "clifford_connected", "attention"))
LESSONS = ("3_matmul_tensorcore", "6_gating_fused", "7_diffusion_fused", "8_spatial_gradients", "9_matmul_softmax",
           "10_clifford_gp", GPUS, CONNECTED, ATTENTION, BACKWARD)
PROGRAMS = (*LESSONS, *OPERATORS, *TESTS)
# What is found in no list of words: file -> (where, with the piece in parentheses; the mistake).
# Numbers before they have come; a GPU's own sum or piece that is not added, or nothing that is sent; a
# gradient that each GPU adds. In lesson 9 the end of another row, which is not blanked.
OTHERS = {
    # The stage that is still read is given back, or none; a stage that is filled already is
    # filled again; a sum begins with what was in its registers.
    "pipeline": [
        (r"if \(previous >= 0 && !keep\) release\((previous)\)", "ring.stage"),
        (r"if \(!keep\) (release\(previous\))", "static_cast<void>(0)"),
        (r"void give_back\(\) \{ (release\(ring\.stage\))", "static_cast<void>(0)"),
        (r"if \((filled)\) \{", "false"),
        (r"start\(wait\(\), (previous >= 0)\)", "true"),
        (r"start\(pipe\.stage\(now\), (false)\)", "true"),
        (r"blocks\.tell\(told, pipe\.empty, (before)\)", "now"),
    ],
    # Some of those who sent a part of a stage are not told, or only this block is; others do not get
    # this block's share of a tile; a block fetches another one's share.
    "block_grid": [
        (r"return \{(first \+ thread \+ kStack \* side), mask", "first + rank"),
        (r"if \((thread < kPeers)\) \{", "false"),
        (r"static_cast<uint16_t>\((kAll << stack << first)\)", "1u << (first + rank)"),
        (r"static_cast<uint16_t>\((\(\(1 << kStack\) - 1\) << kStack \* side << first)\)", "1u << (first + rank)"),
        (r"&& Share::kWhole \? (stack) \* kBoxes", "0"),
        (r"kAlone \? i : (side)\) \* share", "0"),
        # In turn: a block is told of stages that it does not fill; one does not fetch, or fetches out of turn.
        (r"const int mask = kInTurn && (thread != stack) \?", "false"),
        (r"const int mask = (kInTurn) \? kSide - 1", "false"),
        (r"\(!kAlone && (stage % kStack != stack)\)", "false"),
        (r"else if \((stage % kSide == side)\)", "true"),
    ],
    # A block brings nothing into a stage that it should fill in its turn; the last box of columns is missing.
    "product": [
        (r"if \((kSomething && cut_boxes < 1)\)", "false"),
        (r"cut_boxes = (ceil_div\(work\.schedule\.shape\.cols - at\.col, kBoxCols\))",
         "(work.schedule.shape.cols - at.col) / kBoxCols"),
    ],
    "exchange": [
        (r"first == 0 && (before > 0)", "false"),
        (r"step == 0 && (before > 0)", "false"),
    ],
    # A stage of the first product that is given back although the second one reads it; one of the second
    # that never is; x of the first tile, loaded twice; tiles that are loaded although they are there.
    "one_launch": [
        (r"if \((t \+ Work::kStages < work\.tiles)\) reader", "true"),
        (r"if \((t >= Work::kStages)\) \{", "false"),
        (r"if \((t > 0)\) load_x", "true"),
        (r"work\.tiles - 1 - (kept)", "0"),
    ],
    # A stage that stays for the way back is given away; the sum of this launch is emptied, not that of the
    # next one, or it is the same in each launch.
    "7_diffusion_fused": [
        (r"if \((t \+ kStages < tiles)\) reader", "true"),
        (r"place\.sums\[(\(launches \+ 1\) % 2)\]", "launches % 2"),
        (r"total = place\.sums\[(launches % 2)\]", "0"),
        (r"tiles - 1 - (kStages)", "0"),
        # The same of *clusters*; and x of the first tile, loaded twice.
        (r"if \((t \+ kClusterStages < work\.tiles)\) reader", "true"),
        (r"if \((t >= kClusterStages)\) \{", "false"),
        (r"if \((t > 0)\) load_x", "true"),
        (r"work\.tiles - 1 - (kept)", "0"),
        # An arrival that is not counted, or before what was added; a look that does not see what was.
        (r"arrivals\.fetch_add\((1),", "0"),
        (r"fetch_add\(1, (cuda::memory_order_release)\)", "cuda::memory_order_relaxed"),
        (r"load\((cuda::memory_order_acquire)\)", "cuda::memory_order_relaxed"),
    ],
    # Of operators/attention: a stage that is not given back, results of which nobody is told, or that keep
    # the scale of an older maximum; another stage's logits where they are multiplied once more.
    "hopper": [
        (r"multiply_again\(again, own\.stage, (k)\)", "(k + 1) % Tile::kStages"),
        (r"if \((!right)\) scale_rows", "false"),
        (r"scale_rows\(result, factor\);\s+to_factor<T>\(probs, logits\);\s+\}\s+\}[\s\S]*?(give_back\(v\))",
         "static_cast<void>(0)"),
        (r"(EachWarp::release\(shared\.results\[own\.stage\]\[consumer\]\))", "static_cast<void>(0)"),
        (r"if \((last)\) end\(own\)", "true"),
        # And a piece of work of which nobody takes the number: two are taken for one piece.
        (r"if \((tile == work\.first \+ 1)\) take_next", "true"),
    ],
    # The other of two stages is given back, which is still read or is to come.
    # And of the tile scheduler what is said above of operators/attention.
    ATTENTION: [
        (r"give_back\((V)\)", "reader.ring.stage"),
        (r"give_back\((K)\)", "reader.ring.stage"),
        (r"multiply_again\(again, own\.stage, (k)\)", "(k + 1) % Tile::kStages"),
        (r"if \((!right)\) Block::scale_rows", "false"),
        (r"Block::to_factor\(probs, logits\);\s+\}\s+\}[\s\S]*?(give_back\(v\))", "static_cast<void>(0)"),
        (r"(EachWarp::release\(shared\.results\[own\.stage\]\[consumer\]\))", "static_cast<void>(0)"),
        (r"if \((last)\) \{", "true"),
    ],
    # Logarithms are written to a stage that is still read, and dS to the place of another step; sums of dQ are read
    # before they are there.
    BACKWARD: [
        (r"Stage& stage = (writer\.wait\(\))", "shared.pipeline.stage(writer.ring.stage)"),
        (r"shared\.dS\[(step % 2)\]\[box\]", "(step + 1) % 2"),
        # In order: a count that nobody raises, or that lets others pass; sums that begin with what was there.
        (r"count\.fetch_add\((1), cuda", "0"),
        (r"count\.fetch_add\(1, (cuda::memory_order_release)\)", "cuda::memory_order_relaxed"),
        (r"is_turn = (next\.load\(cuda::memory_order_acquire\) >= before)", "true"),
        (r"(key_tile == 0) \? bulk_store", "false"),
        (r"(wait_for_previous_kernel\(\));\s+const float4", "static_cast<void>(0)"),
    ],
    # Factors that are read before they are there, or are written over while they are read; a tile in another stage, too
    # early in its stage, or in the room of another; another factor or sign; a row behind the last one.
    "held": [
        (r"copy_async_wait<0>\(\);\s+(meet\(\));", "static_cast<void>(0)"),
        (r"k, col\);\s+\}\s+(meet\(\));", "static_cast<void>(0)"),
        (r"const Gr = stages \+ (step) % kStages", "step + 1"),
        (r"(copy_async_wait<kStages - 2>\(\))", "copy_async_wait<kStages - 1>()"),
        (r"copy\(step \+ (kStages - 1)\)", "kStages"),
        (r"if \((v < in\.V) && w", "v <= in.V"),
        (r"(copy_async_wait<kStages - 3>\(\))", "copy_async_wait<kStages - 2>()"),
        (r"copy\(step \+ (kStages - 2)\)", "kStages - 1"),
        (r"rooms \+ (step % 2) \*", "0"),
        (r"(load\(3\));", "load(2)"),
        (r"(load_left_transposed<kE>\(left, Gi, row, k\))", "static_cast<void>(0)"),
        (r"(negate\(by, by\))", "static_cast<void>(0)"),
    ],
    # Sums that are not cleared; rows that are read before they are there; rows and columns behind the last ones; a
    # query that sees one key more; another stage, or another part; a fragment whose numbers are exchanged; a count that
    # nobody raises.
    "backward_portable": [
        (r"if \((row < rows_of_zeros)\)", "false"),
        (r"(__syncthreads\(\));\s+T\* const to = in\.dQ", "static_cast<void>(0)"),
        (r"if \((query \+ row >= in\.queries)", "query + row > in.queries"),
        (r"row, 0, sums\);\s+(__syncwarp\(\));", "static_cast<void>(0)"),
        (r"if \((r >= there) \|\|", "r > there"),
        (r"r >= there \|\| (col >= width)", "col > width"),
        (r"copy_Q\(next, (\(step \+ 1\) % 2)\)", "step % 2"),
        (r"copy_d_out\(next, (\(step \+ 1\) % 2)\)", "step % 2"),
        (r"dQ\.offset\((part_before), pair\)", "part"),
        (r"if \((8 \* r >= own_limit)\)", "8 * r > own_limit"),
        (r"store_number\(ahead, (1 - stage)\)", "stage"),
        (r"rounded\[k / 8 \+ i / 2 % 2\]\[(i / 4 \* 2 \+ i % 2)\]", "i / 4 * 2 + 1 - i % 2"),
        (r"fetch_add\((1), cuda::memory_order_release\)", "0"),
    ],
    # Copies of copies that do not wait; elements and words behind the last ones; the word of another row; loads of more
    # elements than a row's begin allows.
    "aligned_rows": [
        (r"(primitives::wait_for_previous_kernel\(\))", "static_cast<void>(0)"),
        (r"if \((i < left)\) pack", "true"),
        (r"if \((word < words)\)", "true"),
        (r"if \((x >= static_cast<int>\(across\))\)", "false"),
        (r"if \((copy\.cols % 4 == 0)\)", "true"),
        (r"else if \((copy\.cols % 2 == 0)\)", "true"),
    ],
    # Planes that are read before they are there, or told of before whoever sees that sees them, too; a
    # unit that is told of twice, and the next one never.
    CONNECTED: [
        (r"if \((patch >= row_blocks_before \* slices_before)\) \{", "false"),
        (r"fetch_add\(kAtOnce, (cuda::memory_order_release)\)", "cuda::memory_order_relaxed"),
        (r"make\(unit\[i\]\);\s+last = (patch);", "last < 0 ? patch : last"),
    ],
    # The steps of a block are those of operators/diffusion/one_launch.cuh, whose mistakes are above.
    GPUS: [
        (r"if \((t \+ Work::kStages < work\.tiles)\) reader", "true"),
        (r"if \((t >= Work::kStages)\) \{", "false"),
        (r"if \((t > 0)\) load_x", "true"),
        (r"work\.tiles - 1 - (kept)", "0"),
        (r"if \((!missing)\) return", "true"),
        (r"if \((are_two\(\))\) add\(sums", "false"),
        (r"slot\(1 - me, me\) \+ i, (quad)\)", "float4{}"),
        (r"gpu == me \? (quad) : pieces", "pieces[gpu]"),
        (r"if \((gpus\.me == 0)\)", "true"),
    ],
}

# Words that are only ever taken out.
ONLY_REMOVED = (
    "barrier_init_fence", "barrier_arrive", "shared_fence", "tensor_store_commit", "wgmma_fence",
    "wgmma_commit", "cluster_sync", "cluster_arrive", "cluster_wait", "cluster_meet",
    "wait_for_count", "wait_for_previous_kernel", "__syncthreads", "__syncwarp",
)
# Words with a number that may also be wrong: which argument, and what becomes of it.
SHIFTED = {
    "barrier_init": (1, (" + 1", " - 1")),
    "barrier_wait": (1, (" ^ 1",)),
    "barrier_arrive_expect": (1, (" + 16", " - 16")),
    "named_barrier": (1, (" + 32", " - 32")),
    "named_arrive": (1, (" + 32", " - 32")),
    "prepare": (1, (" + 1", " - 1")),
}
# The same for a template argument.
SHIFTED_TEMPLATE = ("wgmma_wait", "tensor_store_wait_read")
NEVER_REMOVED = ("barrier_init", "prepare")  # the barrier would not exist
# What makes no difference but in time: not mistakes.
TIMING_ONLY = {
    "start_next_kernel": "without it the next kernel's blocks start when this one's end",
    "prefetch_l2": "brings into the cache what is read later anyway",
    **{word: "a hint to the cache" for word in ("evict_first", "evict_last", "evict_normal")},
    "next": "Pace::next() waits for a bounded time, to read less",
    "end": "Pace::end(): nobody waits for long if it is missing",
}
# Mistakes that make no difference: program -> (function, call and change) -> why.
HARMLESS = {
    "operators_clifford": {
        ("forward_streamed", "wait_for_previous_kernel() without", 0):
            "it reads nothing that a kernel before it writes, and what a launch before writes is the same",
        ("RegisterWeights", "shared_fence() without", 0):
            "the CPU backend lets the copy engine write where threads wrote, if they have met since",
        ("bytes", "__syncwarp() without", 0):
            "it is there for the compiler's choice of registers",
    },
    "operators_softmax": {
        ("narrow_columns", "wait_for_previous_kernel() without", 0):
            "it reads nothing that a kernel before it writes, and what a launch before writes is the same",
    },
    PRODUCT: {
        ("product", "wait_for_previous_kernel() without", 0):
            "the kernel before it was launched as usual, and nothing has to wait for it",
    },
    "3_matmul_tensorcore": {
        ("matmul_wgmma", "__syncthreads() without", 1):
            "wgmma_wait() has said that the products of all four warps are done",
    },
    "operators_gating": {
        **{("start_groups", f"wgmma_wait<0>() {change}", 0):
            "the CPU backend reads the left factor's registers when a product starts"
           for change in ("with + 1", "without")},
        ("meet", "__syncwarp() without", 1):
            "since the last panel was copied the warp has met at wgmma's instructions",
    },
    "7_diffusion_fused": {
        ("diffusion_one_launch", "tensor_store_commit() without", 0):
            "the same thread commits when it stores its next tile, and there is one",
        ("damp_spectrum", "tensor_store_commit() without", 0):
            "the same thread commits when it stores its next tile, and there is one",
    },
    "operators_diffusion": {
        ("damp_spectrum", "tensor_store_commit() without", 0):
            "the same thread commits when it stores its next tile, and there is one",
    },
    GPUS: {
        ("damp_spectrum", "tensor_store_commit() without", 0):
            "the same thread commits when it stores its next tile, and there is one",
    },
    "10_clifford_gp": {
        ("forward_streamed", "wait_for_previous_kernel() without", 0):
            "it reads nothing that a kernel before it writes, and what a launch before writes is the same",
        ("RegisterWeights", "shared_fence() without", 0):
            "the CPU backend lets the copy engine write where threads wrote, if they have met since",
    },
    # Whoever does not wait for its turn goes first: results are the same.
    ATTENTION: {
        **{("wait", f"barrier_wait(&barriers[consumer], parity) {change}", nth):
            "a turn decides who multiplies first, and nothing else"
           for change in ("with ^ 1", "without") for nth in (0, 1)},
        ("attention_stay", "barrier_init_fence() without", 0):
            "prepare() has one behind the barriers that the copy engine completes; only threads arrive at the others",
        ("attention_stay", "barrier_init(&shared.turns[i], EachWarp::kReleases) with - 1", 0):
            "a turn decides who multiplies first, and nothing else",
    },
    "operators_attention": {
        ("attention_hopper", "barrier_init_fence() without", 0):
            "prepare() has one behind the barriers that the copy engine completes; only threads arrive at the others",
        ("attention_hopper", "barrier_init(&shared.turns[i], EachWarp::kReleases) with - 1", 0):
            "a turn decides who multiplies first, and nothing else",
        **{("parity", f"barrier_wait(&barriers[consumer], parity) {change}", 0):
            "a turn decides who multiplies first, and nothing else" for change in ("with ^ 1", "without")},
    },
}
# A block that does not wait for its turn may by chance come at its turn. If not, only the last bits differ. So whether
# this is found depends on the machine, and it is not judged. So it is with a block that may be a lap ahead of others.
BY_CHANCE = {
    PRODUCT: ("kSomething && cut_boxes < 1 as false",),
    OTHER_KERNELS: ("wait_for_count(GridCount(in.counts[part_before]), static_cast<unsigned>(place.key_tile), "
                    "\"the parts of dQ of the keys before\") without",
                    "named_barrier(1 + Tile::kPairs, 32 * Tile::kPairs) without"),
}
WORDS = sorted((*ONLY_REMOVED, *SHIFTED, *SHIFTED_TEMPLATE), key=len, reverse=True)
_CALL = re.compile(rf"(?<![\w.>])({'|'.join(WORDS)})\s*(<[^<>;(]*>)?\s*\(")
_LAMBDA = re.compile(r"\bconst auto (\w+) = \[[^\]]*\]\s*(?:\([^)]*\)\s*)?\{")
_SPIN = re.compile(r"\bwhile \((!)")
# What has such words inside, where product.cuh says it. (A named stage is one of OTHERS' mistakes.)
_METHOD = re.compile(r"\b(?:(?:out|cluster|grid)\.(?:template )?(?:wait|meet|release)|writer\.finish|"
                     r"(?:keys|rows)\.next|(?:reader|back)\.(?:finish|give_back|next)|(?:writer\.)?ring\.advance)"
                     r"(?:<[^<>;(]*>)?\((?![KV]\))")

# Runs of which a row's second kernel turns its output into something else, in place.
ROWS_OF_CLASSES = ("9", "--inputs", "1101", "--classes", "301", "--kinds", "--kernel", "^unfused.*: cluster")
HALF_FUSED = ("20", "--inputs", "40", "--classes", "8300", "--kinds", "--kernel", "^fused.*: exchange")
PLANES_BESIDE = ("390", "--features", "132", "--algebra", "2,0,0", "--kernel", "^planes beside$")
IN_PLACE = (ROWS_OF_CLASSES, HALF_FUSED, PLANES_BESIDE)

# What a mistake needs to show: several tiles for each block, more steps than stages, and clusters
# that stay. Arguments, and how many multiprocessors the device has. (In CI the second, fourth and so
# on of a program run under ThreadSanitizer, which takes several times as long as the other sanitizer.)
RUNS = {
    "3_matmul_tensorcore": [
        (("392", "--kernel", "^one warpgroup$"), 8),
        (("392", "--kernel", "^warp specialization$"), 8),
        (("520", "--kernel", "^(tile scheduler|clusters|rasterization)$"), 2),
        (("248", "--kernel", "^(tile scheduler|clusters|rasterization)$"), 4),
    ],
    # Three clusters, or six blocks: some tiles are shared, and everybody has more steps than stages.
    PRODUCT: [(("392", "264", "520"), 6)],
    OTHER_KERNELS: [
        # More steps than stages, a group with a tile less than the other one, rows and columns that end within a tile.
        (("features", "600", "104", "72", "2"), 4),
        # Four blocks that add to the same parts of dQ; queries that see no key; one stage of d_out.
        (("attention", "100", "420", "2", "1", "64", "0"), 4),
        (("attention", "200", "150", "2", "1", "56", "1"), 2),
        (("attention", "90", "200", "2", "1", "104", "1"), 2),
        # Rows that begin at any element, at every other one, and at multiples of four.
        (("copies", "33", "70"), 2),
        (("copies", "44", "105"), 2),
    ],
    "6_gating_fused": [
        # More tiles for each consumer than it has stages; a second block of columns.
        (("3", "--channels", "128", "--kernel", "^warp specialization"), 2),
        (("1", "--channels", "72", "--hidden", "72", "--kernel", "^warp specialization"), 2),
        # Several tiles for a cluster, and more steps than stages.
        (("1", "--channels", "512", "--hidden", "136", "--kernel", "^clusters"), 2),
    ],
    "operators_gating": [
        # What takes every shape. More stages than one for a tile; boxes of out in panels; rows of any length, in
        # panels and with a last slice of x that is not whole; columns divided among blocks.
        (("1", "--channels", "128", "--kernel", "^operator"), 2),
        (("1", "--channels", "264", "--hidden", "120", "--kernel", "^operator"), 2),
        (("3", "--channels", "200", "--hidden", "72", "--kernel", "^operator"), 2),
        (("2", "--channels", "104", "--hidden", "128", "--kernel", "^operator"), 2),
        (("1", "--channels", "39", "--hidden", "261", "--kernel", "^operator"), 4),
        # Panels by threads, of one block and of several; teams with boxes of x and of out.
        (("2", "--channels", "40", "--hidden", "500", "--kernel", "^operator"), 2),
        (("2", "--channels", "128", "--hidden", "255", "--kernel", "^operator"), 4),
        (("1", "--channels", "96", "--hidden", "200", "--kernel", "^operator"), 2),
        # A team that shares the rows of out; one that has fewer stages than a tile.
        (("2", "--channels", "160", "--hidden", "100", "--kernel", "^operator"), 2),
        (("2", "--channels", "264", "--hidden", "104", "--kernel", "^operator"), 2),
        (("2", "--channels", "184", "--hidden", "203", "--kernel", "^operator"), 4),
    ],
    # More tiles than stages, a last one that is not whole, two groups of blocks, and columns beside.
    "7_diffusion_fused": [
        (("1000", "--eigen", "72", "--width", "136", "--kernel", "^(one launch|clusters)$"), 4),
        (("1400", "--width", "128", "--kernel", "^(one launch|clusters)$"), 2),
    ],
    # Wide blocks, narrow ones, many eigenvectors; a batch.
    "operators_diffusion": [
        (("1000", "--eigen", "136", "--width", "136", "--kernel", "^operator$"), 6),
        (("1400", "--width", "128", "--kernel", "^operator$"), 4),
        (("300", "--eigen", "24", "--width", "72", "--batch", "3", "--kernel", "^operator$"), 4),
    ],
    GPUS: [
        (("1400", "--width", "128", "--kernel", "^one GPU$"), 4),
        (("1400", "--width", "128", "--kernel", "^fused", "--patience", "20000"), 2),
        (("1400", "--width", "64", "--gpus", "3", "--kernel", "^fused", "--patience", "20000"), 2),
    ],
    # A cluster of one or two blocks, forward of one or two groups of columns; more tiles for each consumer than
    # it has stages, and for a block backward; E and W that do not fill their boxes.
    "8_spatial_gradients": [
        (("520", "--width", "128", "--kernel", "^(warp specialization|cluster)$"), 2),
        (("450", "--width", "72", "--kernel", "^(warp specialization|cluster)$"), 4),
        (("600", "--eigen", "40", "--width", "136", "--kernel", "^(warp specialization|cluster)$"), 2),
    ],
    "9_matmul_softmax": [
        # More tiles along D than stages, and two clusters.
        (("40", "--inputs", "1100", "--classes", "70", "--kernel", "^fused cluster$"), 16),
        # Two or three chunks of D for each block, in both sizes of tile.
        (("13", "--inputs", "1100", "--classes", "50", "--all", "--kernel", "^fused tensor cores"), 8),
        (("90", "--inputs", "2060", "--classes", "70", "--all", "--kernel", "^fused tensor cores"), 8),
        # Several strips for each block, one after another, whose blocks wait for each other; more steps than stages.
        (("600", "--inputs", "300", "--classes", "388", "--all", "--kernel", "^fused specialized"), 4),
        # Blocks that do not wait for one another, and each have several tiles and strips.
        (("300", "--inputs", "72", "--classes", "1500", "--all", "--kernel", "^(unfused|online) specialized"), 4),
        # A block has one strip: its threads have not met since they began.
        (("100", "--inputs", "72", "--classes", "260", "--all", "--kernel", "^fused specialized"), 8),
    ],
    # Clusters of two blocks; small tiles; planes beside, whose tiles wait for one another. In the last run the first
    # tiles need planes that are made beside them.
    CONNECTED: [
        (("200", "--features", "132", "--algebra", "2,0,0", "--no-norm", "--kernel", "^planes first$"), 2),
        (("100", "--features", "132", "--algebra", "2,0,0", "--no-norm", "--kernel", "^planes first$"), 2),
        (PLANES_BESIDE, 4),
        (("60", "--features", "260", "--algebra", "2,0,0", "--no-norm", "--turned", "--kernel", "^planes beside$"), 4),
    ],
    # More tiles of keys than stages, for two blocks, of which one has less than a tile of rows.
    ATTENTION: [
        (("150", "--keys", "700", "--width", "64", "--heads", "1", "--batch", "1", "--full", "--kernel",
          "^(warp specialization|ping-pong|overlap)$"), 2),
        # Several pieces of work for a block, whose tiles the mask hides from some; logits that grow.
        (("400", "--keys", "600", "--width", "64", "--heads", "4", "--batch", "1", "--causal", "--hard-rows",
          "--kernel", "^tile scheduler$"), 1),
    ],
    # Both widths; two blocks of keys that heads share, and more steps than stages; a mask that hides some tiles.
    BACKWARD: [
        (("300", "--keys", "150", "--width", "64", "--heads", "2", "--kv-heads", "1", "--batch", "1", "--full",
          "--kernel", "^(warp specialization|reduce-add)$"), 2),
        (("170", "--keys", "150", "--width", "128", "--heads", "2", "--kv-heads", "1", "--batch", "1", "--causal",
          "--kernel", "^(warp specialization|reduce-add)$"), 2),
        # In order: three blocks of a head, one of which starts when another one has ended.
        (("300", "--keys", "300", "--width", "64", "--heads", "2", "--kv-heads", "1", "--batch", "1", "--full",
          "--kernel", "^deterministic$"), 2),
        (("170", "--keys", "300", "--width", "128", "--heads", "2", "--kv-heads", "1", "--batch", "1", "--causal",
          "--kernel", "^deterministic$"), 3),
    ],
    "operators_attention": [
        (("150", "--keys", "300", "--width", "64", "--heads", "4", "--batch", "1", "--causal", "--hard-rows",
          "--kernel", "^operator$"), 1),
        # Parts of keys, of heads that are packed.
        (("3", "--keys", "900", "--width", "64", "--heads", "4", "--kv-heads", "1", "--batch", "1", "--full",
          "--kernel", "^operator$"), 2),
    ],
    "10_clifford_gp": [
        (("60", "--features", "260", "--algebra", "2,0,0", "--kernel", "streamed"), 2),
        # All warps order copies.
        (("30", "--features", "260", "--kernel", "streamed"), 2),
        (("9", "--features", "300", "--algebra", "3,0,1", "--kernel", "streamed"), 2),
    ],
}
# The same rows in the benchmarks, where those of lesson 9's operator have shorter names.
# A cluster of one or two blocks, which have 64 columns each or more, or backward 32; and E in more than two steps.
RUNS["operators_gradients"] = [
    (("520", "--width", "128", "--kernel", "^operator$"), 2),
    (("450", "--width", "72", "--kernel", "^operator$"), 4),
    (("300", "--eigen", "136", "--width", "72", "--kernel", "^operator$"), 4),
    # E in one step, of which a block has more tiles than stages.
    (("600", "--eigen", "40", "--width", "136", "--kernel", "^operator$"), 2),
]
RUNS["operators_softmax"] = [
    # Two warpgroups, and two or three chunks for each block.
    (("13", "--inputs", "1100", "--classes", "70", "--all", "--kinds", "--kernel", "^fused.*: cluster"), 8),
    # Rows that start anywhere, in tiles of classes.
    (ROWS_OF_CLASSES, 32),
    (("200", "--inputs", "300", "--classes", "390", "--all", "--kinds", "--kernel", "^fused.*: exchange"), 4),
    # Rows with more blocks than run at a time.
    (HALF_FUSED, 8),
    # Slices of D.
    (("40", "--inputs", "1000", "--classes", "300", "--kinds", "--kernel", "^fused.*: exchange"), 8),
    # Rows that no copy of 16 bytes finds, and more steps than stages; on 3 multiprocessors one cluster
    # of three blocks.
    (("300", "--inputs", "300", "--classes", "261", "--kinds", "--kernel", "^fused.*: exchange"), 3),
    # Rows of x that start anywhere, and a -inf at the end of the row before: in TF32, by three
    # warpgroups, and in 3xTF32. (The tables of only -inf show it.)
    (("330", "--inputs", "33", "--classes", "300", "--hard-rows",
      "--kinds", "--kernel", "^fused.*: exchange, TF32$"), 8),
    (("260", "--inputs", "33", "--classes", "200", "--all", "--hard-rows",
      "--kinds", "--kernel", "^fused.*: exchange, 3xTF32$"), 4),
    # A block has one strip: its threads have not met since they began.
    (("130", "--inputs", "70", "--classes", "261", "--kinds", "--kernel", "^fused.*: exchange"), 8),
    # More slabs than stages, and a last one whose end is no multiple of 16 bytes.
    (("2053", "--inputs", "129", "--classes", "20", "--kinds", "--kernel", "^fused.*: narrow"), 4),
    # Clusters that add up rows: each block owns one or two, or two; and several groups of inputs a warp.
    (("3", "--inputs", "1100", "--classes", "70", "--kinds", "--kernel", "^unfused.*: few rows$"), 2),
    (("8", "--inputs", "1100", "--classes", "70", "--kinds", "--kernel", "^unfused.*: few rows$"), 4),
    # Blocks that do not wait for one another, and each have several tiles and strips.
    (("300", "--inputs", "70", "--classes", "1500", "--kinds", "--kernel", "^unfused.*: exchange"), 4),
]
RUNS["operators_clifford"] = [
    (("60", "--features", "260", "--algebra", "2,0,0", "--kernel", "streamed"), 2),
    # Rows that start anywhere.
    (("60", "--features", "261", "--algebra", "2,0,0", "--kernel", "streamed"), 2),
    # Rows of two blocks.
    (("20", "--features", "1030", "--algebra", "2,0,0", "--kernel", "streamed"), 4),
    # All warps order copies.
    (("30", "--features", "261", "--kernel", "streamed"), 2),
    # Backward's weights are in shared memory.
    (("9", "--features", "300", "--algebra", "3,0,1", "--kernel", "streamed"), 2),
]
# Features that are no multiple of 4; few rows, whose weights are the left factor, and shared sums.
RUNS["operators_clifford_connected"] = [
    (("390", "--features", "130", "--algebra", "2,0,0", "--kernel", "^planes beside$"), 4),
    (("100", "--features", "130", "--algebra", "2,0,0", "--no-norm", "--kernel", "^planes first$"), 2),
    (("4", "--features", "384", "--algebra", "2,0,0", "--kernel", "^planes first$"), 8),
]


@dataclass(frozen=True)
class Mistake:
    """`number` counts from 1 in a program."""

    number: int
    file: str
    line: int
    function: str
    call: str
    change: str  # "without", or what is done to the number

    def __str__(self):
        return f"{self.number:3} {self.file}:{self.line}, {self.function}: {self.call} {self.change}"


_NCCL = re.compile(r"^#if HAS_NCCL\n.*?^#endif  // HAS_NCCL", re.M | re.S)


def code_of(text):
    """The source with blanks for comments, strings, and what the CPU does not have."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return _NOT_CODE.sub(_blank, _NCCL.sub(blank, text))


def _arguments(code, start, end):
    """Start and end of each argument between two parentheses."""
    found, depth, first = [], 0, start
    for at in range(start, end):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if code[at] == "," and depth == 0:
            found.append((first, at))
            first = at + 1
    return [*found, (first, end)]


_NOT_NAMES = ("if", "for", "while", "constexpr")


def _functions(code):
    """(start of the body, its end, name) of every function, kernel and struct at the top level, whose
    last brace clang-format puts at the start of a line."""
    start = 0
    for last in re.finditer(r"^\}", code, re.M):
        for opening in re.finditer(r"(operator\(\)|\w+)\s*\(", code[start : last.start()]):
            close = _closing(code, start + opening.end() - 1)
            body = re.compile(r"\s*(const\s*)?\{").match(code, close + 1)
            if body and not opening[1].startswith("__") and opening[1] not in _NOT_NAMES:
                yield body.end(), last.start(), opening[1]
                break
        start = last.end()


def hopper_parts(code):
    """The functions that say a word of hopper.cuh."""
    portable = ("__syncthreads", "__syncwarp", "wait_for_previous_kernel", "wait_for_count")
    words = "|".join(word for word in WORDS if word not in portable)
    for body, end, name in _functions(code):
        if re.search(rf"\b({words}|tensor_load|bulk_load|wgmma)\s*[<(]", code[body:end]):
            yield body, end, name


def derive(text, file, before=0):
    """(Mistakes, edits) of the text of a file; an edit is (start, end, replacement). The first mistake
    comes after number `before`."""
    code = code_of(text)
    found, edits = [], []

    def add(at, function, call, change):
        line = text.count("\n", 0, at) + 1
        number = before + len(found) + 1
        found.append(Mistake(number, file, line, function, " ".join(call.split()), change))
        return f"makes({number})"

    for body, end, function in hopper_parts(code):
        for match in _CALL.finditer(code, body, end):
            word, template = match[1], match[2] or ""
            close = _closing(code, match.end() - 1)
            call = text[match.start() : close + 1]
            new = call
            if word in SHIFTED:
                which, changes = SHIFTED[word]
                arguments = _arguments(code, match.end(), close)
                if word == "prepare" and "." not in text[slice(*arguments[0])]:
                    continue  # another function of that name: this one takes shared.pipeline
                first, last = arguments[which]
                value = f"({text[first:last].strip()})"
                for change in changes:
                    made = add(match.start(), function, call, f"with{change}")
                    value = f"({made} ? {value}{change} : {value})"
                new = text[match.start() : first] + " " + value + text[last : close + 1]
            elif word in SHIFTED_TEMPLATE:
                made = add(match.start(), function, call, "with + 1")
                more = f"{word}<({template[1:-1]}) + 1>()"
                new = f"({made} ? static_cast<void>({more}) : static_cast<void>({call}))"
            if word not in NEVER_REMOVED:
                made = add(match.start(), function, call, "without")
                new = f"({made} ? static_cast<void>(0) : static_cast<void>({new}))"
            edits.append((match.start(), close + 1, new))
        # Lambdas that wait or let go on, where they are called; loops that look until others have
        # come.
        lambdas = [
            match[1] for match in _LAMBDA.finditer(code, body, end)
            if _CALL.search(code, match.end(), _end_of_block(code, match.end()))
        ]
        for name in lambdas:
            for match in re.finditer(rf"(?<![\w.>:])(?<!auto ){name}\(", code[body:end]):
                start = body + match.start()
                close = _closing(code, body + match.end() - 1)
                call = text[start : close + 1]
                made = add(start, function, call, "without")
                edits.append(
                    (start, close + 1, f"({made} ? static_cast<void>(0) : static_cast<void>({call}))")
                )
        for match in _SPIN.finditer(code, body, end):
            close = _closing(code, match.start(1) - 1)
            made = add(match.start(), function, text[match.start() : close + 1], "without")
            edits.append((match.start(1), match.start(1), f"!({made}) && "))
        for match in _METHOD.finditer(code, body, end):
            close = _closing(code, match.end() - 1)
            call = text[match.start() : close + 1]
            made = add(match.start(), function, call, "without")
            edits.append((match.start(), close + 1, f"({made} ? static_cast<void>(0) : {call})"))
    for pattern, new in OTHERS.get(Path(file).stem, ()):
        match = re.search(pattern, code)
        made = add(match.start(1), "no word", match[1], f"as {new}")
        edits.append((*match.span(1), f"({made} ? ({new}) : ({match[1]}))"))
    return found, edits


def source_of(program):
    if program.startswith("operators_"):
        return f"operators/bench/{program.removeprefix('operators_')}.cu"
    return f"{built_as(program)}.cu"


def built_as(program):
    """The program without mistakes, in a build's folder."""
    return TESTS.get(program, program)


def files_of(program):
    """The files that mistakes are made in."""
    return (*HEADERS.get(program, ()), *([source_of(program)] if program not in TESTS else []))


@functools.cache
def mistakes(program):
    found = []
    for file in files_of(program):
        found += derive((ROOT / file).read_text(), file, len(found))[0]
    return tuple(found)


@functools.cache
def judged(program):
    """Its mistakes, but those of shared headers that another program is judged with, and those of BY_CHANCE."""
    shared = (*SHARED, KERNEL)
    return tuple(m for m in mistakes(program) if (m.file not in shared or _reached_by(m) == program)
                 and f"{m.call} {m.change}" not in BY_CHANCE.get(program, ()))


def _reached_by(mistake):
    if mistake.file == KERNEL:  # some Works wait for the kernel before with all threads
        of_all = "!Work::kFetchesFirst" in (ROOT / KERNEL).read_text().split("\n")[mistake.line - 1]
        return "operators_softmax" if of_all else PRODUCT
    before = code_of((ROOT / mistake.file).read_text()).split("\n")[: mistake.line]
    text = "\n".join(before)
    names = [re.findall(pattern, text, re.M)
             for pattern in (r"^struct (\w+)", r"^(?:template[^;{]*?)?\s*__device__[^;{]*?(\w+)\(")]
    for name in (found[-1] for found in names if found):
        if name in REACHED_BY:
            return REACHED_BY[name]
    return PRODUCT


def harmless(program, mistake):
    """Why the mistake makes no difference, or None."""
    for (function, change, nth), reason in HARMLESS.get(program, {}).items():
        same = [other for other in mistakes(program)
                if other.function == function and f"{other.call} {other.change}" == change]
        if same[nth] == mistake:
            return reason
    return None


def _end_of_block(code, start):
    depth = 1
    for at in range(start, len(code)):
        depth += (code[at] == "{") - (code[at] == "}")
        if depth == 0:
            return at
    return len(code)


# Says in the end whether it has come to the mistake. (As an atomic, which orders nothing.)
CHOICE = """#include <atomic>
#include <cstdio>
#include <cstdlib>
static const int kMistake = std::getenv("MISTAKE") ? std::atoi(std::getenv("MISTAKE")) : 0;
static struct Made {
  std::atomic<bool> made = false;
  ~Made() {
    if (made.load()) std::fputs("the mistake has been made\\n", stderr);
  }
} mistake_made;
static bool makes(int number) {
  if (kMistake != number) return false;
  if (!mistake_made.made.load(std::memory_order_relaxed)) {
    mistake_made.made.store(true, std::memory_order_relaxed);
  }
  return true;
}
"""


# What makes programs small that compile for long: text of the planted program, and what it becomes. Lines stay.
SMALLER = {
    ATTENTION: [  # one type, one width
        (r"add_table<half>", "add_table<__nv_bfloat16>"),
        (r"add_lesson_kernels<(?:128|256)>", "add_lesson_kernels<64>"),
    ],
    BACKWARD: [(r"add_table<half>", "add_table<__nv_bfloat16>")],
    "operators_attention": [
        (r"add_table<half>", "add_table<__nv_bfloat16>"),
        (r"add_portable_ways<(?:128|256)>", "add_portable_ways<64>"),
        (r"add_(?:tiles|short_tiles|small_blocks|parts_in_small_blocks)<(?:128|256), [^>]*>\(\);", "{}"),
    ],
}


def plant(text, program):
    """The program's source with all of its mistakes, without the choice between them."""
    return made_smaller(_whole(text, program), program, SMALLER)


def made_smaller(text, program, changes):
    """What becomes of a program's planted text. changes: such as SMALLER."""
    for pattern, new in changes.get(program, ()):
        assert re.search(pattern, text), f"{program} has no {pattern}"
        text = re.sub(pattern, new, text)
    return text


def _whole(text, program):
    headers, number = {}, 0
    for file in files_of(program):
        if file == source_of(program):
            text = planted(text, file, number)
            number += len(derive((ROOT / file).read_text(), file)[0])
            continue
        header = (ROOT / file).read_text()
        headers[file] = planted(header, file, number).replace("#pragma once", "")
        number += len(derive(header, file)[0])

    done = set()  # as by #pragma once

    def with_headers(text, file):
        pieces, end = [], 0
        for include in re.finditer(r'^#include "([^"]+)"$', text, re.M):
            header = include[1]
            if header not in headers:
                continue
            pieces.append(text[end : include.start()])
            end = include.end()
            if header not in done:
                done.add(header)
                inside = with_headers(headers[header], header)
                next_line = text.count("\n", 0, end) + 2
                pieces.append(f'#line 1 "{header}"\n{inside}\n#line {next_line} "{file}"')
        return "".join(pieces) + text[end:]

    return with_headers(text, source_of(program))


def planted(text, file, before=0):
    """The text of a file with all of its mistakes."""
    _, edits = derive(text, file, before)
    pieces, end = [], 0
    for start, stop, new in _outermost(edits):
        pieces += [text[end:start], new]
        end = stop
    return "".join(pieces) + text[end:]


def _outermost(edits):
    """In order; nothing that is planted is inside of something else that is."""
    edits = sorted(edits)
    for (_, stop, _), (start, _, _) in zip(edits, edits[1:]):
        assert stop <= start, "a call inside of a call"
    return edits


# ---- Running them --------------------------------------------------------------------------------

# With halt_on_error a report ends the program with the code 66, instead of at its end. ThreadSanitizer keeps the last
# accesses of each thread, to name in its report the stack of the older access, too. The CUDA threads' are most of the
# memory that a run takes, and a third of its time; nobody here asks for that stack.
TSAN_OPTIONS = "halt_on_error=1 atexit_sleep_ms=0 history_size=0"


def name_of(program):
    return program if program in TESTS else f"{program}_mistakes"


def program_of(name, build):
    """The program with the mistakes."""
    return build / "mutants" / name_of(name)


def environment_of(arguments, multiprocessors, repeat=True):
    """Where early launches come in pairs, a wait for the launch before makes a difference. But they
    cannot where it would not be the same again (IN_PLACE)."""
    repeat = repeat and arguments not in IN_PLACE
    return {"CUDA_CPU_MULTIPROCESSORS": str(multiprocessors),
            "CUDA_CPU_REPEAT_EARLY_LAUNCHES": str(int(repeat))}


def _run(program, arguments, multiprocessors, mistake, prefix=()):
    # A launch that has no other before it finds nothing that is right already.
    repeat = mistake.call.startswith("wait_for_previous_kernel")
    environment = {
        **os.environ, **environment_of(arguments, multiprocessors, repeat),
        "MISTAKE": str(mistake.number),
        "TSAN_OPTIONS": TSAN_OPTIONS,
    }
    command = [*prefix, str(program), *arguments, "--device", "cpu", "--samples", "1"]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return None


def _verdict(result):
    """How a run was found to be wrong; None if it was not."""
    if result is None:
        return "hangs"
    if "ThreadSanitizer: data race" in result.stderr:
        return "data race"
    if match := re.search(r"^cuda_cpu: (.*)$", result.stderr, re.M):
        return "deadlock" if "deadlock:" in match[1] else "error"
    if result.returncode == 1 and "FAILED" in result.stdout:
        return "verification"
    return None if result.returncode == 0 else f"exit code {result.returncode}"


def judge(program, mistake, build, prefix=()):
    """(what finds the mistake or None, the report) by the plain build, or else ThreadSanitizer's, which
    takes long: only in those runs that come to the mistake."""
    runs = RUNS[program]
    for sanitizer in ("", "-thread"):
        path = program_of(program, build.parent / f"cpu{sanitizer}")
        made = []
        for arguments, multiprocessors in runs:
            result = _run(path, arguments, multiprocessors, mistake, prefix if sanitizer else ())
            if result and "error: --algebra is" in result.stderr:
                continue  # the build has few algebras
            if verdict := _verdict(result):
                return verdict, result.stderr + result.stdout if result else ""
            if "the mistake has been made" in result.stderr:
                made.append((arguments, multiprocessors))
        runs = made
    return None, "" if runs else "no run comes to it"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=sorted(RUNS), metavar="PROGRAM", help=f"one of {', '.join(RUNS)}")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="of a mistake; default: all")
    arguments = parser.parse_args()
    program = arguments.program
    chosen = [mistake for mistake in judged(program)
              if not arguments.numbers or mistake.number in arguments.numbers]
    build = ROOT / os.environ.get("CPU_BUILD_DIR", "build/cpu")
    verdicts = {}
    with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        results = pool.map(
            lambda mistake: judge(program, mistake, build, ("setarch", "-R")), chosen
        )
        for mistake, (verdict, report) in zip(chosen, results):
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            line = re.search(r"^(cuda_cpu: .*|.*FAILED.*|SUMMARY.*)$", report, re.M)
            print(f"{mistake}\n      {verdict}: {line[1][:300] if line else ''}", flush=True)
    print(program, verdicts)


if __name__ == "__main__":
    main()
