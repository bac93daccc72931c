#!/usr/bin/env bash
# Installs what building needs from Debian's packages, without a question. Sourced or run by
# demo.sh and test.sh; does nothing where everything is there.
#   scripts/install.sh build        compiler, CMake, libraries
#   scripts/install.sh build test   also clang-format, a Python that can make environments, and Chromium
set -euo pipefail

packages=()
for part in "$@"; do
  case "$part" in
    build) packages+=(g++ cmake ninja-build git libhdf5-dev libcli11-dev libfmt-dev
             nlohmann-json3-dev libopenblas-dev libtbb-dev libopenmpi-dev openmpi-bin doctest-dev
             libbenchmark-dev libjs-chart.js) ;;
    test) packages+=(clang-format python3 python3-venv)
          [ "${KVREPLAY_SKIP_CHROMIUM:-0}" = 1 ] || packages+=(chromium) ;;
    text) packages+=(jargon-text) ;;
    *) echo "install.sh: unknown part $part" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  echo "installing: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
