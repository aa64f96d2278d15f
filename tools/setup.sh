#!/usr/bin/env bash
# What a fresh Debian machine lacks to build and test Longwave: a C compiler, curl, git, python3 with venv, Rust; with
# `tests` also Node.js, for the JavaScript clients, and Chromium, for the explorer.
# Installs only what is missing; does nothing on a machine that has all of it.
set -euo pipefail

packages=()
command -v cc >/dev/null || packages+=(build-essential)
command -v curl >/dev/null || packages+=(ca-certificates curl)
command -v git >/dev/null || packages+=(git)
python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3 python3-venv)
if [ "${1:-}" = tests ]; then
    command -v npm >/dev/null || packages+=(nodejs npm)
    command -v chromium >/dev/null || packages+=(chromium)
fi
if ((${#packages[@]} > 0)); then
    as_admin=(env DEBIAN_FRONTEND=noninteractive)
    [ "$(id -u)" = 0 ] || as_admin=(sudo "${as_admin[@]}")
    "${as_admin[@]}" apt-get update -q
    "${as_admin[@]}" apt-get install -q -y --no-install-recommends "${packages[@]}"
fi

if ! command -v cargo >/dev/null && ! [ -x "$HOME/.cargo/bin/cargo" ]; then
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal
fi
command -v cargo >/dev/null || echo "Rust is installed; for this shell: . ~/.cargo/env"
