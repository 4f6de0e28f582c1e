"""Runs every lesson on the GPU and records what it measured as results/<gpu>/<lesson>[.RUN].json.

    results/record.py [--bin FOLDER] [--out FOLDER] [LESSON[:RUN] ...]

The benchmarks of operators (operators_NAME) are recorded likewise. A lesson is recorded at its
default N and at those of SIZES (RUN is the N), with the arguments of DEFAULTS, and with the
arguments of VARIANTS (RUN is their name), for up to SECONDS a run, so that most kernels have 50
samples. The runs of each list in SHAPES are one record (RUN is the list's name), which is written
anew after each of them. A lesson that fails is not recorded, and the exit code says so: 1; or 2 if nothing could be
run.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {
    "1_matmul_basic": [1024, 2048],
    "2_matmul_sharedmem": [1024, 2048, 3000, 4097, 8192],
    "3_matmul_tensorcore": [1024, 2048, 8192, 16384],
    "4_matmul_cublas": [8192],
    "7_diffusion_fused": [1024, 4096, 16384, 1048576],
    "8_spatial_gradients": [16384, 1048576],
    "bonus_attention": [512, 1024, 2048, 8192, 16384],
    "bonus_attention_backward": [512, 1024, 2048, 8192, 16384],
    "bonus_diffusion_gpus": [1024, 16384, 131072, 4194304],
    "operators_product": [1024, 2048, 3000, 4097, 8192],
    "operators_diffusion": [1024, 4096, 16384, 1048576],
    "operators_gradients": [16384, 1048576],
    "operators_attention": [512, 1024, 2048, 8192, 16384],
}
# The record has all tables, not one screen of them.
DEFAULTS = {"9_matmul_softmax": ["--all"], "operators_softmax": ["--all"], "bonus_diffusion_gpus": ["--part"]}
SECONDS = 60
SHAPE_SECONDS = 15
VARIANTS = {
    "7_diffusion_fused": {"sweep": ["--sweep"]},
    "8_spatial_gradients": {"sweep": ["--sweep"]},
    "9_matmul_softmax": {"50304": ["128", "--inputs", "2048", "--classes", "50304"]},
    "9_softmax_training": {"many": ["1024", "--inputs", "1024", "--classes", "4000"]},
    "10_clifford_gp": {
        "2,0,0": ["--algebra", "2,0,0"],
        "small": ["1024", "--features", "128"],
        "sweep-2,0,0": ["--sweep", "--algebra", "2,0,0"],
        "sweep-3,0,0": ["--sweep", "--algebra", "3,0,0"],
    },
    "bonus_attention": {
        "64": ["4096", "--width", "64"],
        **{f"{n}-64": [str(n), "--width", "64"] for n in (512, 1024, 2048, 8192, 16384)},
        **{f"{n}-256": [str(n), "--width", "256"] for n in (1024, 4096, 16384)},
        "4097": ["4097"],
    },
    "bonus_attention_backward": {
        "64": ["4096", "--width", "64"],
        **{f"{n}-64": [str(n), "--width", "64"] for n in (512, 1024, 2048, 8192, 16384)},
    },
    "bonus_clifford_fully_connected": {
        "2,0,0": ["--algebra", "2,0,0"],
        "large": ["8192", "--features", "1024"],
        "large-2,0,0": ["8192", "--features", "1024", "--algebra", "2,0,0"],
        "small": ["1024", "--features", "128"],
        "sweep-2,0,0": ["--sweep", "--algebra", "2,0,0"],
        "sweep-3,0,0": ["--sweep", "--algebra", "3,0,0"],
    },
}
# The benchmark of an operator has the runs of its lesson.
VARIANTS |= {
    "operators_diffusion": VARIANTS["7_diffusion_fused"],
    "operators_gradients": {"256-512": ["131072", "--eigen", "256", "--width", "512"], "sweep": ["--sweep"]},
    "operators_softmax": {"50257": ["128", "--inputs", "2048", "--classes", "50257"]},
    "operators_clifford": VARIANTS["10_clifford_gp"],
    "operators_clifford_connected": VARIANTS["bonus_clifford_fully_connected"],
    "operators_attention": {
        **VARIANTS["bonus_attention"],
        "generation": ["1", "--keys", "32768", "--heads", "64", "--kv-heads", "8", "--batch", "1", "--full"],
    },
}
# The arguments of each run.
SHAPES = {
    "operators_product": {
        "shapes": [[str(n), "--type", "fp16"] for n in (512, 1000, 1024, 1280, 1536, 2047, 2048, 3000, 3072, 4096, 4097,
                                                        4104, 5000, 6144, 8192, 10007, 12288, 16384)],
        "few-rows": [[str(rows), "--columns", str(columns), "--depth", "4096", "--type", "fp16"]
                     for columns in (11008, 4096) for rows in (1, 2, 4, 8, 16, 32, 64)],
    },
    "operators_softmax": {"shapes": [
        [str(B), "--inputs", str(D), "--classes", str(C)] for B, D, C in (
            (1, 1024, 1000), (1, 1999, 2500), (1, 832, 22816), (1, 4096, 50256), (1, 4096, 50257),
            (3, 3217, 473), (8, 1024, 1000), (8, 4096, 50257), (16, 777, 333), (30, 3000, 3000),
            (64, 128, 10), (64, 512, 1000), (64, 2048, 50257), (68, 3844, 7664), (100, 4096, 4096),
            (120, 2768, 5748), (128, 2048, 50256), (128, 2048, 50257), (256, 512, 50), (256, 1001, 1001),
            (300, 3000, 128), (512, 777, 1001), (1000, 1000, 1001), (1024, 1024, 100), (1024, 4096, 50257),
            (1098, 1232, 29236), (2048, 4096, 10000), (3000, 1000, 10000), (3000, 1001, 10001),
            (4096, 333, 77), (4096, 1024, 1000), (4096, 1025, 1001), (4096, 2047, 10), (8192, 64, 1000),
            (8192, 4096, 8192), (10000, 777, 333), (16384, 64, 10), (16384, 129, 77), (16384, 1024, 1000),
            (16384, 4096, 50257))]},
}


class Mistake(Exception):
    """What is wrong with the files or programs that a script was given: one sentence."""


def saying_mistakes(main):
    """The exit code of a script's main(); what it cannot do is said in a sentence, and is 2."""
    try:
        return main()
    except (Mistake, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def shown(path):
    """A path as a message has it: from this folder on, if it is in there."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def load(path):
    """A record; a Mistake if the file has none."""
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise Mistake(f"{shown(path)}: {error.strerror}") from error
    except ValueError as error:
        raise Mistake(f"{shown(path)} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise Mistake(f"{shown(path)} is damaged: it has no record")
    return record


def load_run(path):
    """The record of a lesson's run, with a device's name and problems; a Mistake otherwise."""
    run = load(path)
    device = run.get("device")
    if not (isinstance(device, dict) and isinstance(device.get("name"), str)
            and isinstance(run.get("problems"), list)):
        raise Mistake(f"{shown(path)} is damaged: it has no device or no problems")
    return run


# What reading a record raises that lacks something, or has something else in its place.
DAMAGED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration)


def what_lacks(error):
    """One of DAMAGED in words."""
    return f"there is no {error}" if isinstance(error, KeyError) else f"{error or 'something is missing'}"


def as_text(value, width=1000):
    """JSON that is short and that git can compare: what fits one line stands on one, numbers have the digits
    that a measurement has, and of the ways that were tried only the one that was taken is kept."""

    def kept(part):
        if isinstance(part, dict):
            return {key: kept(each) for key, each in part.items() if key != "ways"}
        if isinstance(part, list):
            return [kept(each) for each in part]
        return float(f"{part:.7g}") if isinstance(part, float) else part

    def lines(part):
        line = json.dumps(part)
        if len(line) <= width or not isinstance(part, (dict, list)):
            return line
        inner = (",\n".join(f"{json.dumps(key)}: {lines(each)}" for key, each in part.items())
                 if isinstance(part, dict) else ",\n".join(map(lines, part)))
        return f"{{\n{inner}\n}}" if isinstance(part, dict) else f"[\n{inner}\n]"

    return lines(kept(value)) + "\n"


def write_whole(path, text):
    """Writes a file; what was there stays if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def need_programs(folder, lessons):
    """A Mistake if one of the lessons' programs is not in the folder: before anything is run."""
    missing = [lesson for lesson in lessons if not shutil.which(folder.resolve() / lesson)]
    if missing:
        raise Mistake(f"{shown(folder.resolve())} has no program {missing[0]}"
                      + (f", nor {len(missing) - 1} more" if missing[1:] else "")
                      + ": build it first, by scons, or name another folder, --bin")


def runs_of(lesson):
    """(RUN, arguments) of each recording; RUN is empty for the default N."""
    always = DEFAULTS.get(lesson, [])
    sizes = [(str(n), [str(n), *always]) for n in SIZES.get(lesson, [])]
    return [("", always), *sizes, *VARIANTS.get(lesson, {}).items()]


def runs_named(words, lessons):
    """([(lesson, RUN, arguments)], [unknown word]) of words like LESSON, all its runs, and LESSON:RUN;
    `lessons` has {RUN: arguments} of each."""
    wanted, unknown = [], []
    for word in words:
        lesson, colon, run = word.partition(":")
        found = [(lesson, name, arguments) for name, arguments in lessons.get(lesson, {}).items()
                 if name == run or not colon]
        wanted += found
        if not found:
            unknown.append(word)
    return wanted, unknown


def gpu_folder(name):
    """NVIDIA H200 -> h200, NVIDIA GeForce RTX 4090 -> geforce-rtx-4090."""
    return name.removeprefix("NVIDIA ").lower().replace(" ", "-")


def measure(program, arguments, seconds=SECONDS):
    """The record of one run, or None if a kernel was not verified."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "run.json"
        print("$", program.name, *arguments, flush=True)
        command = [program, *arguments, "--device", "cuda", "--seconds", str(seconds)]
        command += ["--json", written]
        if subprocess.run(command).returncode != 0:
            return None
        return as_text(load_run(written))


def write(program, run, text, out):
    target = out or ROOT / "results" / gpu_folder(json.loads(text)["device"]["name"])
    suffix = f".{run}" if run else ""
    write_whole(target / f"{program.name}{suffix}.json", text)


def record(program, run, arguments, out):
    """One run. Returns True if all of its kernels were verified."""
    text = measure(program, arguments)
    if text:
        write(program, run, text, out)
    return bool(text)


def record_shapes(program, run, out):
    """The runs of one list in SHAPES as one: the first, with the problems of all."""
    whole, problems = None, []
    for shape in SHAPES[program.name][run]:
        text = measure(program, shape, SHAPE_SECONDS)
        if not text:
            return False
        whole = whole or json.loads(text)
        problems += json.loads(text)["problems"]
        write(program, run, as_text({**whole, "problems": problems}), out)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--out", type=pathlib.Path, help="instead of results/<gpu>")
    parser.add_argument("lessons", nargs="*", metavar="LESSON[:RUN]")
    arguments = parser.parse_args()
    names = sorted(
        path.stem for pattern in ("[0-9]*.cu", "bonus*.cu", "exercises/[0-9]*.cu")
        for path in ROOT.glob(pattern)
    )
    names += sorted(f"operators_{path.stem}" for path in ROOT.glob("operators/bench/*.cu"))
    lessons = {name: dict(runs_of(name)) for name in names}
    for name in SHAPES.keys() & lessons.keys():
        lessons[name].update(dict.fromkeys(SHAPES[name]))  # record_shapes() has their arguments
    wanted, unknown = runs_named(arguments.lessons or names, lessons)
    if unknown:
        parser.error(f"no runs {', '.join(unknown)}")
    need_programs(arguments.bin, dict.fromkeys(lesson for lesson, _, _ in wanted))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for lesson, run, options in wanted:
        program = arguments.bin.resolve() / lesson
        done = (record_shapes(program, run, arguments.out) if options is None
                else record(program, run, options, arguments.out))
        if not done:
            failed.append(f"{lesson} {run}".strip())
    if failed:
        print("not recorded:", ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(saying_mistakes(main))
