#!/usr/bin/env bash
# What is measured on a GPU, in one go, on a machine with one of them: CUDA's MPS divides it among the ranks.
#   bash benchmarks/gpu.sh COMMIT [FOLDER [PART ...]]      # results and logs go to FOLDER; parts by name, all by default
# Nothing needs to be installed but torch with CUDA; parts that compare with TorchRec leave it out where it is not on PYTHONPATH, or fail. PEER is a
# folder of the public HSTU. A part that fails or takes too long does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=$1
folder=${2:-build/gpu}
shift $(($# < 2 ? $# : 2))
wanted=" $* "
mkdir -p "$folder"
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

part() { # name seconds benchmark arguments...
  local name=$1 seconds=$2 benchmark=$3 begin=$SECONDS
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  shift 3
  timeout -k 20 "$seconds" python3 -m "freescale_bench.$benchmark" "$@" --commit "$commit" --folder "$folder" \
    >"$folder/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begin)) s"
  grep -E "steps of each|step |step_ms|is done|holds|FAILS|rror" "$folder/$name.log" | tail -24
}

part staged-4 120 staged --device cuda --nproc 4
part balance-4 150 balance measured --device cuda --nproc 4 --steps 70
part balance-8 150 balance measured --device cuda --nproc 8 --steps 70
part split 600 split all --device cuda --nproc 4
part overlap-4 300 overlap
part ladder-train-4 300 ladder --workload train --device cuda --nproc 4
part ladder-train-8 300 ladder --workload train --device cuda --nproc 8
part train 400 train --device cuda ${PEER:+--peer "$PEER"}
part kernels 300 kernels
part torchrec-4 300 torchrec --device cuda --nproc 4
part dynamic 60 dynamic --device cuda
part dynamic-4 150 dynamic step --device cuda --nproc 4
part host_tables 150 host_tables --device cuda
part host_tables-4 150 host_tables --device cuda --nproc 4
part host_tables-torchrec 300 host_tables torchrec --device cuda
part checkpoint-training-4 350 checkpoint training --device cuda --nproc 4 --turns 12
part snapshot-4 300 checkpoint snapshots --device cuda --nproc 4 --turns 12
part snapshot-restore-4 120 checkpoint restore --device cuda --nproc 4
part faults-4 900 faults --device cuda --work "$folder/storms"
