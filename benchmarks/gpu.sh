#!/usr/bin/env bash
# Everything that a GPU machine shows, by one command: bash benchmarks/gpu.sh [TOPIC[=SECONDS] ...]
#
# Builds in place with the interpreter named by PYTHON (default python3), runs the topics (default: all) and writes
# benchmarks/results/<gpu>/<topic>.json. PREBUILT=1 takes the extensions that lie in dsv4_ops/. RESULTS_DIR writes elsewhere, PEERS_DIR names a folder with
# peers to measure beside (topk, kernels, sampling, attention, conformance, bench; python3 -m benchmarks.peers DIR fills one), COMMIT names the commit
# where the checkout came without its history. benchmarks/record.py has the topics and their time limits, and says what LIMIT_S, <TOPIC>_ARGS and ARCHIVE do.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON="${PYTHON:-python3}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# The system's compilers, whatever the environment names: one that links libstdc++ statically makes every C++ exception a crash.
export CC=/usr/bin/gcc CXX=/usr/bin/g++
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device: this script measures a GPU"'

if [ -z "${PREBUILT:-}" ]; then DSV4_OPS_BUILD=require "$PYTHON" setup.py -q build_ext --inplace; fi
"$PYTHON" -c 'import dsv4_ops; assert "_C_cuda" in dsv4_ops.loaded, dsv4_ops.skipped'
exec "$PYTHON" -m benchmarks.record "$@"
