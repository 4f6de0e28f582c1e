"""What the CPU backend counts is what the profiler counts on a GPU: results/<gpu>/counts/."""
import json
import sys

import pytest

from conftest import ROOT, execute, program

sys.path.insert(0, str(ROOT / "results"))
import counters  # noqa: E402

# The same chip, with another memory: what it counts but for that is the same.
FOLDERS = [ROOT / "results" / gpu / "counts" for gpu in ("h200", "h100-80gb-hbm3")]


def records_named(pattern):
    """The records of counts of that name."""
    return sorted(path for folder in FOLDERS for path in folder.glob(f"{pattern}.json"))


RUNS = [(lesson, run, arguments) for lesson, runs in counters.SMALL.items()
        for run, arguments in runs.items()]
# How far apart the two may be; lessons that are not here: 5%.
TOLERANCE = {"1_matmul_basic": 0, "2_matmul_sharedmem": 0, "bonus_matmul_A_stationary": 0,
             "5_gating_unfused": 0.02, "6_gating_fused": 0.02}

# Why they differ beyond that.
MERGED = "nvcc makes one load or store of four bytes and its neighbours; the CPU's compiler does not"
SPLIT = "zeros of a whole float4 are four stores for the CPU's compiler"
APART = "a float2 whose halves go to different registers is two loads for the CPU's compiler"
ARBITRATION = "the profiler's conflicts are also the times that loads and stores wait for each other"
# docs/lessons/6_gating_fused.md, "What padding costs": the counts are a sector a line above, exactly.
PADDED = "cp.async asks again for each line of a row that lies at an odd multiple of 16 bytes in shared memory"
BIAS = "the rows of the fragment are the same row of biases, which nvcc loads once"
POLLING = "loads of those who wait for others: as many as it takes"
ZEROS = "the profiler counts a sector for a copy of nothing but zeros"
UNKNOWN = "the profiler counts up to a quarter more stores of logits; why is not known"
COPIES = "the profiler counts twice the sectors of some 16-byte copies; why is not known"
SUMS = "the profiler counts a twelfth more sectors of backward's stores; why is not known"
HALF = "the CPU's compiler tells of half of these stores; why is not known"
EXPLAINED = {
    ("2_matmul_sharedmem", "", "square: tile"): {"shared_load_requests": MERGED},
    ("2_matmul_sharedmem", "", "square: registers"): {
        "shared_load_requests": MERGED, "shared_store_conflicts": ARBITRATION},
    ("2_matmul_sharedmem", "", "square: vectors"): {"shared_store_conflicts": ARBITRATION},
    ("2_matmul_sharedmem", "", "square: stream-K"): {"global_load_requests": POLLING, "global_load_sectors": POLLING},
    ("3_matmul_tensorcore", "", "square: stages"): {"global_store_requests": HALF, "global_store_sectors": HALF},
    ("3_matmul_tensorcore", "", "square: wmma global"): {"shared_load_conflicts": ARBITRATION},
    ("3_matmul_tensorcore", "", "square: wmma shared"): {"global_load_sectors": PADDED},
    **{("6_gating_fused", "", f"{problem}: {kernel}"): {
        "global_load_sectors": PADDED, "shared_load_requests": BIAS, "shared_load_conflicts": BIAS}
       for problem, kernel in (("layer", "tensor cores"), ("layer", "async tiles"),
                               ("layer", "resident weights"), ("square", "tensor cores"),
                               ("square", "async tiles"))},
    ("6_gating_fused", "", "layer: warp specialization"): {"shared_load_requests": MERGED},
    ("7_diffusion_fused", "", "forward: one launch"): {
        "global_load_requests": POLLING, "global_load_sectors": POLLING,
        "global_store_requests": SPLIT, "global_store_sectors": SPLIT,
        "shared_load_requests": MERGED, "shared_store_conflicts": ARBITRATION},
    **{("7_diffusion_fused", "", f"{which}: clusters"): {
        "global_load_requests": POLLING, "global_load_sectors": POLLING,
        "global_store_requests": SPLIT, "global_store_sectors": SPLIT,
        "shared_load_requests": MERGED, **({"shared_store_conflicts": ARBITRATION} if which == "backward" else {})}
       for which in ("forward", "backward")},
    ("8_spatial_gradients", "", "forward: one kernel"): {"shared_store_conflicts": ARBITRATION},
    ("8_spatial_gradients", "", "backward: associated"): {
        "global_store_sectors": SUMS, "shared_store_conflicts": ARBITRATION},
    ("8_spatial_gradients", "", "backward: warp specialization"): {
        "global_store_sectors": SUMS, "shared_store_conflicts": ARBITRATION},
    **{("9_matmul_softmax", "64,128,10", f"TF32 64x128x10: {kernel}"): {"shared_load_requests": MERGED}
       for kernel in ("unfused tiles", "fused tiles", "fused cluster")},
    **{("9_matmul_softmax", run, f"TF32 {problem}: unfused tiles"): {"shared_load_requests": MERGED}
       for run, problem in (("300,300,260", "300x300x260"), ("9,233,4101", "9x233x4101"))},
    ("9_matmul_softmax", "300,300,260", "TF32 300x300x260: online tiles"): {
        "global_store_requests": UNKNOWN, "shared_load_requests": MERGED},
    ("9_matmul_softmax", "300,300,260", "TF32 300x300x260: exchange tiles"): {
        "global_store_requests": UNKNOWN, "global_store_sectors": UNKNOWN, "shared_load_requests": MERGED},
    ("9_matmul_softmax", "300,300,260", "TF32 300x300x260: online specialized"): {
        "global_load_requests": UNKNOWN, "global_store_sectors": UNKNOWN, "shared_load_requests": MERGED,
        "shared_store_requests": MERGED, "shared_store_conflicts": ARBITRATION},
    ("9_matmul_softmax", "300,300,260", "TF32 300x300x260: fused specialized"): {
        "global_load_requests": POLLING, "global_load_sectors": POLLING, "shared_load_requests": MERGED,
        "shared_store_requests": MERGED, "shared_store_conflicts": ARBITRATION},
    ("9_matmul_softmax", "9,233,4101", "TF32 9x233x4101: online tiles"): {
        "global_store_requests": UNKNOWN, "shared_load_requests": MERGED},
    ("9_matmul_softmax", "9,233,4101", "TF32 9x233x4101: exchange tiles"): {
        "global_load_requests": POLLING, "global_load_sectors": POLLING, "global_store_requests": UNKNOWN,
        "shared_load_requests": MERGED},
    **{("10_clifford_gp", "", f"forward: {kernel}"): {"shared_load_requests": MERGED}
       for kernel in ("fused product", "one launch")},
    ("10_clifford_gp", "", "forward: row on chip"): {"global_load_sectors": COPIES, "shared_load_requests": MERGED},
    ("10_clifford_gp", "", "forward: rows streamed"): {"shared_store_conflicts": ARBITRATION},
    ("10_clifford_gp", "", "forward + backward: one launch each"): {"shared_load_requests": MERGED},
    ("10_clifford_gp", "", "forward + backward: both on chip"): {
        "global_load_sectors": COPIES, "shared_load_requests": MERGED},
    ("10_clifford_gp", "", "forward + backward: both streamed"): {
        "shared_load_requests": MERGED, "shared_load_conflicts": ARBITRATION},
    **{("bonus_attention", "", f"bf16 {mask}: rows"): {
        "shared_load_requests": MERGED, "shared_store_requests": MERGED, "shared_store_conflicts": MERGED}
       for mask in ("full", "causal")},
}
COUNTS = [*counters.SOURCES]


