"""Makes the package built in place importable from anywhere in this environment."""

from __future__ import annotations

import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    # Not `pip install --editable .`: that would compile everything a second time.
    Path(sysconfig.get_path("purelib"), "torch_c10d_ext.pth").write_text(f"{ROOT}\n")
