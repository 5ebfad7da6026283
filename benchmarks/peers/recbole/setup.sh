#!/usr/bin/env bash
# Makes .venv-recbole in the project root: RecBole on CPU with the torch that FreeScale is tested with. Running it again is
# cheap and changes nothing. PYTHON names the interpreter to build the environment with.
set -euo pipefail
cd "$(dirname "$0")/../../.."

python="${PYTHON:-python3}"
venv=.venv-recbole
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)

constraints=()
if [ -f constraints.txt ]; then
    constraints=(-c constraints.txt)
fi
"${pip[@]}" ${constraints[@]+"${constraints[@]}"} torch==2.13.0 numpy pyyaml tqdm tensorboard
# RecBole declares ray, which it needs for tuning alone, and an old pandas: --no-deps keeps both out.
"${pip[@]}" --no-deps recbole==1.2.1 thop
"${pip[@]}" pandas scipy scikit-learn colorlog colorama tabulate texttable plotly psutil packaging