def count_on_cpu(lesson, arguments, tmp_path, env=None):
    """The problems of the record of a run on the CPU."""
    path = tmp_path / "counted.json"
    result = execute([program(lesson), *arguments, "--device", "cpu", "--count", "--json", path], env=env)
    if "not compiled for it" in result.stderr:
        pytest.skip("this compiler's programs do not count")
    assert result.rc == 0, result.stderr
    return json.loads(path.read_text())["problems"]


def compare(lesson, run, arguments, tmp_path):
    """(kernel, count) -> (counted, recorded), those that are further apart than they may be; and how
    many were compared."""
    # As many multiprocessors as recorded: kernels whose blocks stay have one on each.
    problems = count_on_cpu(lesson, arguments, tmp_path, env={"CUDA_CPU_MULTIPROCESSORS": "132"})
    suffix = f".{run}" if run else ""
    record = json.loads(records_named(f"{lesson}{suffix}")[0].read_text())
    apart, compared = {}, 0
    for ours, theirs in zip(problems, record["problems"], strict=True):
        assert ours["dims"] == theirs["dims"]
        here = [known for known in theirs["kernels"] if known["name"] != "cuDNN"]  # is on a GPU only
        for kernel, known in zip(ours["kernels"], here, strict=True):
            assert kernel["name"] == known["name"]
            if kernel["counts"]["library_bytes"] or not known["counts"]:
                continue  # what the library's kernels really ask for is not known here
            compared += 1
            for count in COUNTS:
                counted, recorded = kernel["counts"][count], known["counts"][count]
                allowed = TOLERANCE.get(lesson, 0.05) * recorded
                if count.endswith("conflicts"):  # the profiler's are not the same in each run
                    requests = count.replace("conflicts", "requests")
                    allowed = 0.05 * max(kernel["counts"][requests], known["counts"][requests])
                if abs(counted - recorded) > allowed:
                    name = f"{ours['name']}: {kernel['name']}"
                    apart[name, count] = (counted, recorded)
    return apart, compared


