"""The compilers: which nvcc there is, for which GPUs it is asked to build, and what g++ can link."""

import os
import re
import shlex
import shutil
import subprocess
import sys

# The first that has cudaGetDriverEntryPointByVersion, which primitives/hopper calls; and ldmatrix.
LEAST_CUDA, LEAST_GPU = (12, 5), 75


def refuse(why):
    """Ends the build with one sentence."""
    print(why, file=sys.stderr)
    sys.exit(2)


def output_of(*command):
    """What a command prints, or "" if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def gpus():
    """The compute capabilities of this machine's GPUs, such as "9.0"."""
    return re.findall(r"^(\d+\.\d)\s*$",
                      output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"), re.MULTILINE)


def number_of(arch):
    """90 of 90, 90a and 90ptx."""
    return int(re.match(r"\d+", arch)[0])


def architectures_named(text):
    """What arch=90a,80 says. 90ptx is code that the driver compiles when the program starts, for GPUs
    that are newer."""
    chosen = "75,80,90a,90ptx" if text == "all" else text
    named = [arch for arch in chosen.split(",") if arch]
    for arch in named or [text]:
        if not re.fullmatch(r"\d{2,3}(ptx|[af])?", arch) or number_of(arch) < LEAST_GPU:
            refuse(f"arch={text}: choose of 75, 80, 86, 89, 90a and so on, with commas, or all")
    # 90 alone has no wgmma.
    return ["90a" if arch == "90" else arch for arch in named]


def release_of(nvcc):
    """(12, 5), or None if it is none that runs."""
    release = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
    return tuple(map(int, release.groups())) if release else None


def dotted(release):
    return ".".join(map(str, release))


def find_nvcc(named):
    """(the first nvcc that is new enough, None), or (None, why there is none). The one in the folder
    `named`, if it is not None, is taken or refused."""
    homes = [named] if named is not None else [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [os.path.join(home, "bin", "nvcc") for home in homes if home]
    why = "there is no nvcc. With the CUDA toolkit: scons cuda=/usr/local/cuda"
    for nvcc in candidates if named is not None else filter(None, [*candidates, shutil.which("nvcc")]):
        release = release_of(nvcc)
        if release and release >= LEAST_CUDA:
            return nvcc, None
        if release:
            why = f"{nvcc} is CUDA {dotted(release)}; the lessons need {dotted(LEAST_CUDA)} or newer"
    if named is not None:
        refuse(f"cuda={named}: {why if 'is CUDA' in why else 'there is no bin/nvcc that runs'}")
    return None, why


def why_not(nvcc, arch):
    """Why it cannot build the lessons for this architecture; None if it can."""
    number = number_of(arch)
    if number < LEAST_GPU:
        return f"the lessons need compute capability {LEAST_GPU / 10}, not {number / 10}"
    known = set(map(int, re.findall(r"\bsm_(\d+)", output_of(nvcc, "--list-gpu-code"))))
    if known and number not in known:
        return f"{nvcc}, CUDA {dotted(release_of(nvcc))}, knows no compute capability {number / 10}"
    return None


def folders_of(nvcc):
    """(where its headers are, where its libraries are), as it says itself; without libraries None. What is
    among the compiler's own headers is not named: gcc would no longer find its own in their order."""
    said = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True)
    names = dict(re.findall(r"^#\$ (INCLUDES|LIBRARIES)=(.*)$", said.stdout + said.stderr, re.MULTILINE))
    headers, libraries = (
        [os.path.realpath(word[2:]) for word in shlex.split(names.get(name, "")) if word[:2] == flag]
        for name, flag in (("INCLUDES", "-I"), ("LIBRARIES", "-L"))
    )
    headers = [folder for folder in headers if folder not in ("/usr/include", "/usr/local/include")]
    # A distribution's nvcc may leave out what the linker finds by itself.
    home = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    libraries += [os.path.join(home, name) for name in ("lib64", "lib", "lib/x86_64-linux-gnu")]
    there = (folder for folder in libraries
             if os.path.basename(folder) != "stubs" and os.path.exists(f"{folder}/libcublas.so"))
    return headers, next(there, None)


def plan_cuda(arch, cuda, found):
    """((nvcc, its headers, its libraries, what to build for), None); or (None, why only the CPU's programs
    are built), which is None, too, where the command line asks for these. `arch` and `cuda` are what the
    command line says, or None; `found`: the GPUs that are there."""
    named = [] if arch is None else architectures_named(arch)
    if cuda == "no":
        return None, None
    nvcc, why = find_nvcc(cuda)
    wanted = named or sorted({"90a" if gpu == "9.0" else gpu.replace(".", "") for gpu in found})
    if not wanted:
        return None, "there is no GPU here. For one elsewhere: scons arch=90a (or 80, ...)"
    if not nvcc:
        return None, why
    cannot = {arch: why for arch in wanted if (why := why_not(nvcc, arch))}
    for arch, why in cannot.items():
        if named:
            refuse(f"arch={arch}: {why}")
        if len(cannot) < len(wanted):
            print(f"Not built for one of the GPUs: {why}")
    if len(cannot) == len(wanted):
        return None, why
    headers, libraries = folders_of(nvcc)
    if not libraries:
        why = f"beside {nvcc} there is no libcublas.so, which the CUDA toolkit has"
        if cuda is not None:
            refuse(f"cuda={cuda}: {why}")
        return None, why
    return (nvcc, headers, libraries, [arch for arch in wanted if arch not in cannot]), None


def code_generation(arch):
    """nvcc's flag for one of them."""
    number = arch.removesuffix("ptx")
    return f"-gencode=arch=compute_{number},code={'sm' if arch == number else 'compute'}_{number}"
