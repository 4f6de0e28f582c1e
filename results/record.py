"""Runs every lesson on the GPU and records what it measured as results/<gpu>/<lesson>[.N].json.

    results/record.py [--bin FOLDER] [--out FOLDER] [LESSON ...]

A lesson is recorded at its default N, at those of SIZES, and with the arguments of EXTRA (as
<lesson>.<suffix>.json). A lesson that fails is not recorded, and the exit code says so.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {
    "2_matmul_sharedmem": [8192],
    "3_matmul_tensorcore": [1024, 2048, 8192, 16384],
    "4_matmul_cublas": [8192],
}
EXTRA = {
    "10_clifford_gp": {
        "2,0,0": ["--algebra", "2,0,0"],
        "small": ["1024", "--features", "128"],
        "sweep-2,0,0": ["--sweep", "--algebra", "2,0,0"],
        "sweep-3,0,0": ["--sweep", "--algebra", "3,0,0"],
    },
}


def gpu_folder(name):
    """NVIDIA H200 -> h200, NVIDIA GeForce RTX 4090 -> geforce-rtx-4090."""
    return name.removeprefix("NVIDIA ").lower().replace(" ", "-")


def runs_of(lesson):
    """(suffix of the record's name, arguments) of each of its runs."""
    sizes = {str(n): [str(n)] for n in SIZES.get(lesson, [])}
    return [("", []), *sizes.items(), *EXTRA.get(lesson, {}).items()]


def record(program, suffix, arguments, out):
    """One run. Returns True if all of its kernels were verified."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "run.json"
        command = [program, *arguments, "--device", "cuda", "--json", written]
        print("$", program.name, *arguments, flush=True)
        if subprocess.run(command).returncode != 0:
            return False
        text = written.read_text()
    target = out or ROOT / "results" / gpu_folder(json.loads(text)["device"]["name"])
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{program.name}{'.' if suffix else ''}{suffix}.json").write_text(text)
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
        " ".join([lesson, *options])
        for lesson in lessons
        for suffix, options in runs_of(lesson)
        if not record(arguments.bin.resolve() / lesson, suffix, options, arguments.out)
    ]
    if failed:
        print("not recorded:", ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
