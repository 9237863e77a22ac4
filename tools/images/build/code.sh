#!/bin/sh
# Installs distributions of ours, from /src, and nothing else into /opt/rljob: a thin tree to be copied over one that has
# their dependencies. Usage: code.sh FOLDER...
set -eu
cd /src
for folder; do
    /build/tools/bin/uv build --quiet --wheel --no-build-isolation --python /build/tools/bin/python --out-dir /src/wheels "$folder"
done
python3 -m venv --without-pip /opt/rljob
/build/tools/bin/uv pip install --quiet --no-deps --no-index --no-cache --compile-bytecode \
    --python /opt/rljob/bin/python /src/wheels/*.whl
rm -f /opt/rljob/.lock
