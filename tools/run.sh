#!/usr/bin/env bash
# Sets the machine up where something is missing, builds Longwave and runs it: tools/run.sh serve
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh
export PATH="$HOME/.cargo/bin:$PATH"
exec cargo run --locked --release -- "$@"
