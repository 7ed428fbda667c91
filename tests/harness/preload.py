"""What the server that workers are forked from imports once for all of them."""

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.tensor
import torch.testing._internal.optests

# Kernels without vector instructions compile in half the time.
torch._inductor.config.cpp.simdlen = 1
