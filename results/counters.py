"""Counts on the GPU what each kernel moves, by its profiler, as results/<gpu>/counts/<lesson>[.RUN].json.

    results/counters.py [--bin FOLDER] [--out FOLDER] [--keep FOLDER] [LESSON ...]

ncu watches one verified launch of every row (`--count`), and what it saw becomes the `counts` of the
row's kernels, summed over the row's launches. Two kinds of runs: those of SMALL are what the CPU
backend counts as well, and tests hold the two together; that of the default N (RUN is "moved") has
the bytes that went through the L2 cache and the memory. --keep leaves ncu's own tables there.
"""
import argparse
import csv
import pathlib
import shutil
import subprocess
import sys
import tempfile

from record import (DAMAGED, Mistake, ROOT, as_text, gpu_folder, load_run, need_programs, saying_mistakes,
                    what_lacks, write_whole)

# RUN and arguments of each run; the CPU backend counts these in seconds.
SMALL = {
    "1_matmul_basic": {"": ["256"]},
    "2_matmul_sharedmem": {"": ["256"]},
    "3_matmul_tensorcore": {"": ["256"]},
    "5_gating_unfused": {"": ["8"]},
    "6_gating_fused": {"": ["8"]},
    "7_diffusion_fused": {"": ["512"]},
    "8_spatial_gradients": {"": ["512"]},
    "9_matmul_softmax": {
        "64,128,10": ["64", "--inputs", "128", "--classes", "10"],
        "300,300,260": ["300", "--inputs", "300", "--classes", "260"],
        "9,233,4101": ["9", "--inputs", "233", "--classes", "4101"],
    },
    "10_clifford_gp": {"": ["8"]},
    "bonus_attention": {"": ["256", "--width", "64", "--heads", "2", "--batch", "1"]},
    "bonus_matmul_A_stationary": {"": ["256"]},
}
# The lessons whose tables say what was moved.
MOVED = {
    "5_gating_unfused": [], "6_gating_fused": [], "7_diffusion_fused": [],
    "8_spatial_gradients": [], "9_matmul_softmax": ["--all"], "10_clifford_gp": [],
    "bonus_attention": [],
}

L1 = "l1tex__{}_pipe_lsu_mem_{}_op_{}.sum"
SASS = "smsp__sass_inst_executed_op_{}.sum"
# What a count is the sum of. Requests of cp.async are among the loads.
SOURCES = {
    "global_load_requests": [L1.format("t_requests", "global", "ld")],
    "global_load_sectors": [L1.format("t_sectors", "global", "ld")],
    "global_store_requests": [L1.format("t_requests", "global", "st")],
    "global_store_sectors": [L1.format("t_sectors", "global", "st")],
    # ldmatrix and stmatrix count apart.
    "shared_load_requests": [SASS.format("shared_ld"), SASS.format("ldsm")],
    "shared_load_conflicts": [L1.format("data_bank_conflicts", "shared", "ld")],
    "shared_store_requests": [SASS.format("shared_st"), SASS.format("shared_stsm")],
    "shared_store_conflicts": [L1.format("data_bank_conflicts", "shared", "st")],
    # With and without a result.
    "atomic_requests": [L1.format("t_requests", "global", op) for op in ("atom", "red")],
    "atomic_sectors": [L1.format("t_sectors", "global", op) for op in ("atom", "red")],
}
MOVED_SOURCES = {
    "dram_read_bytes": ["dram__bytes_read.sum"],
    "dram_write_bytes": ["dram__bytes_write.sum"],
}
L2_SECTORS = "lts__t_sectors_srcunit_tex.sum"


def wanted(moved):
    sources = MOVED_SOURCES if moved else SOURCES | MOVED_SOURCES
    return sorted({name for names in sources.values() for name in names} | {L2_SECTORS})


def profile(program, arguments, metrics, keep):
    """(the program's record, ncu's rows): a row a launch, by the name of the column."""
    with tempfile.TemporaryDirectory() as folder:
        table, written = pathlib.Path(folder) / "ncu.csv", pathlib.Path(folder) / "run.json"
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--nvtx", "--csv",
                   "--page", "raw", "--print-units", "base", "--log-file", table,
                   "--metrics", ",".join(metrics),
                   program, *arguments, "--device", "cuda", "--count", "--json", written]
        print("$", program.name, *arguments, flush=True)
        if subprocess.run(command).returncode != 0:
            print(table.read_text()[:2000] if table.exists() else "", file=sys.stderr)
            return None, []
        if keep:
            name = "_".join([program.name, *arguments]).replace("--", "")
            write_whole(keep / f"{name}.csv", table.read_text())
            write_whole(keep / f"{name}.json", written.read_text())
        return load_run(written), rows_of(table.read_text())


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if row["ID"]]  # the first has the units


def of_row(row, name):
    """Whether ncu saw this launch in the range of that name: "<default domain>:NAME:none:none:..."."""
    ranges = next(cell for column, cell in row.items() if "Push/Pop_Range" in column)
    return f">:{name}:" in ranges


def number(row, metric):
    return float(row[metric].replace(",", "")) if row.get(metric) else 0.0


def add_counts(record, rows, moved):
    """The record with `counts` of its kernels, those that ncu saw."""
    for problem in record["problems"]:
        for kernel in problem["kernels"]:
            own = [row for row in rows if of_row(row, f"{problem['name']}: {kernel['name']}")]
            sources = MOVED_SOURCES if moved else SOURCES | MOVED_SOURCES
            counts = {count: round(sum(number(row, name) for row in own for name in names))
                      for count, names in sources.items()}
            counts["l2_bytes"] = round(32 * sum(number(row, L2_SECTORS) for row in own))
            kernel["counts"] = counts if own else None
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--out", type=pathlib.Path, help="instead of results/<gpu>/counts")
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("lessons", nargs="*", metavar="LESSON")
    arguments = parser.parse_args()
    lessons = arguments.lessons or [*SMALL]
    if unknown := [lesson for lesson in lessons if lesson not in SMALL]:
        parser.error(f"nothing to count of {', '.join(unknown)}: choose of {', '.join(SMALL)}")
    need_programs(arguments.bin, lessons)
    if not shutil.which("ncu"):
        raise Mistake("there is no ncu, the profiler that comes with the CUDA toolkit")
    failed = []
    for lesson in lessons:
        runs = [(run, options, False) for run, options in SMALL[lesson].items()]
        runs += [("moved", MOVED[lesson], True)] if lesson in MOVED else []
        for run, options, moved in runs:
            record, rows = profile(arguments.bin.resolve() / lesson, options, wanted(moved),
                                   arguments.keep)
            if not record:
                failed.append(f"{lesson} {run}".strip())
                continue
            out = arguments.out or (
                ROOT / "results" / gpu_folder(record["device"]["name"]) / "counts")
            try:
                text = as_text(add_counts(record, rows, moved))
            except DAMAGED as error:
                raise Mistake(f"what ncu wrote of {lesson} is damaged: {what_lacks(error)}") from error
            write_whole(out / f"{lesson}{'.' + run if run else ''}.json", text)
    if failed:
        print("not counted:", ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(saying_mistakes(main))
