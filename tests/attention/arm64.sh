#!/usr/bin/env bash
# Cross-compile the library for 64-bit Arm and run its self-test under emulation; not part of `make test`.
# Needs the Debian packages g++-aarch64-linux-gnu and qemu-user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compiler=aarch64-linux-gnu-g++

CXX=$compiler ${PYTHON:-python3} -m pagedkv.native.build --machine aarch64 --output "$folder"
$compiler -std=c++20 -O1 -fopenmp -Ipagedkv/attention/cpu -Ipagedkv/native \
    tests/attention/arm64_selftest.cpp -ldl -Wl,--no-as-needed -lgomp -o "$folder/selftest"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$folder/selftest" "$folder/libpagedkv-arm64.so"
