"""Makes a wheel of the library: what `pip install .` and `pip wheel .` call, as PEP 517 has it. It needs what scons
needs to build, and nothing of PyPI's.

The wheel has the CPU's library and, where there is nvcc, the GPU's. `--config-settings arch=90a` is for scons, as each
other word of its command line; without it arch=all is built. With `--config-settings scons=no` nothing is built: the
wheel has the libraries that are in build/."""

import base64
import hashlib
import os
from pathlib import Path
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).with_name("fused_kernels")
sys.path.insert(0, str(ROOT / "site_scons"))
from toolkit import output_of, plan_cuda, refuse

VERSION = re.search(r"#define FK_VERSION (\d+)", (ROOT / "operators/include/fused_kernels.h").read_text())[1]
INFO = f"fused_kernels-{VERSION}.dist-info"
METADATA = f"""Metadata-Version: 2.1
Name: fused_kernels
Version: {VERSION}
Summary: Fused GPU operators: a C library, and functions of PyTorch's tensors
License: MIT
Requires-Python: >=3.9
"""
# What each system with glibc has; a wheel may need these and nothing else (PEP 600).
OF_GLIBC = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux[\w-]*\.so\.\d")


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Lets pip know the name before it builds: without this it builds to learn it."""
    folder = Path(metadata_directory) / INFO
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    return INFO


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Writes the wheel and returns its name."""
    settings = {"arch": "all", **(config_settings or {})}
    builds = settings.pop("scons", "yes") != "no"
    plan, only_cpu = plan_cuda(settings["arch"], settings.get("cuda"), [])
    libraries = {kind: ROOT / "build" / kind / "libfused_kernels.so" for kind in (["cpu", "cuda"] if plan else ["cpu"])}
    print(f"The wheel has the library for {' and '.join(libraries)}{f': {only_cpu}' if only_cpu else ''}", flush=True)
    if builds:
        build([f"{name}={value}" for name, value in settings.items()], libraries.values())
    for path in libraries.values():
        if not path.exists():
            refuse(f"there is no {path}: build it with `scons library`, or leave out scons=no")
    tag = f"py3-none-{platform_of(libraries.values())}"
    texts = {f"{INFO}/METADATA": METADATA,
             f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nGenerator: make_wheel\nRoot-Is-Purelib: false\nTag: {tag}\n",
             f"{INFO}/LICENSE": (ROOT / "LICENSE").read_text(),
             **{f"fused_kernels/{each.name}": each.read_text() for each in sorted(PACKAGE.glob("*.py"))}}
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"fused_kernels/{kind}/{path.name}": stripped(path) for kind, path in libraries.items()}
    record = [f"{name},sha256={digest(data)},{len(data)}\n" for name, data in contents.items()]
    contents[f"{INFO}/RECORD"] = "".join([*record, f"{INFO}/RECORD,,\n"]).encode()
    name = f"fused_kernels-{VERSION}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for each, data in contents.items():
            wheel.writestr(each, data)
    return name


def build(words, targets):
    """Runs scons, which finds its own packages, not those that pip lets this program see."""
    if not shutil.which("scons"):
        refuse("there is no scons, which builds the library: ./install.sh")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    names = [str(each.relative_to(ROOT)) for each in targets]
    if subprocess.run(["scons", *words, *names], cwd=ROOT, env=environment).returncode:
        refuse("scons could not build the library")


def platform_of(libraries):
    """manylinux_2_36_x86_64 of libraries that need nothing but glibc 2.36 or newer; linux_x86_64 if they need more."""
    said = "".join(output_of("objdump", "-p", str(each)) for each in libraries)
    needed = re.findall(r"^ +NEEDED +(\S+)$", said, re.MULTILINE)
    if not needed or not all(map(OF_GLIBC.fullmatch, needed)):
        return f"linux_{platform.machine()}"
    newest = max(map(int, re.findall(r"\bGLIBC_2\.(\d+)", said)))
    return f"manylinux_2_{max(newest, 17)}_{platform.machine()}"


def stripped(library):
    """The library without what only a debugger reads, which is most of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / library.name
        subprocess.run(["strip", "-o", path, library], check=True)
        return path.read_bytes()


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
