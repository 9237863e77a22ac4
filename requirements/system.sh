#!/bin/sh
# Checks for the system packages that pip cannot install. Usage: requirements/system.sh PYTHON [soak|monitoring|gitops|nfs]
#   libnuma.so.1           vLLM's CPU build loads it
#   venv                   Debian has this module of Python in a separate package
#   C compiler, Python.h   pycosat (a dependency of reasoning-gym) is published as source only
#   nft, ip, ss            with the argument soak: `make soak` breaks connections with them
#   promtool, prometheus   with the argument monitoring: e2e/integration/test_dashboards.py and test_alerts.py use them
#   lua5.4                 with the argument gitops: e2e/integration/test_gitops.py runs a rule of Argo CD with it
#   ganesha.nfsd, libnfs, FUSE  with the argument nfs: a test in pods (e2e/pods/nfs) has an NFS server and a client of it
# As root, it installs missing Debian packages; as another user, it prints their names and exits with code 1.
set -eu
python=$1
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
missing=

if ! ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1'; then
    missing="$missing libnuma1"
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing="$missing python$version-venv"
fi
if ! command -v cc >/dev/null 2>&1; then
    missing="$missing gcc libc6-dev"
fi
if ! "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
    missing="$missing python$version-dev"
fi
if [ "${2:-}" = soak ]; then
    command -v nft >/dev/null 2>&1 || missing="$missing nftables"
    { command -v ip && command -v ss; } >/dev/null 2>&1 || missing="$missing iproute2"
fi
if [ "${2:-}" = monitoring ]; then
    { command -v prometheus && command -v promtool; } >/dev/null 2>&1 || missing="$missing prometheus"
fi
if [ "${2:-}" = gitops ]; then
    command -v lua5.4 >/dev/null 2>&1 || missing="$missing lua5.4"
fi
if [ "${2:-}" = nfs ]; then
    command -v ganesha.nfsd >/dev/null 2>&1 || missing="$missing nfs-ganesha"
    ls /usr/lib/*/ganesha/libfsalvfs.so >/dev/null 2>&1 || missing="$missing nfs-ganesha-vfs"
    command -v pkg-config >/dev/null 2>&1 || missing="$missing pkg-config"
    [ -e /usr/include/nfsc/libnfs.h ] || missing="$missing libnfs-dev"
    [ -e /usr/include/fuse3/fuse.h ] || missing="$missing libfuse3-dev"
fi

[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "rljob needs these system packages (Debian's names):$missing" >&2
    echo "install them, for example with: sudo apt-get install$missing" >&2
    exit 1
fi
echo "installing system packages:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing </dev/null >/dev/null
