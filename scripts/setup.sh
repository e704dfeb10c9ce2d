# Prepares the Python environment of this checkout, once, and activates it: `source scripts/setup.sh` from any bash
# script. It needs Python 3.11+ (PYTHON=/path/to/python chooses one) and a package index. Without a C++ compiler (c++, or
# CXX) everything works, slower. The environment is .venv in the checkout. A torch that is already there (in the active
# virtualenv or conda environment, else in the Python found) is used and never replaced, and neither are the packages
# beside it; nothing is installed outside .venv.
# `bash scripts/setup.sh` prints the environment's python.

if [ -z "${BASH_VERSION:-}" ]; then
    echo "megakv set-up: this is for bash. In another shell, from the checkout:" >&2
    echo "    bash scripts/setup.sh && . .venv/bin/activate && export TORCH_EXTENSIONS_DIR=\$PWD/.venv/torch_extensions" >&2
    # From a shell that sources this, or a script of its own.
    return 1 2>/dev/null || exit 1
fi

megakv_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
megakv_venv=$megakv_root/.venv

megakv_say() { printf 'megakv set-up: %s\n' "$*" >&2; }

megakv_has_compiler() { type -P "${CXX:-c++}" >/dev/null; }

megakv_has_gpu() { [ -n "$(nvidia-smi -L 2>/dev/null)" ] || [ -e /dev/nvidia0 ]; }

# What .venv must have been made from to be used as it is: this place, these files, a python and a torch that still work.
megakv_stamp() {
    (cd "$megakv_root" && cat setup.cfg setup.py pyproject.toml constraints.txt scripts/setup.sh | sha256sum) &&
        printf '%s\n' "$megakv_root" &&
        "$megakv_venv/bin/python" -c '
import sys, importlib.metadata as m
print(sys.version, "torch", m.version("torch"))' 2>/dev/null
}

megakv_is_ready() { [ -f "$megakv_venv/stamp" ] && [ "$(megakv_stamp)" = "$(cat "$megakv_venv/stamp")" ]; }

# The python to build on: the one asked for, the active environment's, or the first on PATH that is new enough.
megakv_find_python() {
    local candidate found active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    [ "$active" != "$megakv_venv" ] || active=
    for candidate in ${PYTHON:+"$PYTHON"} ${active:+"$active/bin/python"} \
        python3 python3.13 python3.12 python3.11 python3.14 python; do
        # Where this .venv is active its own python comes first on PATH, and others behind.
        mapfile -t found < <(type -aP "$candidate" | grep -vF "$megakv_venv/")
        [ ${#found[@]} -gt 0 ] || continue
        if "${found[0]}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "${found[0]}"
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ] || [ "$candidate" = "$active/bin/python" ]; then
            megakv_say "$candidate is older than Python 3.11 or does not run. Activate another environment, or set PYTHON."
            return 1
        fi
    done
    megakv_say "no Python 3.11 or newer on PATH. Install one (for example python3.11 and python3.11-venv), or set PYTHON."
    return 1
}

# Prints the version of the torch that the python sees, nothing if there is none; fails if it is outside setup.cfg's range.
megakv_present_torch() {
    "$1" - "$megakv_root/setup.cfg" <<'PY'
import configparser, importlib.metadata as metadata, re, sys
try:
    present = metadata.version("torch")
except metadata.PackageNotFoundError:
    sys.exit(0)
config = configparser.ConfigParser()
config.read(sys.argv[1])
low, high = re.search(r"torch>=([\d.]+),<([\d.]+)", config["options"]["install_requires"]).groups()
key = lambda version: tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])
if not key(low) <= key(present) < key(high):
    sys.exit(
        f"megakv set-up: torch {present} of {sys.executable} is outside the supported range >={low},<{high}, and set-up\n"
        "never replaces a torch. Activate an environment with a torch in range, or an empty one\n"
        "(python3 -m venv DIR && source DIR/bin/activate), and run this again."
    )
print(present)
PY
}

# Lets .venv see the packages beside the present torch, after its own, and prints the constraints that remain: only those
# of packages that are not there yet, and the present torch.
megakv_adopt() {
    "$1" -c 'import site, sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
        >"$("$megakv_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/present.pth"
    "$1" - "$megakv_root/constraints.txt" <<'PY'
import importlib.metadata as metadata, re, sys
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
present = {normal(d.metadata["Name"]) for d in metadata.distributions() if d.metadata["Name"]}
print(*(line.strip() for line in open(sys.argv[1]) if normal(line.split("==")[0]) not in present), sep="\n")
print(f"torch=={metadata.version('torch')}")
PY
}

