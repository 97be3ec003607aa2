#!/usr/bin/env bash
# Kernels under compute-sanitizer: every one under memcheck and synccheck, those of the sm_80 family under racecheck, too.
# Racecheck sees no __syncwarp() of which the compiler has made nothing, as it does where a warp is together anyway: what
# Hopper's kernels hand over behind one, at an mbarrier at which one lane arrives for its warp, are races to it.
# Needs a GPU; exits with 1 on any finding.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # torch's caching allocator would hide what leaves a tensor
check() {
  echo "== $*"
  compute-sanitizer --tool "$1" --error-exitcode 1 "${PYTHON:-python3}" -m flash_cute.testing.smoke "${@:2}"
}
check memcheck
check synccheck
check racecheck _sm80_
