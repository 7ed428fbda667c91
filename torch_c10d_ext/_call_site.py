"""Where a collective was called, for ``TORCH_C10D_EXT_SHM_STRICT=2``."""

from __future__ import annotations

import os
import sys

import torch

from torch_c10d_ext import _C

# Frames of these are passed over: what counts is the line of the program that called them.
_OWN = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    "<eval_with_key>",  # graphs, and what is around them
    "<frozen",
    "<__array_function__",
)
_GENERATED = "torchinductor_"
# Of a line in no file: backward passes on threads of torch, and the like.
NOWHERE = "a thread without Python code"


def call_site() -> str:
    """The innermost line outside of torch and this package, as ``directory/file.py:12``.

    Without what is above the file's directory, so that ranks with checkouts in different places
    say the same.
    """
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith(_OWN) or _GENERATED in name):
            return f"{'/'.join(name.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


def register() -> None:
    """Has the backends ask here."""
    _C.set_call_site_provider(call_site)
