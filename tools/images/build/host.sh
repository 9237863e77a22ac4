# Read in by the steps that fetch something: what the machine that builds lends them (the certificates it trusts, where it
# gets packages, uv's cache) lies in /run/host while they run, see tools/images/host.py. Nothing of it stays in an image.
export UV_CACHE_DIR=/var/cache/uv
if [ -f /run/host/environment ]; then
    . /run/host/environment
fi
