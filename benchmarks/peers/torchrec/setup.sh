#!/usr/bin/env bash
# Makes .venv-peer in the project root: TorchRec on CPU with the torch that FreeScale is tested with. Running it again is
# cheap and changes nothing. PYTHON names the interpreter to build the environment with. TORCHREC=1.9.2 takes that TorchRec,
# which has TrainPipelinePEC, with torch 2.14: pip then downloads 5 GB of CUDA packages.
set -euo pipefail
cd "$(dirname "$0")/../../.."

torchrec=${TORCHREC:-1.8.0}
case $torchrec in
    1.8.*) torch=2.13.0 triton=3.7.1 fbgemm=1.8.0 ;;
    1.9.*) torch=2.14.1 triton=3.8.0 fbgemm=1.9.0 ;;
    *) echo "TORCHREC=$torchrec: 1.8.0 or 1.9.2" >&2 && exit 1 ;;
esac
python="${PYTHON:-python3}"
venv=.venv-peer
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)

constraints=()
if [ -f constraints.txt ]; then
    grep -v -E '^(torch|triton)==' constraints.txt >"$venv/constraints.txt"
    constraints=(-c "$venv/constraints.txt")
fi
"${pip[@]}" ${constraints[@]+"${constraints[@]}"} torch==$torch numpy

# torchrec declares fbgemm-gpu, which has no CPU wheel, and torchmetrics declares any torch: --no-deps keeps both from
# replacing the torch above. Other fbgemm versions do not load with it.
"${pip[@]}" --no-deps torchrec=="$torchrec" fbgemm-gpu-cpu==$fbgemm tensordict torchmetrics==1.0.3 lightning-utilities
# What those import and the lines above have not brought; none of it depends on torch. DlrmHSTU imports Triton.
"${pip[@]}" ${constraints[@]+"${constraints[@]}"} tqdm pyre-extensions packaging cloudpickle importlib-metadata orjson \
    pyvers setuptools psutil pyarrow triton==$triton

if [ -f pyproject.toml ]; then
    "${pip[@]}" --no-deps -e . -e ./benchmarks
fi

"$venv/bin/python" - <<'PYTHON'
import warnings

warnings.filterwarnings("ignore")
import fbgemm_gpu
import torch
import torchrec
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

assert hasattr(torch.ops.fbgemm, "block_bucketize_sparse_features"), "fbgemm's operators did not load"
print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, fbgemm {fbgemm_gpu.__version__}: ready in .venv-peer")
PYTHON
