"""Puts rounds of a lesson and of its peers together into one record, valid by tests/schema.json."""
import copy
import math
import statistics


def percentile(ordered, p):
    """As common/results.h: the element of a sorted list nearest to that rank, halves upwards."""
    return ordered[math.floor(p / 100 * (len(ordered) - 1) + 0.5)]


def tolerance_of(problem):
    """The largest that a row of the lesson's problem is held to. Where its rows differ in how often
    they round on the way, that is the unfused one's, which rounds as a framework does."""
    return max(kernel["tolerance"] for kernel in problem["kernels"])


def mode_of(problem):
    return problem["kernels"][0]["ms"]["mode"]


def finite_or_null(value):
    return value if math.isfinite(value) else None


def worst_of(values):
    """The largest; None, which stands for NaN and infinity, is larger than any."""
    values = list(values)
    return None if None in values else max(values)


def merged_kernel(rows):
    """A lesson's row from those of all rounds: the median of their medians."""
    kernel = copy.deepcopy(rows[-1])
    for key in ("median", "p10", "p90"):
        kernel["ms"][key] = statistics.median(row["ms"][key] for row in rows)
    kernel["ms"]["samples"] = sum(row["ms"]["samples"] for row in rows)
    faster = rows[-1]["ms"]["median"] / kernel["ms"]["median"]
    for key in ("tflops", "gbps", "percent_of_limit"):
        if kernel[key] is not None:
            kernel[key] *= faster
    for key in ("error", "worst_error"):
        kernel[key] = worst_of(row[key] for row in rows)
    kernel["ok"] = all(row["ok"] for row in rows)
    return kernel


def peer_kernel(name, rounds, problem, baseline_ms):
    """A peer's row, from what it did in each round (Measured)."""
    samples = sorted(ms for each in rounds for ms in each.samples)
    median = statistics.median(samples)
    limit = problem["limit_ms"]
    return {
        "name": name,
        "role": "peer",
        "ms": {"median": median, "p10": percentile(samples, 10), "p90": percentile(samples, 90),
               "samples": len(samples), "mode": mode_of(problem)},
        "tflops": problem["flops"] / median * 1e-9,
        "gbps": problem["min_bytes"] / median * 1e-6,
        "percent_of_limit": 100 * limit / median if limit else None,
        "speedup": baseline_ms / median,
        "memory_bytes": None,
        "resources": None,
        "error": worst_of(finite_or_null(each.error) for each in rounds),
        "worst_error": worst_of(finite_or_null(each.worst_error) for each in rounds),
        "tolerance": tolerance_of(problem),
        "ok": all(each.ok for each in rounds),
    }


def merged_problem(problems, peers):
    """problems: the same one of each round's record; peers: {name: [Measured of each round]}."""
    merged = copy.deepcopy(problems[-1])
    names = [kernel["name"] for kernel in merged["kernels"]]
    merged["kernels"] = [merged_kernel([kernel for problem in problems for kernel in
                                        problem["kernels"] if kernel["name"] == name])
                         for name in names]
    baseline_ms = merged["kernels"][0]["ms"]["median"]
    for kernel in merged["kernels"]:
        kernel["speedup"] = baseline_ms / kernel["ms"]["median"]
    not_run = []
    for name, rounds in peers.items():
        reasons = [each.reason for each in rounds if each.reason]
        if reasons:
            not_run.append({"name": name, "role": "peer", "reason": reasons[0]})
        else:
            merged["kernels"].append(peer_kernel(name, rounds, merged, baseline_ms))
    if not_run:
        merged["not_run"] = not_run
    return merged


def merged_run(runs, peers, versions):
    """runs: the records of the lesson's rounds; peers: for each of its problems, in their order,
    what merged_problem wants; versions: of PyTorch and Triton."""
    merged = copy.deepcopy(runs[-1])
    merged["versions"] = versions
    merged["problems"] = [merged_problem(list(problems), of_peers)
                          for *problems, of_peers in zip(*(run["problems"] for run in runs), peers)]
    return merged


def failures(run):
    """(problem's name, row's name, why) of all that was not verified."""
    for problem in run["problems"]:
        for kernel in problem["kernels"]:
            if not kernel["ok"]:
                error = kernel["error"]
                text = "NaN or infinite" if error is None else f"{error:.1e}"
                yield problem["name"], kernel["name"], (
                    f"error {text}, worst {kernel['worst_error']}, "
                    f"tolerance {kernel['tolerance']:.1e}")
        for row in problem.get("not_run", []):
            yield problem["name"], row["name"], row["reason"]
