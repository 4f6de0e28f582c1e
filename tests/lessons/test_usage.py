"""What a lesson does with input that makes no sense, and without a GPU."""

import json
import os
import re
import stat
import subprocess

from conftest import (
    CUDA_BUILD, HAS_GPU, NO_GPU, PROGRAMS, ROOT, check_record, execute, program, source_of, words
)
import pytest

MATMUL = "1_matmul_basic"
LAYER = "6_gating_fused"
BAD_USAGE, DEVICE_CANNOT = 2, 3
# Starting CUDA takes a while.
AT_ONCE = 10 if HAS_GPU else 1


def refused(result, rc, *messages):
    """The lesson said so in one clear line, printed no results, and lost no time."""
    assert result.rc == rc, result.stdout + result.stderr
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if not line.startswith("No usable GPU")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ")
    for message in messages:
        assert re.search(message, errors[0]), result.stderr
    assert result.seconds < AT_ONCE


# ---- N -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lesson", [MATMUL, LAYER])
@pytest.mark.parametrize(
    "n", ["0", "abc", "12abc", "1e3", "8.5", "0x10", "", " 8", "2147483648", "9" * 20]
)
def test_n_that_is_no_size(backend, lesson, n):
    result = execute([program(lesson, backend), n])
    refused(result, BAD_USAGE, r"^error: N is a whole number from 1 to 2147483647 ", f"'{n}'$")


@pytest.mark.parametrize("n", ["-1", "-2147483648", "-0.5"])
def test_negative_n(backend, n):
    refused(execute([program(MATMUL, backend), n]), BAD_USAGE, "N cannot be negative", f"'{n}'$")


@pytest.mark.parametrize("n", ["2147483647", "200000"])
def test_n_larger_than_memory(backend, n):
    result = execute([program(MATMUL, backend), n, "--device", backend])
    refused(result, DEVICE_CANNOT, f"^error: N = {n} needs ", r"\(\d{12,} bytes\)", "are free$")
    needed, free = map(int, re.findall(r"\((\d+) bytes\)", result.stderr))
    assert needed > free > 0


def test_layer_larger_than_memory(backend):
    result = execute([program(LAYER, backend), "200000", "--device", backend, "--channels", "9999"])
    refused(result, DEVICE_CANNOT, "^error: N = 200000 needs ", r"\(\d{12,} bytes\)", "are free$")


def test_layer_with_more_rows_than_an_int_counts(backend):
    result = execute([program(LAYER, backend), "2147483647", "--device", backend])
    refused(result, BAD_USAGE, "rows are more than an int can count")


