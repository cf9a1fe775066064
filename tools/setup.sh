#!/usr/bin/env bash
# Creates .venv; before that, makes sure of Python 3.11 and of the few system packages that building needs. As root or
# with passwordless sudo it installs what is missing; otherwise it names the packages and stops. `make setup` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}

say() { echo "setup: $*" >&2; }

require_python() {
    command -v "$python" >/dev/null || { say "$python is not there; Colibri needs Python 3.11 or newer"; exit 1; }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "Colibri needs Python 3.11 or newer, and $python is $("$python" -V 2>&1);" \
            "name another one with: make PYTHON=python3.x ..."
        exit 1
    }
}

has_python_header() {
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# One Debian package per line: those whose purpose is not served yet, wherever it comes from.
missing_packages() {
    command -v gcc >/dev/null || echo gcc
    [ -e /usr/include/stdlib.h ] || echo libc6-dev
    command -v pkg-config >/dev/null || echo pkg-config
    { command -v pkg-config >/dev/null && pkg-config --exists libsystemd; } || echo libsystemd-dev
    has_python_header || echo python3-dev
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

install_packages() {
    say "installing system packages: $*"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

require_python
mapfile -t missing < <(missing_packages)
if [ "${#missing[@]}" -gt 0 ]; then
    if ! may_install; then
        say "these system packages are missing: ${missing[*]}"
        say "install them as root (Debian, Ubuntu: apt-get install ${missing[*]}) and run make again"
        exit 1
    fi
    install_packages "${missing[@]}"
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -eq 0 ] || { say "still missing after the installation: ${missing[*]}"; exit 1; }
fi

if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    say "creating .venv with $("$python" -V)"
    "$python" -m venv --clear .venv
fi
