"""install.sh, with stand-ins for the programs that would change the machine."""

from pathlib import Path
import shutil

from conftest import ROOT, execute
import pytest

LESSONS = {
    "g++", "git", "libboost-context-dev", "libcli11-dev", "libfmt-dev", "nlohmann-json3-dev", "scons",
}
SLIDES = {"nodejs", "npm", "chromium"}
if "ID=ubuntu" in Path("/etc/os-release").read_text().split():  # where that is a snap
    SLIDES.remove("chromium")
ALL = LESSONS | SLIDES | {"python3-jsonschema", "python3-matplotlib", "python3-pip", "python3-pytest",
                       "python3-pytest-xdist"}


@pytest.fixture
def machine(tmp_path):
    """machine(arguments, installed, user, sudo, commands): install.sh's output there, and what it ran."""
    log = tmp_path / "log"
    log.touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "env"):
        (programs / name).symlink_to(shutil.which(name))

    def stand_in(name, text):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    def install(*arguments, installed=(), user=0, sudo=False, debian=True, commands=()):
        for name in commands:
            stand_in(name, "exit 1")
        if debian:
            stand_in("apt-get", f'echo "apt-get $*" >> "{log}"')
            # Knows one package that was removed without its configuration.
            stand_in("dpkg-query", 'case "$4" in\n'
                     + "".join(f"  {package}) echo installed; exit 0;;\n" for package in installed)
                     + "  scons) echo config-files; exit 0;;\nesac\nexit 1")
        stand_in("id", f"echo {user}")
        if sudo:
            stand_in("sudo", f'echo "sudo $*" >> "{log}"')
        result = execute([ROOT / "install.sh", *arguments], env={"PATH": str(programs)})
        return result, log.read_text().splitlines()

    return install


@pytest.mark.parametrize("arguments, packages", [((), LESSONS), (("all",), ALL)])
def test_nothing_missing(machine, arguments, packages):
    result, commands = machine(*arguments, installed=packages, user=1000)
    assert result.rc == 0 and commands == []
    assert result.stdout == "Nothing to install.\n"


def test_some_missing(machine):
    result, commands = machine(installed=LESSONS - {"scons", "g++"})
    assert result.rc == 0
    assert result.stdout == "Installing from the distribution: g++ scons\n"
    assert commands == [
        "apt-get -q update", "apt-get -q -y install --no-install-recommends g++ scons",
    ]


@pytest.mark.parametrize("arguments, packages", [((), LESSONS), (("all",), ALL)])
def test_all_missing(machine, arguments, packages):
    result, commands = machine(*arguments)
    assert result.rc == 0
    assert set(commands[1].split()[5:]) == packages


@pytest.mark.parametrize("arguments", [("tests",), ("all", "all"), ("--help",)])
def test_unknown_argument(machine, arguments):
    result, commands = machine(*arguments)
    assert result.rc == 2 and commands == []
    assert result.stderr == "usage: ./install.sh [all]\n"


@pytest.mark.parametrize("there, left_out", [
    (["node"], set()),  # Debian's npm comes with its own nodejs
    (["node", "npm"], {"nodejs", "npm"}),
    (["google-chrome"], {"chromium"}),
    (["node", "npm", "chromium"], SLIDES),
])
def test_what_came_from_elsewhere_is_left_alone(machine, there, left_out):
    result, commands = machine("all", commands=there)
    assert result.rc == 0
    assert set(commands[1].split()[5:]) == ALL - left_out


def test_with_sudo(machine):
    result, commands = machine(installed=LESSONS - {"scons"}, user=1000, sudo=True)
    assert result.rc == 0
    assert commands[0] == "sudo apt-get -q update"
    assert commands[1].startswith("sudo env DEBIAN_FRONTEND=noninteractive apt-get")


def test_without_sudo(machine):
    result, commands = machine(installed=LESSONS - {"scons"}, user=1000)
    assert result.rc == 1 and commands == []
    assert result.stderr.endswith("As root: apt-get install scons\n")


def test_other_system(machine):
    result, commands = machine(debian=False)
    assert result.rc == 1 and commands == []
    for name in ("SCons", "pytest", "jsonschema", "Boost.Context", "CLI11", "fmt", "nlohmann-json"):
        assert name in result.stderr
