#!/usr/bin/env bash
# Installs the peers of benchmarks.slow_links, wire_bytes, memory and chaos.peers, one virtual environment each: their
# dependencies need not agree with ours. PEERS_DIR (default .peers) is where, and where the benchmarks look.
#     benchmarks/peers/install.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
peers="${PEERS_DIR:-.peers}"
torch="$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)"

install() {
  python3 -m venv "$peers/$1"
  "$peers/$1/bin/pip" install --quiet "${torch:-torch}" numpy "$2"
  "$peers/$1/bin/pip" list | grep -iE "^(torch|$1)"
}

install torchft torchft-nightly==2026.10.26
install accelerate accelerate==1.15.0
