"""What the server that workers are forked from imports once for all of them."""

import gc
import os
import sys

from tests.harness.pool import SEARCH_PATH

sys.path[:] = os.environ[SEARCH_PATH].split(os.pathsep)

# ruff: noqa: E402
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.tensor
import torch.testing._internal.optests

import torch_c10d_ext.distributed  # noqa: F401
from tests import contract  # noqa: F401
from tests.harness import delayed, python_group  # noqa: F401

# Kernels without vector instructions compile in half the time.
torch._inductor.config.cpp.simdlen = 1

# What is here stays: a worker that walked it in search of garbage would copy all of its pages.
gc.collect()
gc.freeze()
