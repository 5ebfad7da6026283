#!/usr/bin/env bash
# What is measured on a GPU, in one go, on a machine with one of them: CUDA's MPS divides it among the ranks.
#   bash benchmarks/gpu.sh COMMIT [FOLDER]      # results and logs go to FOLDER
# Nothing needs to be installed but torch with CUDA. A part that fails or takes too long does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=$1
folder=${2:-build/gpu}
mkdir -p "$folder"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

part() { # name seconds benchmark arguments...
  local name=$1 seconds=$2 benchmark=$3
  shift 3
  timeout -k 20 "$seconds" python3 -m "freescale.bench.$benchmark" "$@" --commit "$commit" --folder "$folder" \
    >"$folder/$name.log" 2>&1
  echo "$name: exit $? after $SECONDS s"
  grep -E "steps of each|step |step_ms|is done|holds|FAILS|rror" "$folder/$name.log" | tail -24
}

part staged-4 120 staged --device cuda --nproc 4
part balance-4 150 balance measured --device cuda --nproc 4 --steps 70
part balance-8 150 balance measured --device cuda --nproc 8 --steps 70
part overlap-4 300 overlap
part balance 60 balance --device cuda --seeds 3 --repetitions 20
part ladder-train-4 300 ladder --workload train --device cuda --nproc 4
part ladder-train-8 300 ladder --workload train --device cuda --nproc 8