@pytest.mark.extensive
@pytest.mark.parametrize("lesson, run, arguments", RUNS, ids=lambda value: str(value))
def test_counts_are_the_profilers(lesson, run, arguments, tmp_path):
    apart, compared = compare(lesson, run, arguments, tmp_path)
    assert compared > 0
    reasons = {(kernel, count): why for (*where, kernel), whys in EXPLAINED.items()
               if where == [lesson, run] for count, why in whys.items()}
    # Who waits looks as often as it takes, and arbitration is another one in each run: these may be the same.
    explained = {key for key, why in reasons.items() if why not in (POLLING, ARBITRATION) or key in apart}
    assert apart.keys() == explained, {key: apart.get(key, "explained, but equal")
                                       for key in apart.keys() ^ explained}


@pytest.mark.parametrize("lesson", [*counters.SMALL, *(f"{name}.moved" for name in counters.MOVED)])
def test_counts_are_recorded(lesson):
    paths = records_named(f"{lesson}*")
    assert paths
    for path in paths:
        record = json.loads(path.read_text())
        assert not record["commit"].endswith("-dirty")
        for problem in record["problems"]:
            for kernel in problem["kernels"]:
                assert kernel["ok"], kernel
                assert kernel["counts"] is None or kernel["counts"]["l2_bytes"] >= 0


# ---- Libraries -----------------------------------------------------------------------------------


def test_product_of_the_library_counts_its_inputs_and_outputs(tmp_path):
    for problem in count_on_cpu("4_matmul_cublas", ["100"], tmp_path):
        size = 2 if problem["name"] in ("fp16", "bf16") else 4
        assert len(problem["kernels"]) == 2
        for kernel in problem["kernels"]:
            counts = kernel["counts"]
            assert counts["library_bytes"] == counts["l2_bytes"] == 3 * 100**2 * size
            assert counts["global_load_requests"] == counts["global_store_requests"] == 0


def test_row_of_several_kernels_is_their_sum(tmp_path):
    K, H = 24, 40
    steps, layer, _ = count_on_cpu("5_gating_unfused", ["8", "--channels", str(K), "--hidden", str(H)], tmp_path)
    six, two = (kernel["counts"] for kernel in layer["kernels"])
    M = layer["dims"]["M"]
    each = [kernel["counts"] for kernel in steps["kernels"]]
    for count in six.keys() - {"worst"}:
        assert six[count] == sum(step[count] for step in each), count
    product = 2 * (M * K + K * H + M * H)
    assert [step["library_bytes"] for step in each] == [product, 0, 0, product, 0, 0]
    assert six["global_load_requests"] > 0 and six["l2_bytes"] > six["library_bytes"]
    # With both weights, and their biases.
    assert two["library_bytes"] == 2 * (M * K + 2 * K * H + 2 * H + 2 * M * H)


# At the sizes that a lesson takes on the CPU each of these rows moves more than the next one.
LADDERS = {
    "5_gating_unfused": [
        ("layer", ["six kernels", "cuBLASLt + one kernel"]),
        ("square", ["six kernels", "cuBLASLt + one kernel"])],
    "6_gating_fused": [
        ("layer", ["one thread per element", "cuBLASLt + one kernel", "tensor cores", "async tiles",
                   "resident weights", "warp specialization"]),
        # The library's row counts its products' inputs once. Tiles with three steps of k bring some of them three times.
        ("square", ["one thread per element", "tensor cores", "async tiles", "clusters"]),
        ("square", ["one thread per element", "cuBLASLt + one kernel", "clusters"])],
    # The unfused rows' products count as little as they could move: here that is less than split-K.
    "7_diffusion_fused": [
        ("forward", ["unfused", "one launch"]),
        ("forward", ["split-K", "half fused", "one launch"])],
    "8_spatial_gradients": [
        # So few vertices that what each block of *warp specialization* loads at its start counts.
        ("forward", ["unfused", "one kernel", "associated", "cluster"]),
        ("forward", ["one kernel", "warp specialization", "cluster"]),
        ("backward", ["unfused", "associated", "warp specialization"])],
}


@pytest.mark.parametrize("lesson", [
    pytest.param(lesson, marks=[pytest.mark.extensive] * (lesson != "6_gating_fused")) for lesson in LADDERS])
def test_fusion_moves_fewer_bytes_at_the_sizes_for_the_cpu(lesson, tmp_path):
    moved = {(problem["name"], kernel["name"]): kernel["counts"]["l2_bytes"]
             for problem in count_on_cpu(lesson, [], tmp_path) for kernel in problem["kernels"]}
    for problem, rows in LADDERS[lesson]:
        bytes_of = [moved[problem, row] for row in rows]
        assert bytes_of == sorted(set(bytes_of), reverse=True), (problem, rows, bytes_of)


def test_explanations_are_of_kernels_that_are_there():
    for (lesson, run, kernel), reasons in EXPLAINED.items():
        suffix = f".{run}" if run else ""
        record = json.loads(records_named(f"{lesson}{suffix}")[0].read_text())
        names = {f"{problem['name']}: {each['name']}" for problem in record["problems"]
                 for each in problem["kernels"]}
        assert kernel in names and reasons.keys() <= set(COUNTS)
