#!/usr/bin/env bash
# Llama 3 8B: see README.md, and ../run.sh for the arguments.
here=$(dirname "${BASH_SOURCE[0]}")
exec bash "$here/../run.sh" "$here" "$@"