def options_of(name):
    """The program's options that take a size, each with the largest that it may take."""
    text = execute([program(name), "--help"]).stdout
    found = re.findall(r"^ +(--[\w-]+) INT=(.*?)(?=^ +-)", text + "\n --", re.MULTILINE | re.DOTALL)
    multiples = {option: int((re.findall(r"multiple\s+of\s+(\d+)", rest) or [1])[0]) for option, rest in found}
    return {option: str((2**31 - 1) // multiple * multiple) for option, multiple in multiples.items()}


@pytest.mark.parametrize("lesson", PROGRAMS)
def test_sizes_that_nothing_holds_are_refused_at_once(lesson):
    """Before anything is planned with them: no crash, no silence. Where it is memory, with the bytes."""
    options = options_of(lesson)
    assert set(re.findall(r'\{"(--\w+)", "[^"]*",? *\d', source_of(lesson))) <= set(options)
    huge = str(2**31 - 1)
    cases = [[huge], [str(2**28)], [huge, *(word for pair in options.items() for word in pair)]]
    cases += [[huge, *pair] for pair in options.items()]
    for arguments in cases:
        result = execute([program(lesson), *arguments, "--device", "cpu"])
        assert result.rc in (BAD_USAGE, DEVICE_CANNOT), (arguments, result.stdout, result.stderr)
        refused(result, result.rc)
        if "device memory" in result.stderr:
            needed, free = map(int, re.findall(r"\((\d+) bytes\)", result.stderr))
            assert needed > free > 0


@pytest.mark.parametrize("arguments", [
    ["2_matmul_sharedmem", "2097152"], ["9_softmax_training", "2147483647", "--inputs", "1", "--classes", "65536"],
    ["bonus_clifford_fully_connected", "1", "--features", "1000000"], ["10_clifford_gp", "2147483647", "--features", "1"],
], ids=words)
def test_memory_is_looked_at_before_plans_are_made(arguments):
    result = execute([program(arguments[0]), *arguments[1:], "--device", "cpu"])
    refused(result, DEVICE_CANNOT, r" needs (at least )?\S+ [GTPE]B of device memory \(\d+ bytes\), .*free$")


def test_a_regular_expression_cannot_hang():
    result = execute([program(MATMUL), "8", "--device", "cpu", "--kernel", "(.*)*(.*)*(.*)*$x"])
    refused(result, BAD_USAGE, "no kernel .* matches")


def test_seeds_differ_in_all_their_bits(run):
    errors = [run(MATMUL, "8", "--seed", seed).errors for seed in (1, 1 + 2**56, 1 + 2**63)]
    assert errors[0] != errors[1] != errors[2] != errors[0]


def test_a_long_run_on_the_cpu_is_announced():
    command = [program(LAYER), "8", "--channels", "100000", "--list"]
    assert execute(command).stderr == ""
    command = [program(LAYER), "8", "--channels", "100000", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    process.kill()
    process.wait()
    assert re.fullmatch(r"The CPU backend computes \S+ [GT]FLOP, in about \S+ s\. "
                        r"What decides on that: N, --channels, --hidden\.\n", line)


# ---- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--size", "8"], "--size"),
        (["8", "9"], "not expected: 9"),
        (["--json"], "--json: .* missing"),
        (["--kernel"], "--kernel: .* missing"),
        (["--samples"], "--samples: .* missing"),
        (["--channels"], "--channels: .* missing"),
        (["--samples", "0"], "--samples: .* 0 not in range"),
        (["--samples", "-1"], "--samples cannot be negative"),
        (["--samples", "few"], "--samples: .* few"),
        (["--seconds", "0"], "--seconds: .* 0 not in range"),
        (["--seconds", "-1"], "--seconds cannot be negative"),
        (["--seed", "-1"], "--seed cannot be negative"),
        (["--seed", "x"], "--seed = x"),
        (["--device", "tpu"], "--device is auto or cuda or cpu, not 'tpu'"),
        (["--channels", "0"], "--channels is a whole number from 1 to .*, not '0'"),
        (["--channels", ""], "--channels is a whole number from 1 to .*, not ''"),
        (["--hidden", "-3"], "--hidden cannot be negative"),
        (["--hidden", "many"], "--hidden is a whole number from 1 to .*, not 'many'"),
        (["--kernel", "no such kernel"], "no kernel .* matches --kernel 'no such kernel'"),
        (["--kernel", "("], r"--kernel '\(' is not a regular expression"),
        (["--kernel", "(.{9}){9}"], r"--kernel '.*' counts with {}"),
        (["--kernel", r"(.*)\1"], r"--kernel '.*' refers back with \\1"),
        (["--kernel", "(" * 201], "--kernel takes up to 200 characters, not 201"),
        (["--seconds", "nan"], "--seconds: not a number"),
    ],
    ids=words,
)
def test_bad_option(backend, arguments, message):
    refused(execute([program(LAYER, backend), *arguments]), BAD_USAGE, message)


@pytest.mark.parametrize(
    "arguments, rc, message",
    [
        (["--eigen", "17"], BAD_USAGE, "--eigen is a multiple of 8, not 17"),
        (["--width", "4"], BAD_USAGE, "--width is a multiple of 8, not 4"),
        (["--eigen", "0"], BAD_USAGE, "--eigen is a whole number from 1 to"),
        (["--batch", "0"], BAD_USAGE, "--batch is a whole number from 1 to"),
        (["8", "--batch", "65536"], BAD_USAGE, "--batch: 65535 meshes at most, with 8 vertices each"),
        (["99999999", "--batch", "22", "--device", "cpu"], BAD_USAGE, "--batch: 21 meshes at most, with 99999999"),
        (["8", "--eigen", "65536"], DEVICE_CANNOT, "--eigen 65536: .* bytes of shared memory"),
        (["8", "--eigen", "2147483632"], DEVICE_CANNOT, "--eigen 2147483632: .* shared memory"),
        (["2147483647", "--device", "cpu"], DEVICE_CANNOT, "N = 2147483647 needs "),
        (["8", "--sweep"], BAD_USAGE, "--sweep has sizes of its own: leave out N"),
    ],
    ids=words,
)
def test_bad_diffusion(backend, arguments, rc, message):
    refused(execute([program("7_diffusion_fused", backend), *arguments]), rc, message)


@pytest.mark.parametrize(
    "arguments, rc, message",
    [
        (["--eigen", "17"], BAD_USAGE, "--eigen is a multiple of 8, not 17"),
        (["--width", "4"], BAD_USAGE, "--width is a multiple of 8, not 4"),
        (["--width", "0"], BAD_USAGE, "--width is a whole number from 1 to"),
        (["8", "--width", "2147483632"], DEVICE_CANNOT, "N = 8 needs .* of device memory"),
        (["8", "--eigen", "2147483632"], DEVICE_CANNOT, "N = 8 needs .* of device memory"),
        (["2147483647", "--device", "cpu"], DEVICE_CANNOT, "N = 2147483647 needs "),
        (["8", "--sweep"], BAD_USAGE, "--sweep has sizes of its own: leave out N"),
    ],
    ids=words,
)
def test_bad_spatial_gradients(backend, arguments, rc, message):
    refused(execute([program("8_spatial_gradients", backend), *arguments]), rc, message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--algebra", "2,1,0"],
         "--algebra is 3,0,0 or 2,0,0( or 3,0,1 or 1,3,0 or 4,1,0)?, not '2,1,0'"),
        (["--features", "0"], "--features is a whole number from 1 to .*, not '0'"),
        (["8", "--sweep"], "--sweep has sizes of its own: leave out N"),
        (["--sweep", "--features", "8"], "--sweep has sizes of its own: leave out --features"),
    ],
    ids=words,
)
def test_bad_option_of_clifford(backend, arguments, message):
    command = [program("10_clifford_gp", backend), *arguments, "--device", backend]
    refused(execute(command), BAD_USAGE, message)


