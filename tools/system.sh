#!/bin/sh
# Makes sure that a compiler, make, the Python headers and venv are there; installs Debian packages where it may.
# Usage: system.sh PYTHON [COMMAND:PACKAGE ...]   the pairs name further commands, or files, and what brings them
set -eu
python=${1:-python3}
[ $# -gt 0 ] && shift
missing=""
command -v g++ >/dev/null 2>&1 || missing="$missing g++"
command -v make >/dev/null 2>&1 || missing="$missing make"
command -v "$python" >/dev/null 2>&1 || missing="$missing python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || echo /nonexistent)
[ -f "$header/Python.h" ] || missing="$missing python3-dev"
for pair in "$@"; do
    [ -f "${pair%%:*}" ] || command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
else
    echo "busrl needs these packages and may not install them itself:$missing" >&2
    echo "install them with your package manager (Debian: sudo apt-get install$missing) and run make again" >&2
    exit 1
fi
