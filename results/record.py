"""Runs every lesson on the GPU and records what it measured as results/<gpu>/<lesson>[.RUN].json.

    results/record.py [--bin FOLDER] [--out FOLDER] [LESSON ...]

A lesson is recorded at its default N (with the arguments of DEFAULTS), at those of SIZES (RUN is
the N), and with the arguments of VARIANTS (RUN is their name), for up to SECONDS a run, so that most
kernels have 50 samples. A lesson that fails is not recorded, and the exit code says so.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {
    "1_matmul_basic": [1024, 2048],
    "2_matmul_sharedmem": [1024, 2048, 8192],
    "3_matmul_tensorcore": [1024, 2048, 8192, 16384],
    "4_matmul_cublas": [8192],
    "7_diffusion_fused": [1024, 4096, 16384, 1048576],
    "8_spatial_gradients": [16384, 1048576],
}
DEFAULTS = {"9_matmul_softmax": ["--all"]}  # the record has all tables, not one screen of them
SECONDS = 60
VARIANTS = {
    "7_diffusion_fused": {"sweep": ["--sweep"]},
    "8_spatial_gradients": {"sweep": ["--sweep"]},
    "10_clifford_gp": {
        "2,0,0": ["--algebra", "2,0,0"],
        "small": ["1024", "--features", "128"],
        "sweep-2,0,0": ["--sweep", "--algebra", "2,0,0"],
        "sweep-3,0,0": ["--sweep", "--algebra", "3,0,0"],
    },
}


def runs_of(lesson):
    """(RUN, arguments) of each recording; RUN is empty for the default N."""
    sizes = [(str(n), [str(n)]) for n in SIZES.get(lesson, [])]
    return [("", DEFAULTS.get(lesson, [])), *sizes, *VARIANTS.get(lesson, {}).items()]


def gpu_folder(name):
    """NVIDIA H200 -> h200, NVIDIA GeForce RTX 4090 -> geforce-rtx-4090."""
    return name.removeprefix("NVIDIA ").lower().replace(" ", "-")


def record(program, run, arguments, out):
    """One run. Returns True if all of its kernels were verified."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "run.json"
        print("$", program.name, *arguments, flush=True)
        command = [program, *arguments, "--device", "cuda", "--seconds", str(SECONDS), "--json", written]
        if subprocess.run(command).returncode != 0:
            return False
        text = written.read_text()
    target = out or ROOT / "results" / gpu_folder(json.loads(text)["device"]["name"])
    target.mkdir(parents=True, exist_ok=True)
    suffix = f".{run}" if run else ""
    (target / f"{program.name}{suffix}.json").write_text(text)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--out", type=pathlib.Path, help="instead of results/<gpu>")
    parser.add_argument("lessons", nargs="*", metavar="LESSON")
    arguments = parser.parse_args()
    lessons = arguments.lessons or sorted(
        path.stem for pattern in ("[0-9]*.cu", "bonus*.cu") for path in ROOT.glob(pattern)
    )
    failed = [
        f"{lesson} {run}".strip()
        for lesson in lessons
        for run, options in runs_of(lesson)
        if not record(arguments.bin.resolve() / lesson, run, options, arguments.out)
    ]
    if failed:
        print("not recorded:", ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
