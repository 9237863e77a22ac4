#!/bin/sh
# Installs the packages of a list into /opt/rljob, at the versions of the variant's pinned list. Bytecode is compiled, as
# file systems of pods are read-only. Usage: install.sh LIST; VARIANT is in the environment. It lies beside the lists in the
# image: what is mounted (/build: uv, wheels) decides nothing for the cache of buildah 1.28, what is copied does.
set -eu
. /build/host.sh
cd /opt/rljob/requirements
if [ ! -x ../bin/python ]; then
    python3 -m venv --without-pip /opt/rljob
    # Whom the image runs as; without an entry containerd gives that user the group of root.
    echo 'rljob:x:65532:65532:rljob:/tmp:/usr/sbin/nologin' >>/etc/passwd
    echo 'rljob:x:65532:' >>/etc/group
fi
/build/tools/bin/uv pip install --quiet --system-certs --link-mode copy --no-deps --compile-bytecode \
    --find-links /build/wheels --python /opt/rljob/bin/python --constraint "$VARIANT.txt" --requirement "$1.txt"
/opt/rljob/bin/python /build/whose.py /opt/rljob/lib/python3*/site-packages
rm -f /opt/rljob/.lock
