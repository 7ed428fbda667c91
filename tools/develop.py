"""Makes the package built in place importable from anywhere in this environment.

Not ``pip install --editable .``: that would compile everything a second time.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def constant(name: str) -> object:
    """What setup.py assigns to a name; running it would build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def install(site: Path) -> None:
    """Puts the package's place and its metadata, for its entry points, into a site directory."""
    version, groups = constant("VERSION"), constant("ENTRY_POINTS")
    assert isinstance(groups, dict)
    info = site / f"torch_c10d_ext-{version}.dist-info"
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *entries)]
    files = {
        site / "torch_c10d_ext.pth": f"{ROOT}\n",
        info / "METADATA": f"Metadata-Version: 2.1\nName: torch_c10d_ext\nVersion: {version}\n",
        info / "INSTALLER": "make build\n",
        info / "entry_points.txt": "\n".join(lines) + "\n",
    }
    for old in site.glob("torch_c10d_ext-*.dist-info"):
        for file in (*old.iterdir(), old):
            file.rmdir() if file.is_dir() else file.unlink()
    info.mkdir(parents=True)
    record = [*files, info / "RECORD"]
    files[info / "RECORD"] = "".join(f"{path.relative_to(site)},,\n" for path in record)
    for path, text in files.items():
        path.write_text(text)


if __name__ == "__main__":
    install(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib")))
