#!/usr/bin/env bash
# Rehearses the CUDA path on a machine without a GPU, see cuda_rehearsal.py: `bash scripts/cuda_rehearsal.sh [--json F]`.
# The first time it makes .venv-rehearsal: a CUDA build of torch and the libraries that it loads when it is imported, about
# 4 GB, beside the packages of .venv, which must be there (scripts/setup.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-rehearsal
if [ ! -f "$venv/ready" ]; then
    .venv/bin/python -m venv --clear "$venv"
    # Those of torch's requirements that its libraries are linked to; what it loads later, or never, is left out.
    "$venv/bin/pip" install --quiet --no-compile --no-deps torch==2.12.0 \
        nvidia-cublas==13.1.1.3 nvidia-cuda-cupti==13.0.85 nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 \
        nvidia-cudnn-cu13==9.20.0.48 nvidia-cufft==12.0.0.61 nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 \
        nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.29.7 nvidia-nvjitlink==13.0.88 \
        nvidia-nvshmem-cu13==3.4.5
    # Behind its own packages come those of .venv, with the checkout that is installed there.
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$packages')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/present.pth"
    "$venv/bin/python" -c 'import torch; assert torch.version.cuda and not torch.cuda.is_available(), "for machines without a GPU"'
    touch "$venv/ready"
fi
export DS_ACCELERATOR=cuda LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 OMP_NUM_THREADS=1 PYTHONPATH=tests
exec "$venv/bin/python" scripts/cuda_rehearsal.py "$@"
