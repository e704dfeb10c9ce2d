#!/usr/bin/env bash
# Runs a recipe; each recipe's run.sh calls this with its folder. What is not known here goes to `megakv run`.
#   --dry-run          build every rank without weights, check it and add up its memory, all runs or that of --config
#   --model DIR        checkpoint: a directory or hub id
#   --config FILE      JSON of this folder (default: the first of recipe.json), or any other
#   --hostfile FILE    ranks on several hosts, as many to a host as the file's slots say
#   --question TEXT, --prompt-file FILE, --max-new-tokens N, --json FILE, --wandb PROJECT ...: as `megakv run --help` says
set -euo pipefail
recipe=$(cd "$1" && pwd)
root=$(cd "$recipe/../.." && pwd)
name=$(basename "$recipe")
shift
dry='' config='' hostfile='' model='' rest=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
        --dry-run) dry=1 && shift && continue ;;
        --config | --hostfile | --model) [ $# -gt 1 ] || { echo "megakv: error: $1 needs a value" >&2 && exit 1; } ;;
        *) rest+=("$1") && shift && continue ;;
    esac
    case $1 in
        --config) config=$2 ;;
        --hostfile) hostfile=$(realpath -- "$2") ;;
        --model) model=$2 ;;
    esac
    shift 2
done
if [ -n "$config" ] && [ ! -f "$config" ] && [ ! -f "$recipe/$config" ]; then
    echo "megakv: error: --config $config is no file here; $name has: $(cd "$recipe" && ls -- *.json |
        grep -vxE 'config.json|recipe.json' | paste -sd ' ')" >&2
    exit 1
fi
source "$root/scripts/setup.sh"

if [ -n "$dry" ]; then
    cd "$root"
    exec python -m recipes.common.dry_run "$name" ${config:+--config "$(basename "$config")"}
fi
if [ -z "$model" ]; then
    echo "megakv: error: --model DIR is missing: $name holds no weights; --dry-run needs none" >&2
    exit 1
fi
if [ -z "$config" ]; then
    config=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["runs"][0]["config"])' "$recipe/recipe.json")
fi
[ -f "$config" ] || config=$recipe/$config
exec megakv run "$model" --config "$config" ${hostfile:+--hostfile "$hostfile"} "${rest[@]}"
