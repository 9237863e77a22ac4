#!/bin/sh
# Installs bubblewrap in the final stage. The reward `code` uses it where the pod may have user namespaces; elsewhere it
# stays unused.
set -eu
. /build/host.sh
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends bubblewrap </dev/null >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/*