# Gives .venv the commands of the packages it adopted; under their own names they would run the other python.
megakv_adopt_commands() {
    "$megakv_venv/bin/python" - "$megakv_venv/bin" <<'PY'
import importlib.metadata as metadata, pathlib, re, sys
folder = pathlib.Path(sys.argv[1])
wanted = {"torchrun", "deepspeed", "ds_report", "accelerate", "transformers", "ninja", "pytest", "ruff", "mypy"}
for file in (file for found in metadata.distributions() for file in found.files or ()):
    source, target = pathlib.Path(file.locate()).resolve(), folder / file.name
    if file.name not in wanted or file.parent.name != "bin" or target.exists() or not source.exists():
        continue
    if (content := source.read_bytes()).startswith(b"#!"):
        body = re.sub(rb"\A#!(/bin/sh\n'''exec'.*\n' '''|.*)\n", b"", content)
        target.write_bytes(b"#!%s/python\n" % str(folder).encode() + body)
        target.chmod(0o755)
    else:
        target.symlink_to(source)
PY
}

megakv_pip() {
    "$megakv_venv/bin/python" -m pip --disable-pip-version-check install --no-input --no-compile \
        --find-links "$megakv_venv/wheels" "$@" 2>>"$megakv_venv/setup.log" |
        tee -a "$megakv_venv/setup.log" |
        grep --line-buffered -E '^(Collecting|Building wheels|Installing|Successfully built)|Downloading .*[0-9]{2}(\.[0-9]+)? MB' |
        sed -u -E 's/ \(from .*//; s/^(.{110}).*/\1 .../; s/^ */    /' >&2
    [ "${PIPESTATUS[0]}" -eq 0 ] && return
    tail -n 15 "$megakv_venv/setup.log" >&2
    megakv_say "pip failed; all it said is in $megakv_venv/setup.log"
    return 1
}

# DeepSpeed has no wheel on the index. One that is built here is found by the installation that comes after; if this
# fails, that builds it again and says why.
megakv_build_deepspeed() {
    local pin
    mkdir -p "$megakv_venv/wheels"
    if pin=$(grep '^deepspeed==' "$1"); then
        "$megakv_venv/bin/python" -m pip --disable-pip-version-check wheel --no-input --no-deps \
            --wheel-dir "$megakv_venv/wheels" "$pin" >"$megakv_venv/deepspeed.log" 2>&1
    fi
}

# Python files compiled by all cores at once, where pip would take one after the other. Templates among them do not
# compile, and need not.
megakv_compile() {
    "$megakv_venv/bin/python" -m compileall -q -j 0 "$@" >/dev/null 2>&1 || true
}

# True if the wheel that pip would take with these arguments brings CUDA packages along; fails if there is none.
megakv_cuda_free() {
    "$megakv_venv/bin/python" -m pip --disable-pip-version-check install --no-input --quiet --dry-run --no-deps \
        --report "$megakv_venv/report.json" "$@" >>"$megakv_venv/setup.log" 2>&1 &&
        "$megakv_venv/bin/python" - "$megakv_venv/report.json" <<'PY'
import json, re, sys
needs = [need for item in json.load(open(sys.argv[1]))["install"] for need in item["metadata"].get("requires_dist", [])]
sys.exit(any(re.match(r"(nvidia|cuda|triton)", need) and "extra ==" not in need for need in needs))
PY
}

# On a machine without a GPU: the default index's wheel if it is a CPU build, else pytorch.org's CPU build.
megakv_install_cpu_torch() {
    local torch index=https://download.pytorch.org/whl/cpu
    torch=$(grep -E '^torch==' "$megakv_root/constraints.txt")
    megakv_say "no NVIDIA GPU here: looking for a CPU build of $torch"
    if megakv_cuda_free "$torch"; then
        megakv_pip --no-deps "$torch"
    elif megakv_cuda_free --retries 1 --timeout 20 --index-url "$index" "$torch"; then
        megakv_pip --no-deps --index-url "$index" "$torch"
    else
        tail -n 3 "$megakv_venv/setup.log" >&2
        megakv_say "no CPU build of $torch: the package index offers a CUDA build (or none), and $index cannot be reached" \
            "or has none. Install a CPU build of torch in an environment of your own, activate it and run this again."
        return 1
    fi
}

megakv_make_venv() {
    "$1" -m venv "$megakv_venv" >/dev/null 2>&1 && return
    # Debian keeps ensurepip in a package of its own; a pip that is there can do its work.
    rm -rf "$megakv_venv"
    "$1" -m venv --without-pip "$megakv_venv" 2>/dev/null &&
        "$1" -m pip --python "$megakv_venv/bin/python" install -q pip >/dev/null 2>&1 && return
    megakv_say "$1 cannot make virtual environments (no ensurepip, no pip). On Debian and Ubuntu:" \
        "apt install python$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    return 1
}

