#!/usr/bin/env bash
# What is measured on a GPU, in one go, on a machine with one of them: CUDA's MPS divides it among the ranks.
#   bash benchmarks/gpu.sh COMMIT [FOLDER]      # results are copied to FOLDER, logs beside them
# Nothing needs to be installed but torch with CUDA. A part that fails or takes too long does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=$1
folder=${2:-build/gpu}
mkdir -p "$folder"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=2
export NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=2 # ranks on one GPU talk over loopback sockets: one stream is slow

part() { # name seconds ranks script arguments...
  local name=$1 seconds=$2 ranks=$3
  shift 3
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  nvidia-cuda-mps-control -d
  # Queues of the device: with the default, streams share them and wait for each other; ranks that share a GPU share one pool.
  CUDA_DEVICE_MAX_CONNECTIONS=$((64 / ranks)) CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / ranks)) timeout -k 5 "$seconds" \
    torchrun --nproc-per-node "$ranks" "$@" --commit "$commit" >"$folder/$name.log" 2>&1
  echo "$name: exit $? after $SECONDS s"
  grep -E "steps of each|step |step_ms|holds|FAILS|Error" "$folder/$name.log" | tail -12
  echo quit | timeout 5 nvidia-cuda-mps-control
}

part priority-4 90 4 benchmarks/bench_priority_gpu.py
part balance-4 120 4 benchmarks/bench_balance_measured.py --device cuda --steps 70
part balance-8 120 8 benchmarks/bench_balance_measured.py --device cuda --steps 70
# Starts its ranks and MPS by itself.
timeout -k 20 300 python3 benchmarks/bench_overlap.py --commit "$commit" >"$folder/overlap-4.log" 2>&1
echo "overlap-4: exit $? after $SECONDS s"
grep -E "is done|holds|FAILS|rror" "$folder/overlap-4.log" | tail -24
python3 benchmarks/bench_balance.py --device cuda --seeds 3 --repetitions 20 --commit "$commit" | tail -3
cp benchmarks/results/*-h200.json "$folder/"
