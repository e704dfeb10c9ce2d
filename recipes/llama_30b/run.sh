#!/usr/bin/env bash
# Llama 30B: see README.md, and ../run.sh for the arguments.
here=$(dirname "${BASH_SOURCE[0]}")
exec bash "$here/../run.sh" "$here" "$@"
