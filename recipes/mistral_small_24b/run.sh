#!/usr/bin/env bash
# Mistral Small 24B (2501): see README.md, and ../run.sh for the arguments.
here=$(dirname "${BASH_SOURCE[0]}")
exec bash "$here/../run.sh" "$here" "$@"
