#!/usr/bin/env bash
# The kernels' tests under compute-sanitizer, divided among processes: every launch is watched, which is slow.
#   bash tests/gpu/sanitize.sh                          # memcheck (accesses out of bounds or misaligned), racecheck, synccheck
#   bash tests/gpu/sanitize.sh racecheck "-k layer"     # one tool (initcheck is another), other tests
# Left out: tests that need several ranks or most of the memory, or that count synchronizations or bytes themselves.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools=${1:-memcheck racecheck synccheck}
select=${2:-}
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # one allocation per tensor: an access past its end is seen as one
jobs=${JOBS:-$((($(nproc) + 1) / 2))}
folder=$(mktemp -d)
[ -n "$select" ] || select='-k "not nccl and not 32_bits and not synchroniz and not memory_grows and not reads_nothing"'
eval "python3 -m pytest tests/gpu/test_cuda_kernels.py tests/gpu/test_cuda_attention.py tests/gpu/test_cuda_layer.py \
  -p no:cacheprovider -o addopts= --collect-only -q $select" | grep "::" >"$folder/tests"
split -n "r/$jobs" "$folder/tests" "$folder/part."
failed=0
for tool in $tools; do
  echo "== $tool"
  pids=()
  for part in "$folder"/part.??; do
    [ -s "$part" ] || continue
    (mapfile -t tests <"$part" && compute-sanitizer --tool "$tool" --error-exitcode 9 \
      timeout "${LIMIT:-600}" python3 -m pytest -p no:cacheprovider -o addopts= -q -rs "${tests[@]}" >"$part.$tool.log" 2>&1) &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  for log in "$folder"/part.*."$tool".log; do
    grep -E "^(FAILED|ERROR|SKIPPED|E  )" "$log" || true
    grep -E "=========.*(Invalid|Race|Barrier|Uninit|Error)" "$log" | sort | uniq -c | head -5 || true
    grep -E "(passed|failed|ERROR SUMMARY|RACECHECK SUMMARY)" "$log" || tail -n 1 "$log"
  done
done
exit $failed
