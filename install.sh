#!/bin/sh
# Installs what this machine lacks: packages of Debian or Ubuntu, and nothing else.
#
#     ./install.sh        what it takes to build and run the lessons
#     ./install.sh all    and what tests, plots and slides take
#
# CUDA is not among them: without nvcc the lessons are built for the CPU. What the slides need may be
# there from elsewhere: Node.js's own packages and Debian's npm exclude each other.
set -eu

packages="g++ git libboost-context-dev libcli11-dev libfmt-dev nlohmann-json3-dev scons"
case "$*" in
  "") ;;
  all)
    packages="$packages python3-jsonschema python3-matplotlib python3-pip python3-pytest
              python3-pytest-xdist"
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
      packages="$packages nodejs npm"
    fi
    chrome=
    for name in chromium google-chrome google-chrome-stable chromium-browser; do
      if command -v $name >/dev/null; then chrome=$name; fi
    done
    # Ubuntu has Chromium as a snap only, and to install one is left to its user.
    # shellcheck disable=SC1091 # whichever file this system has
    if [ -z "$chrome" ] && ! (. /etc/os-release && [ "$ID" = ubuntu ]) 2>/dev/null; then
      packages="$packages chromium"
    fi
    ;;
  *)
    echo "usage: ./install.sh [all]" >&2
    exit 2
    ;;
esac

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "install.sh knows Debian and Ubuntu only. Install these yourself: SCons 4, a C++20 compiler," >&2
  echo "Boost.Context, CLI11 2, fmt 8, nlohmann-json 3, git; for tests and plots pytest, pytest-xdist," >&2
  echo "jsonschema, matplotlib and pip for the Python of SCons; for the slides Node.js 18, npm, and" >&2
  echo "Chromium or Chrome." >&2
  exit 1
fi

missing=
for package in $packages; do
  # A package that was removed but not purged has a status, too.
  # shellcheck disable=SC2016 # dpkg-query expands that, not the shell
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=
  [ "$status" = installed ] || missing="$missing $package"
done
if [ -z "$missing" ]; then
  echo "Nothing to install."
  exit 0
fi

if [ "$(id -u)" = 0 ]; then
  as_root=
elif command -v sudo >/dev/null; then
  as_root=sudo
else
  echo "Only root can install packages, and there is no sudo. As root: apt-get install$missing" >&2
  exit 1
fi
echo "Installing from the distribution:$missing"
# Neither waits for an answer: there may be nobody to give one.
$as_root apt-get -q update
# shellcheck disable=SC2086 # one word per package
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends $missing
