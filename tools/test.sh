#!/usr/bin/env bash
# Sets the machine up where something is missing and runs every test. The test runner's summary is the last line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh tests
export PATH="$HOME/.cargo/bin:$PATH"
exec cargo xtask test "$@"
