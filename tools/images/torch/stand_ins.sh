#!/bin/sh
# Puts the stand-ins of no_cuda.py (variant cpu) into an otherwise empty /opt/rljob, to be copied over that of the image.
set -eu
mkdir -p /opt/rljob
[ "$VARIANT" = cpu ] || exit 0
. /build/host.sh
python3 -m venv --without-pip /opt/rljob
packages=$(/opt/rljob/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
/build/tools/bin/uv pip install --quiet --system-certs --no-deps --link-mode copy --python /opt/rljob/bin/python \
    --target /src/torch --constraint "/src/requirements/$VARIANT.txt" torch
/opt/rljob/bin/python /src/no_cuda.py /src/torch/torch/lib "$packages/nvidia/cu13/lib"
rm -rf /src/torch
