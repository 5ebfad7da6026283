#!/usr/bin/env bash
# The GPU tests, on a machine with one GPU: CUDA's MPS lets several ranks share it. Needs torch with CUDA, nothing installed.
#   bash tests/gpu/run.sh            # all, divided among processes: most of the time is Triton compiling kernels
#   LOGS=FOLDER bash tests/gpu/run.sh  # the same, with the logs in a folder that outlives it
#   bash tests/gpu/run.sh -k layer   # some, in one process; arguments are pytest's
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # what torch asks for where bits are compared
mps() { # MPS only for what needs it: a fault of one process would be every other's
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
}
if [ $# -gt 0 ]; then
  mps
  python3 -m pytest tests/gpu -p no:cacheprovider "$@"
  exit
fi
jobs=${JOBS:-$((($(nproc) + 1) / 2))}
folder=${LOGS:-$(mktemp -d)}
python3 -m pytest tests/gpu -p no:cacheprovider -o addopts= --collect-only -q -k "not nccl and not 32_bits" | grep "::" >"$folder/tests"
split -n "r/$jobs" "$folder/tests" "$folder/part."
failed=0
pids=()
for part in "$folder"/part.*; do
  [ -s "$part" ] || continue
  (mapfile -t tests <"$part" && python3 -m pytest -p no:cacheprovider -o addopts= -v -rfEs --tb=short "${tests[@]}" >"$part.log" 2>&1) &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
mps
# Alone: several ranks, or most of the memory. A process that has used most of it keeps it: the ranks of the ladder come after it.
alone=("(nccl or 32_bits) and not ladder" "nccl and ladder")
for number in "${!alone[@]}"; do
  python3 -m pytest tests/gpu -p no:cacheprovider -o addopts= -v -rfEs --tb=short -k "${alone[number]}" >"$folder/part.alone.$number.log" 2>&1 || failed=1
done
for log in "$folder"/part.*.log; do
  grep -E "^(FAILED|ERROR|SKIPPED|E  )" "$log" || true
  tail -n 1 "$log"
done
exit $failed
