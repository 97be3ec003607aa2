#!/usr/bin/env bash
# Every kernel under compute-sanitizer's memcheck, synccheck and racecheck. Needs a GPU; exits with 1 on any finding.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # torch's caching allocator would hide what leaves a tensor
for tool in memcheck synccheck racecheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 "${PYTHON:-python3}" -m flash_cute.testing.smoke
done
