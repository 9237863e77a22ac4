#!/bin/sh
# Installs what builds distributions of ours into /build/tools, and makes wheels, in /build/wheels, of the packages that
# are published as sources that need a compiler: the stages that install them have none. Versions are the pinned ones.
set -eu
. /build/host.sh
cd /build
pinned() {
    grep -hE "^($1)==" dev.txt cpu.txt
}
pinned 'hatchling|editables|packaging|pathspec|pluggy|trove-classifiers' >tools.txt
pinned pycosat >sources.txt
tools/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps -r tools.txt
tools/bin/pip wheel --quiet --disable-pip-version-check --no-cache-dir --no-deps --use-pep517 -r sources.txt --wheel-dir wheels

# A library that vLLM's CPU build loads and slim images lack.
mkdir -p system/usr/local/lib
cp -L "$(ldconfig -p | sed -n 's/.*libnuma\.so\.1 .*=> //p' | head -1)" system/usr/local/lib/libnuma.so.1
