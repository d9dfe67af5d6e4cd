#!/usr/bin/env bash
# Cross-compile the library for 64-bit Arm and run its self-test under emulation; not part of `make test`.
# Needs the Debian packages g++-aarch64-linux-gnu and qemu-user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compiler=aarch64-linux-gnu-g++

CXX=$compiler ${PYTHON:-python3} -m pagedkv.native.build --machine aarch64 --output "$folder"
$compiler -std=c++20 -O2 -Ipagedkv/attention/cpu -Ipagedkv/native tests/attention/selftest.cpp \
    "$folder/libpagedkv-arm64.so" -Wl,--no-as-needed -lgomp -o "$folder/selftest"
OMP_WAIT_POLICY=passive qemu-aarch64 -L /usr/aarch64-linux-gnu "$folder/selftest"
