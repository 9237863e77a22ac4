#!/bin/sh
# Installs, in a final stage, the compilers for C and C++ and Python's headers, and makes /usr/local/cuda, where FlashInfer
# looks for CUDA's, of the packages that PyTorch brings: these have no libcudart.so, which is what a linker asks for.
set -eu
. /build/host.sh
headers=$(python3 -c 'import os, sysconfig; print("" if os.path.exists(sysconfig.get_path("include") + "/Python.h") else "python3-dev")')
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends g++ $headers </dev/null >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/*
cuda=$(echo /opt/rljob/lib/python3*/site-packages/nvidia/cu13)
test -x "$cuda/bin/nvcc"
mkdir -p /usr/local/cuda/lib64
ln -s "$cuda/bin" "$cuda/include" "$cuda/nvvm" /usr/local/cuda/
ln -s "$cuda"/lib/*.a /usr/local/cuda/lib64/
for library in "$cuda"/lib/*.so.*; do
    name=$(basename "$library")
    ln -s "$library" "/usr/local/cuda/lib64/${name%%.so.*}.so"
done
# As in NVIDIA's images: the driver's library comes with the node, and is linked against here.
mkdir /usr/local/cuda/lib64/stubs
gcc -shared -Wl,-soname,libcuda.so.1 -o /usr/local/cuda/lib64/stubs/libcuda.so -x c /dev/null
