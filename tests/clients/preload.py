"""What the server of tests/clients/launch.py imports before it forks."""

import accelerate  # noqa: F401
import deepspeed  # noqa: F401
import lightning
import lightning.fabric  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.rpc
import torch.distributed.tensor.parallel  # noqa: F401
import torchmetrics  # noqa: F401
import transformers  # noqa: F401
from accelerate import Accelerator  # noqa: F401
from lightning.pytorch.strategies import DDPStrategy  # noqa: F401
from transformers import BertConfig, BertForSequenceClassification, Trainer  # noqa: F401
