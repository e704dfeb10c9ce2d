#!/usr/bin/env bash
# Makes the environments of the clients that tests/clients drives a server with, in .cache/clients: one of Python, one of
# Node where npm is there. What is there is left as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
home=.cache/clients
mkdir -p "$home"
if [ ! -e "$home/python/ready" ]; then
    python3 -m venv "$home/python"
    "$home/python/bin/python" -m pip --disable-pip-version-check install --quiet -r tests/clients/requirements.txt
    touch "$home/python/ready"
fi
if command -v npm >/dev/null && [ ! -e "$home/node/ready" ]; then
    mkdir -p "$home/node"
    cp tests/clients/package.json "$home/node/"
    (cd "$home/node" && npm install --silent --no-audit --no-fund && touch ready)
fi
