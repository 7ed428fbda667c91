#!/usr/bin/env bash
# Builds and checks everything on a machine with a GPU, in one command, without network:
#
#     tools/gpu_check.sh [pytest arguments]
#
# Uses the python3 that has torch (PYTHON=... for another), installs nothing, and ends with a
# summary and a non-zero status when a step failed. Tests that need a GPU fail here instead of being
# skipped.
# LIMIT (seconds, 580) bounds the whole run; the benchmark measures for as long as is left. CHECKS
# chooses steps: "build test bench".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
CHECKS=${CHECKS:-build test bench}
# nproc would count what OMP_NUM_THREADS allows.
cores=$(env -u OMP_NUM_THREADS nproc)
export MAX_JOBS=${MAX_JOBS:-$cores}
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ ${C10D_EXT_FAIL_WITHOUT_CUDA-unset} == unset ]]; then
  export C10D_EXT_FAIL_WITHOUT_CUDA=1
fi

# Only the plug-ins the suite uses: what else a big environment holds may warn, and warnings are
# errors here. The variable also reaches xdist's workers, `-p` does not.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
plugins=()
parallel=()
if "$PYTHON" -c 'import pytest_timeout' 2>/dev/null; then
  plugins+=(pytest_timeout)
fi
if "$PYTHON" -c 'import xdist' 2>/dev/null && ((cores >= 8)); then
  plugins+=(xdist.plugin)
  # A file stays on one worker, which keeps its pools of ranks: at most 1 + 2 + 3 + 4 processes.
  parallel=(-n "$((cores / 4))" --dist loadfile)
fi
export PYTEST_PLUGINS=$(IFS=, && echo "${plugins[*]-}")

LIMIT=${LIMIT:-580}
BENCH_RESERVE=150
BENCH_STARTING=100 # of these seconds, for starting ranks and compiling
steps=()
failures=0
began=$SECONDS

section() {
  printf '\n==================== %s (at %d s)\n' "$1" "$((SECONDS - began))"
}

# step NAME RESERVE COMMAND...: gives it the time that is left but for RESERVE seconds; a failure is
# noted and the rest still runs.
step() {
  local name=$1 limit=$((LIMIT - (SECONDS - began) - $2)) from=$SECONDS status
  shift 2
  section "$name: $*"
  timeout --kill-after=10 "$((limit > 1 ? limit : 1))" "$@"
  status=$?
  case $status in
    0) steps+=("ok       $((SECONDS - from)) s  $name") ;;
    124 | 137) steps+=("TIMEOUT  $((SECONDS - from)) s  $name (limit $limit s)") ;;
    *) steps+=("FAILED   $((SECONDS - from)) s  $name (status $status)") ;;
  esac
  if ((status)); then
    failures=$((failures + 1))
  fi
  return "$status"
}

wanted() {
  [[ " $CHECKS " == *" $1 "* ]]
}

section machine
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader ||
  echo "nvidia-smi says nothing"
"$PYTHON" - <<'PYTHON_END' || exit 1
import os, platform, sys

import torch

print("python", platform.python_version(), sys.executable)
gpus = torch.cuda.device_count()
print("torch", torch.__version__, "CUDA", torch.version.cuda, "sees", gpus, "GPU")
if gpus:
    print(torch.cuda.get_device_name(0), "nccl", ".".join(map(str, torch.cuda.nccl.version())))
print(os.cpu_count(), "cores,", os.environ["MAX_JOBS"], "build jobs")
PYTHON_END

built=0
if wanted build; then
  step build "$BENCH_RESERVE" "$PYTHON" tools/build_inplace.py || built=$?
fi
if ((built == 0)); then
  if wanted test; then
    step test "$BENCH_RESERVE" "$PYTHON" -m pytest -q --durations=10 "${parallel[@]}" "$@"
  fi
  if wanted bench; then
    device=$("$PYTHON" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
    measure=$((LIMIT - (SECONDS - began) - BENCH_STARTING))
    measure=$((measure < 14 ? 14 : measure > 120 ? 120 : measure))
    step bench 0 "$PYTHON" benchmarks/run.py --device "$device" --seconds "$measure"
  fi
fi

section summary
printf '%s\n' "${steps[@]}"
printf '%d failed, %d s in all\n' "$failures" "$((SECONDS - began))"
exit "$((failures > 0))"
