#!/usr/bin/env bash
# The correctness suite on an NVIDIA GPU under compute-sanitizer, once with each of its tools:
#   memcheck   accesses outside allocations, misaligned ones
#   racecheck  shared memory written and read without a barrier between
#   initcheck  global memory read before it was written
#   synccheck  barriers and wave operations that not every thread reaches
#
#   suites/checkers/compute_sanitizer.sh [--sample N] [--minutes M] [TOOL...] [-- PYTEST ARGUMENTS]
#
# Without tools all four run. Without arguments each runs a sample that is meant for minutes, because the tools
# slow kernels 10 to 100 times: of every operation's tests N cases (default 3) from the smallest to the largest,
# and the verdict of a tiny model. For everything: -- suites/correctness. A tool that is not done after M minutes
# (default 15) is stopped and counts as not clean. PYTHON chooses the interpreter.
#
# Ends with a line for each tool. Exit code: 0 when every tool and every test is clean, 2 for bad usage, else 1.
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

usage() {
  echo "compute_sanitizer.sh: $1" >&2
  exit 2
}

tools=() sample=3 minutes=15
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    memcheck | racecheck | initcheck | synccheck) tools+=("$1") ;;
    --sample | --minutes)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || usage "$1 is ${2-nothing}, expected a number above 0"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    *) usage "$1 is no tool, expected memcheck, racecheck, initcheck or synccheck" ;;
  esac
  shift
done
(($#)) && shift
((${#tools[@]})) || tools=(memcheck racecheck initcheck synccheck)
if ((! $#)); then
  set -- -p suites.checkers.sample --sample "$sample"
  for name in ops argmax matvec digits matrix packed attention experts delta_net; do
    set -- "$@" "suites/correctness/test_$name.py"
  done
  set -- "$@" suites/correctness/test_decode_batch.py::test_a_batch_gives_each_sequence_its_own_bits
  set -- "$@" suites/correctness/test_verdict.py::test_verdict_of_one_mode_is_ok
fi

command -v compute-sanitizer >/dev/null ||
  usage "compute-sanitizer is not on PATH; it comes with the CUDA toolkit (bin/)"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=() summary=()
for tool in "${tools[@]}"; do
  echo "== $tool"
  # Tests provoke refused calls on purpose and see them themselves; so do processes that tests start.
  timeout --kill-after 30 "$((minutes * 60))" \
    compute-sanitizer --tool "$tool" --error-exitcode 86 --report-api-errors no \
    --target-processes application-only \
    "${PYTHON:-python3}" -m pytest --device cuda --require-gpu "$@" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  case $code in
    0) said=clean ;;
    86) said=findings ;;
    124 | 137) said="stopped after $minutes minutes" ;;
    *) said="failed, exit code $code" ;;
  esac
  ((code == 0)) || failed+=("$tool")
  # What the tool counted, and what pytest did.
  counted=$(grep -E '^=+ .*SUMMARY' "$log" | tail -n 1 | sed -E 's/^=+ *//')
  tests=$(grep -E '[0-9]+ (passed|failed|error).* in [0-9]' "$log" | tail -n 1 | tr -d =)
  summary+=("$tool: $said${counted:+; $counted}${tests:+; $(echo $tests)}")
done
echo "== summary"
printf '%s\n' "${summary[@]}"
if ((${#failed[@]})); then
  echo "compute_sanitizer.sh: not clean: ${failed[*]}" >&2
  exit 1
fi