# DeepSpeed builds its shared-memory op at the first start of ranks; done here, no run waits for it or is killed within it.
megakv_build_op() {
    if ! "$megakv_venv/bin/python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
        megakv_say "Python.h is missing (Debian: apt install python3-dev), so DeepSpeed's shared-memory op is not built;" \
            "tensor parallelism on CPU works without it, slower. Install it and delete .venv to have the op."
        return 0
    fi
    megakv_say "[3/3] building DeepSpeed's shared-memory op (about a minute)"
    DS_ACCELERATOR=cpu "$megakv_venv/bin/python" -c '
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()' >>"$megakv_venv/setup.log" 2>&1 && return
    tail -n 15 "$megakv_venv/setup.log" >&2
    megakv_say "the build failed; all it said is in $megakv_venv/setup.log"
    return 1
}

# MegaKV's own kernels, too. Where one cannot be had the first start of ranks says why, and goes on without.
megakv_build_kernels() {
    "$megakv_venv/bin/python" -c '
from megakv.base.kernel_build import SOURCES
from megakv.base.library import library
for source in sorted(SOURCES.glob("*.cpp")):
    library(source.stem)' >>"$megakv_venv/setup.log" 2>&1 || true
}

megakv_build() {
    local python present packages deepspeed constraints=$megakv_root/constraints.txt start=$SECONDS
    python=$(megakv_find_python) || return 1
    if ! megakv_has_compiler; then
        megakv_say "no C++ compiler (${CXX:-c++}) on PATH: everything works, prompts and tokens take longer, and so does" \
            "tensor parallelism on CPU. On Debian and Ubuntu: apt install g++; the next start compiles"
    fi
    present=$(megakv_present_torch "$python") || return 1
    rm -rf "$megakv_venv"
    megakv_say "making .venv with $("$python" -V) of $python"
    megakv_make_venv "$python" || return 1
    if [ -n "$present" ]; then
        constraints=$megakv_venv/constraints.txt
        megakv_adopt "$python" >"$constraints" || return 1
    fi
    packages=$("$megakv_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    megakv_build_deepspeed "$constraints" &
    deepspeed=$!
    if [ -n "$present" ]; then
        megakv_say "[1/3] using the torch $present that is already there"
    elif megakv_has_gpu; then
        megakv_say "[1/3] installing torch for the GPU"
        megakv_pip -c "$constraints" torch || return 1
    else
        megakv_say "[1/3] installing torch"
        megakv_install_cpu_torch || return 1
    fi
    wait "$deepspeed"
    [ -n "$present" ] || megakv_compile "$packages/torch" &
    megakv_say "[2/3] installing the other packages"
    megakv_pip -c "$constraints" -e "$megakv_root[dev]" || return 1
    rm -rf "$megakv_venv/wheels"
    [ -z "$present" ] || megakv_adopt_commands || return 1
    export PATH=$megakv_venv/bin:$PATH TORCH_EXTENSIONS_DIR=$megakv_venv/torch_extensions
    megakv_compile "$packages" &
    megakv_build_kernels &
    megakv_has_gpu || ! megakv_has_compiler || megakv_build_op || return 1
    wait
    megakv_stamp >"$megakv_venv/stamp.new" && mv "$megakv_venv/stamp.new" "$megakv_venv/stamp"
    megakv_say "done in $((SECONDS - start)) s"
}

# A killed build of an op leaves a lock file that every later load waits for, for ever. A lock is stale when no process
# works in its folder; the first seconds of a build, before its compiler runs, are given the benefit of the doubt.
megakv_drop_stale_locks() {
    local lock folder
    for lock in "$megakv_venv"/torch_extensions/*/lock; do
        [ -e "$lock" ] || continue
        folder=$(dirname "$lock")
        while [ -e "$lock" ] && ! readlink /proc/[0-9]*/cwd 2>/dev/null | grep -qxF "$folder"; do
            if [ $(($(date +%s) - $(stat -c %Y "$lock" 2>/dev/null || date +%s))) -ge 15 ]; then
                megakv_say "removing $lock, left by a build that was killed"
                rm -f "$lock"
            else
                sleep 1
            fi
        done
    done
}

megakv_setup() (
    megakv_is_ready && exit 0
    mkdir -p "$megakv_root/.cache"
    exec 9>"$megakv_root/.cache/setup.lock"
    if ! flock -n 9; then
        megakv_say "waiting for another set-up of this checkout"
        flock 9
    fi
    megakv_is_ready && exit 0
    # Children must not inherit the lock: one that outlives a killed set-up would hold it.
    megakv_build 9>&-
    status=$?
    # What goes on beside a set-up that failed must not meet the next one.
    wait
    exit $status
)

if ! megakv_setup; then
    [ "${BASH_SOURCE[0]}" = "$0" ] && exit 1
    return 1
fi
megakv_drop_stale_locks
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "$megakv_venv/bin/python"
else
    source "$megakv_venv/bin/activate"
    # Where the ranks that the deepspeed launcher starts find the ops that were built.
    export TORCH_EXTENSIONS_DIR=$megakv_venv/torch_extensions
    megakv_has_gpu || export DS_ACCELERATOR=cpu
fi