def test_connected_has_two_algebras(backend):
    command = [program("bonus_clifford_fully_connected", backend), "--algebra", "3,0,1"]
    refused(execute(command), BAD_USAGE, "--algebra is 3,0,0 or 2,0,0, not '3,0,1'")


def test_help_says_how_to_get_another_algebra(backend):
    words = " ".join(execute([program("10_clifford_gp", backend), "--help"]).stdout.split())
    assert "another one: scons algebra=P,Q,R" in words


def test_option_of_another_lesson(backend):
    refused(execute([program(MATMUL, backend), "--channels", "8"]), BAD_USAGE, "--channels")


def test_too_few_inputs_for_hard_rows(backend):
    result = execute([program("9_matmul_softmax", backend), "8", "--inputs", "2", "--hard-rows"])
    refused(result, BAD_USAGE, "--hard-rows needs at least 3 inputs")


def test_no_such_device(backend):
    result = execute([program(MATMUL, backend), "8", "--device", "cuda"], env=NO_GPU)
    refused(result, DEVICE_CANNOT, "^error: --device cuda: ")


@pytest.mark.parametrize("lesson", PROGRAMS)
def test_help(backend, lesson):
    result = execute([program(lesson, backend), "--help"])
    assert result.rc == 0 and result.stderr == ""
    source = source_of(lesson)
    n_meaning = re.search(r'\.n_meaning = "(.*?)"', source)[1]
    assert re.search(rf"^ *N .*{re.escape(n_meaning)}$", result.stdout, re.MULTILINE)
    own = re.findall(r'\{"(--\w+)"', source)
    for option in ["--help", "--json", "--kernel", "--device", "--samples", "--seconds", "--seed", "--cold",
                   "--hot", "--graph", "--list", *own]:
        assert re.search(rf"^ *(-h,)?{option}\b", result.stdout, re.MULTILINE), option
    for code in range(4):
        assert re.search(rf"\b{code} [a-z]", result.stdout.split("Exit codes:")[1])


@pytest.mark.parametrize("lesson", PROGRAMS)
def test_list(backend, lesson):
    result = execute([program(lesson, backend), "--list"])
    assert result.rc == 0 and result.stderr == ""
    assert re.fullmatch(r"(\S.*: \S.*\n)+", result.stdout)


# ---- --json --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder in which a failed run must leave what was there, and nothing else."""
    old = tmp_path / "old.json"
    old.write_text("old\n")
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "old\n"


@pytest.mark.parametrize(
    "arguments, rc",
    [
        (["0"], BAD_USAGE),
        (["8", "--kernel", "none"], BAD_USAGE),
        (["8", "--kernel", "("], BAD_USAGE),
        (["8", "--samples", "0"], BAD_USAGE),
        (["2147483647", "--device", "cpu"], DEVICE_CANNOT),
    ],
    ids=words,
)
def test_failed_run_leaves_old_record(folder, arguments, rc):
    # The order of the arguments must not matter.
    for command in (["--json", folder / "old.json", *arguments],
                    [*arguments, "--json", folder / "old.json"]):
        refused(execute([program(MATMUL), *command]), rc)


