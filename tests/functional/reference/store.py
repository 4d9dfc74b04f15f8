"""What the scripts beside this file share: drawing inputs, and writing them with their outputs."""

import json
from pathlib import Path
from typing import Any

import torch


def draw(*shape: int) -> torch.Tensor:
    """Normal numbers of double precision with four decimals, so that the files stay short."""
    return (torch.randn(shape, dtype=torch.float64) * 1e4).round() / 1e4


def plain(x: Any) -> Any:
    """Tensors as lists, at any depth."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return [plain(value) for value in x] if isinstance(x, (list, tuple)) else x


def write(path: Path, sections: dict[str, dict[str, Any]]) -> None:
    """Write sections as JSON, with one line to each entry."""
    parts = []
    for name, entries in sections.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(plain(x))}" for key, x in entries.items()]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
