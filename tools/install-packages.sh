#!/usr/bin/env bash
# Installs the Debian packages that are missing: what the build needs, and with `test` what the tests
# need too. Debian 12; only apt is used.
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config nlohmann-json3-dev libcli11-dev libspdlog-dev
          libboost-dev libicu-dev libedit-dev)
if [ "${1:-build}" = test ]; then
  packages+=(libgtest-dev libgmock-dev libbenchmark-dev clang libclang-rt-14-dev clang-format
             clang-tidy python3 python3-venv python3-pytest libopenmpi-dev openmpi-bin)
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
    missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "installing ${missing[*]}" >&2
root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "These Debian packages are missing and need root: ${missing[*]}" >&2
    exit 1
  }
  root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${root[@]}" apt-get update -qq >&2
"${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
