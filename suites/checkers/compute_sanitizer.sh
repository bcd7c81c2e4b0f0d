#!/usr/bin/env bash
# The correctness suite on an NVIDIA GPU under compute-sanitizer, once with each of its tools:
#   memcheck   accesses outside allocations, misaligned ones
#   racecheck  shared memory written and read without a barrier between
#   initcheck  global memory read before it was written
#   synccheck  barriers and wave operations that not every thread reaches
#
#   suites/checkers/compute_sanitizer.sh [TOOL...] [-- PYTEST ARGUMENTS]
#
# Without tools all four run, without arguments all of suites/correctness. Each tool slows kernels 10 to 100
# times, so name files: -- suites/correctness/test_ops.py suites/correctness/test_matvec.py. PYTHON chooses the
# interpreter. Exit code: 0 when every tool and every test is clean, 2 for bad usage, else 1.
#
# On AMD there is no such tool for RDNA4: AddressSanitizer for kernels needs retryable page faults (HSA_XNACK=1),
# which gfx1201 lacks. What serves there:
#   AMD_SERIALIZE_KERNEL=3 AMD_SERIALIZE_COPY=3 pytest suites/correctness --device amd
#                          waits before and after each kernel and copy: a fault shows at the launch that made it
#   AMD_LOG_LEVEL=3        logs each HIP call with its arguments
#   rocgdb --args python -m pytest suites/correctness --device amd
#                          stops at a memory fault, with kernel, wave and line
#   pytest suites/correctness --device cpu --shuffle 1 --sanitize
#                          races, barriers, reads of what was never written: the same kernel source
set -uo pipefail

tools=()
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    memcheck | racecheck | initcheck | synccheck) tools+=("$1") ;;
    *)
      echo "compute_sanitizer.sh: $1 is no tool, expected memcheck, racecheck, initcheck or synccheck" >&2
      exit 2
      ;;
  esac
  shift
done
(($#)) && shift
((${#tools[@]})) || tools=(memcheck racecheck initcheck synccheck)
(($#)) || set -- suites/correctness

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute_sanitizer.sh: compute-sanitizer is not on PATH; it comes with the CUDA toolkit (bin/)" >&2
  exit 2
fi

failed=()
for tool in "${tools[@]}"; do
  echo "== $tool"
  # Tests provoke refused calls on purpose and see them themselves; so do processes that tests start.
  compute-sanitizer --tool "$tool" --error-exitcode 86 --report-api-errors no \
    --target-processes application-only \
    "${PYTHON:-python3}" -m pytest --device cuda --require-gpu "$@" || failed+=("$tool")
done
if ((${#failed[@]})); then
  echo "compute_sanitizer.sh: not clean: ${failed[*]}" >&2
  exit 1
fi
