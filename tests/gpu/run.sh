#!/usr/bin/env bash
# The GPU tests, on a machine with one GPU: CUDA's MPS lets several ranks share it. Needs torch with CUDA, nothing installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # what torch asks for where bits are compared
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control' EXIT
python3 -m pytest tests/gpu -p no:cacheprovider "$@"
