#!/usr/bin/env bash
# Writes the questions that benchmarks/accuracy.py asks, .cache/ruler/items.json: RULER's tasks as lm-eval generates them,
# those that need no download. The first time, it makes .rivals/lm_eval, an environment with lm-eval, which only this
# script uses, and the SmolLM2 of recipes/smollm2, by whose tokenizer prompts are made as long as asked.
# PYTHON=/path/to/python chooses another Python than python3.
#   bash scripts/ruler.sh                          # 4,096 and 8,192 tokens, 32 questions of each task
#   bash scripts/ruler.sh --model DIR --context 2048 --items 8 --json FILE
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$root/.rivals/lm_eval
if [ ! -e "$environment/made" ]; then
    "${PYTHON:-python3}" -m venv --clear "$environment"
    transformers=$(grep -E '^transformers==' "$root/constraints.txt")
    "$environment/bin/python" -m pip --disable-pip-version-check install --quiet "$transformers" \
        lm_eval==0.4.13 nltk==3.10.4 wonderwords==3.0.1 scipy==1.17.1
    touch "$environment/made"
fi
model=()
case " $* " in
    *" --model "*) ;;
    *) model=(--model "$("$(bash "$root/scripts/setup.sh")" "$root/recipes/smollm2/weights.py" --unpacked)") ;;
esac
exec "$environment/bin/python" "$root/scripts/ruler_items.py" "${model[@]}" --json "$root/.cache/ruler/items.json" "$@"