def test_json_in_missing_folder(folder):
    target = folder / "missing" / "record.json"
    refused(execute([program(MATMUL), "8", "--json", target]), BAD_USAGE,
            f"cannot write --json {re.escape(str(target))}: No such file or directory")


def test_json_is_a_folder(folder):
    refused(execute([program(MATMUL), "8", "--json", folder]), BAD_USAGE, "Is a directory")


def test_json_below_a_file(folder):
    refused(execute([program(MATMUL), "8", "--json", folder / "old.json" / "record.json"]),
            BAD_USAGE, "Not a directory")


def test_json_without_a_name(folder):
    refused(execute([program(MATMUL), "8", "--json", ""], cwd=folder), BAD_USAGE, "--json")


@pytest.fixture
def mounted(tmp_path):
    """mounted(options): an empty file system; skips the test unless this user may mount one."""
    target = tmp_path / "mounted"
    target.mkdir()
    is_mounted = False

    def mount(options):
        nonlocal is_mounted
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
        try:
            if subprocess.run(command, capture_output=True).returncode != 0:
                pytest.skip("mounting a file system is not permitted")
        except OSError:
            pytest.skip("there is no mount command")
        is_mounted = True
        return target

    yield mount
    if is_mounted:
        subprocess.run(["umount", str(target)], check=True)


def test_json_in_read_only_place(tmp_path, request):
    if os.geteuid() != 0:
        place = tmp_path / "read_only"
        place.mkdir(mode=0o555)
    else:  # whom permissions do not stop
        place = request.getfixturevalue("mounted")("size=16k,ro")
    result = execute([program(MATMUL), "8", "--json", place / "record.json"])
    refused(result, BAD_USAGE, "cannot write --json .*(Read-only file system|Permission denied)")
    assert list(place.iterdir()) == []


def test_json_on_full_disk(mounted):
    place = mounted("size=16k")
    old = place / "old.json"
    old.write_text("old\n")
    for name in ("record.json", "old.json"):
        result = execute([program(MATMUL), "8", "--json", place / name])
        refused(result, BAD_USAGE, "cannot write --json .*No space left on device")
        assert list(place.iterdir()) == [old]
        assert old.read_text() == "old\n"


def test_json_to_full_device():
    result = execute([program(MATMUL), "8", "--device", "cpu", "--json", "/dev/full"])
    assert result.rc == BAD_USAGE
    assert result.stderr == "error: cannot write --json /dev/full: No space left on device\n"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_json_to_device():
    result = execute([program(MATMUL), "8", "--device", "cpu", "--json", "/dev/stderr"])
    assert result.rc == 0
    check_record(json.loads(result.stderr))


def test_json_is_replaced_atomically(tmp_path):
    target, link = tmp_path / "record.json", tmp_path / "link"
    target.write_text("old\n")
    link.hardlink_to(target)
    result = execute([program(MATMUL), "8", "--device", "cpu", "--json", target])
    assert result.rc == 0
    check_record(json.loads(target.read_text()))
    # Whoever had opened the old file still reads the old text: it was not written over.
    assert link.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "record.json"]


def test_json_through_symbolic_link(tmp_path):
    """/dev/stdout is such a link, to a file when the output goes to one."""
    target, link = tmp_path / "record.json", tmp_path / "link"
    target.write_text("old\n")
    link.symlink_to(target)
    assert execute([program(MATMUL), "8", "--device", "cpu", "--json", link]).rc == 0
    assert link.is_symlink()
    check_record(json.loads(target.read_text()))


def test_json_to_standard_output_that_is_a_file(tmp_path):
    """What was there stays, then the table, then the record; also by a name of its own."""
    log, link = tmp_path / "log.txt", tmp_path / "link"
    for name in ("/dev/stdout", "-", log, link):
        log.write_text("old\n")
        if name == link:
            link.symlink_to("/dev/stdout")
        with open(log, "a") as output:
            command = [program(MATMUL), "8", "--device", "cpu", "--json", name]
            assert subprocess.run([str(word) for word in command], stdout=output).returncode == 0
        old, rest = log.read_text().split("\n", 1)
        table, record = rest.split("\n{\n")
        assert old == "old" and "All 4 kernels verified" in table
        check_record(json.loads("{" + record))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "log.txt"]


