#!/usr/bin/env bash
# Installs the system packages that setting up needs (a C++ compiler, make, venv, Python's headers) where they are missing; Debian, as root.
set -euo pipefail
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
"${PYTHON:-python3}" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
"${PYTHON:-python3}" -c 'import pathlib, sysconfig; exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
  missing+=(python3-dev)
[ ${#missing[@]} -eq 0 ] && exit
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "install first: ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
