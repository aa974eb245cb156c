#!/usr/bin/env bash
# Everything that a GPU machine shows, by one command: bash benchmarks/gpu.sh [TOPIC ...]
#
# Builds in place with the interpreter named by PYTHON (default python3), runs the topics (default: all) and writes
# benchmarks/results/<gpu>/<topic>.json. RESULTS_DIR writes elsewhere, PEERS_DIR names a folder with peers to measure beside
# (topk, kernels, sampling, attention, conformance, bench; python3 -m benchmarks.peers DIR fills one), COMMIT names the commit where the checkout came without its history.
# Topics: tests, topk, kernels, sampling, attention, lanes, bench (the picture of topk), sanitizer; left out when none is named: parallel (needs two GPUs), engine (it also runs without
# a GPU: python -m benchmarks.engine) and conformance (cases that functions of PEERS_DIR answer otherwise than ours).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON="${PYTHON:-python3}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# The system's compilers, whatever the environment names: one that links libstdc++ statically makes every C++ exception a crash.
export CC=/usr/bin/gcc CXX=/usr/bin/g++
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device: this script measures a GPU"'

DSV4_OPS_BUILD=require "$PYTHON" setup.py -q build_ext --inplace
if [ $# -eq 0 ]; then set -- tests topk kernels sampling attention lanes bench sanitizer; fi
failed=""
for topic in "$@"; do
    "$PYTHON" -m benchmarks."$topic" || failed="$failed $topic"
done
echo "wall time: ${SECONDS} s"
if [ -n "$failed" ]; then echo "failed:$failed"; exit 1; fi
