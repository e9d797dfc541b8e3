#!/bin/bash
# Installs the GPU stack of requirements.txt into this image's Python. Compiles flash-attn and Transformer Engine's torch
# part: half an hour to two hours, 4 GB of memory a job (MAX_JOBS). APEX=1 adds NVIDIA's Apex, which nothing here needs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export MAX_JOBS=${MAX_JOBS:-8} NVTE_FRAMEWORK=pytorch TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-"8.0;9.0"}

apt-get update
apt-get install -y --no-install-recommends python3 python3-dev python3-venv build-essential cmake ninja-build git numactl
python3 -m venv /opt/ulorl
pip=(/opt/ulorl/bin/pip install --no-cache-dir)
"${pip[@]}" --upgrade pip "setuptools>=77" wheel packaging ninja pybind11
"${pip[@]}" "$(grep ^torch== "$here/requirements.txt")"
# Before SGLang, whose flash-attn-4 puts its own flash_attn.cute over the one of flash-attn.
"${pip[@]}" --no-build-isolation "$(grep ^flash-attn "$here/requirements.txt")"
# All at once, so that pip itself refuses what does not fit together.
"${pip[@]}" --no-build-isolation -r "$here/requirements.txt" "math-verify[antlr4_13_2]==0.9.0" omegaconf==2.4.0 \
    "rich>=15.0" tensorboard==2.21.0 "aiohttp>=3.14" "xxhash>=4.0" "safetensors>=0.8"
if [ "${APEX:-0}" = 1 ]; then
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "${pip[@]}" --no-build-isolation \
        "apex @ git+https://github.com/NVIDIA/apex@25.09"
fi
/opt/ulorl/bin/python "$here/check.py" --no-gpu