def test_json_through_link_to_what_is_not_there_yet(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("record.json")
    assert execute([program(MATMUL), "8", "--device", "cpu", "--json", link]).rc == 0
    assert link.is_symlink()
    check_record(json.loads((tmp_path / "record.json").read_text()))


def test_json_keeps_permissions(tmp_path):
    target = tmp_path / "record.json"
    target.write_text("old\n")
    target.chmod(0o600)
    assert execute([program(MATMUL), "8", "--device", "cpu", "--json", target]).rc == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@pytest.mark.parametrize("arguments", [["8"], ["--help"], ["--list"]], ids=words)
def test_output_that_cannot_be_written(arguments):
    with open("/dev/full", "w") as full:
        process = subprocess.run([program(MATMUL), *arguments, "--device", "cpu"], stdout=full,
                                 stderr=subprocess.PIPE, text=True)
    assert process.returncode == BAD_USAGE
    assert process.stderr == "error: cannot write what is printed: No space left on device\n"


# ---- Without a GPU -------------------------------------------------------------------------------


def runs_on_cpu(result, line):
    assert result.rc == 0, result.stderr
    assert result.stderr == line + "\n"
    assert "CPU backend" in result.stdout
    assert re.search(r"^All \d+ kernels verified", result.stdout, re.MULTILINE)


def test_fallback_takes_seconds():
    result = execute([ROOT / LAYER, "4096"], env=NO_GPU, timeout=60)
    runs_on_cpu(result, "No usable GPU: running on the CPU backend with N = 136 instead of 4096"
                        " (--device cpu to insist).")


@pytest.mark.parametrize("lesson", PROGRAMS)
def test_fallback_of_cuda_build(lesson, tmp_path):
    path = CUDA_BUILD / lesson
    if not path.exists():
        pytest.skip("there is no CUDA build")
    target = tmp_path / "record.json"
    result = execute([path, "1", "--json", target], env=NO_GPU)
    runs_on_cpu(result, "No usable GPU: running on the CPU backend with N = 1.")
    record = json.loads(target.read_text())
    check_record(record)
    assert record["device"]["backend"] == "cpu"


def test_device_cpu_insists_on_n(tmp_path):
    target = tmp_path / "record.json"
    result = execute([ROOT / MATMUL, "300", "--device", "cpu", "--samples", "1", "--json", target])
    assert result.rc == 0 and result.stderr == ""
    assert json.loads(target.read_text())["problems"][0]["dims"] == {"N": 300}


def test_lessons_side_by_side(tmp_path):
    """Two of the same lesson, to two files and to one."""
    for names in (["a.json", "b.json"], ["c.json", "c.json"]):
        runs = [
            subprocess.Popen(
                [program(MATMUL), "100", "--device", "cpu", "--seed", str(seed), "--json",
                 tmp_path / name],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for seed, name in enumerate(names)
        ]
        for process in runs:
            stdout, stderr = process.communicate(timeout=60)
            assert process.returncode == 0 and stderr == ""
            assert "All 4 kernels verified" in stdout
    records = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(records) == ["a.json", "b.json", "c.json"]
    for record in records.values():
        check_record(record)
    assert records["a.json"]["seed"] == 0 and records["b.json"]["seed"] == 1


@pytest.mark.parametrize("capability", ["80", "86"])
@pytest.mark.parametrize("lesson", PROGRAMS)
def test_rows_that_need_hopper_say_so_elsewhere(lesson, capability):
    """Devices with less shared memory, too: rows that they cannot run say why."""
    shapes = {"gating": ["--channels", "8", "--hidden", "8"], "softmax": ["--inputs", "8", "--classes", "100"],
              "8_": ["--eigen", "16", "--width", "16"], "clifford": ["--features", "12"], "attention": ["--width", "64"]}
    shape = next((words for part, words in shapes.items() if part in lesson), [])
    size = ["8", *shape, "--device", "cpu", "--samples", "1"]
    env = {"CUDA_CPU_COMPUTE_CAPABILITY": capability}
    rows = execute([program(lesson), *size, "--list"], env=env).stdout.splitlines()
    result = execute([program(lesson), *size], env=env)
    if lesson == "bonus_diffusion_gpus":  # has no other rows
        assert result.rc == 3 and "every kernel of this lesson needs" in result.stderr
        return
    assert result.rc == 0, result.stdout + result.stderr
    unable = result.stdout.count("needs a GPU of compute capability 9.0")
    too_large = result.stdout.count(" KB of shared memory a block")
    assert f"All {len(rows) - unable - too_large} kernels verified" in result.stdout
    assert too_large <= (capability == "86")
    assert (unable > 0) == bool(re.match(r"3_|6_|7_|8_|9_matmul|10_|bonus_clifford|bonus_attention", lesson))
