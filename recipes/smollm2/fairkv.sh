#!/usr/bin/env bash
# FairKV on a real model: what its heads keep of the handbook, their placement on three ranks (it has three KV heads), and
# what that gains, on chapters that the placement has not seen. Arguments pass to `megakv fairkv place`:
#   bash recipes/smollm2/fairkv.sh --copies 1
set -euo pipefail
recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$recipe/../.." && pwd)
source "$root/scripts/setup.sh"

model=$(python "$recipe/weights.py")
prompts=$root/runs/smollm2_chapters
mkdir -p "$prompts"
# Four chapters to a prompt: some 1,500 tokens each.
awk -v folder="$prompts" '/^## /{ chapter++ } { print > sprintf("%s/%d.md", folder, (chapter ? chapter - 1 : 0) / 4) }' \
    "$recipe/document.md"
exec megakv fairkv place "$model" --tp 3 --dtype fp32 --prompts "$prompts" --out "$root/runs/smollm2_fairkv" "$@"
