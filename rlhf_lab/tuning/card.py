"""The model card of a tuned model: README.md with what was noted of the tuning, and no more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_lab.models.card import (
    CARD,
    LOAD_EXPORT,
    base_in_words,
    front_matter,
    license_in_words,
    program,
    table,
)

METHODS = MappingProxyType(
    {"sft": "supervised fine-tuning on texts", "dpo": "direct preference optimisation on pairs"}
)
SETTINGS = (
    "steps",
    "batch_size",
    "learning_rate",
    "seed",
    "held_out",
    "beta",
    "label_smoothing",
    "kind",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
)


def write_tuning_card(out: Path, notes: Mapping[str, Any], found: Sequence[str]) -> Path:
    """Write the card of a tuned model into its directory.

    Args:
        notes: what tuning.json holds.
        found: what was measured, a line each.

    Raises:
        OSError: the directory cannot be written.
    """
    method, base = notes["method"], notes["base_model"]
    source = notes["texts"] if method == "sft" else notes["pairs"]
    settings = [(name, f"{notes[name]}") for name in SETTINGS if name in notes]
    parts = [
        front_matter(base, "transformers", method),
        f"# {out.name}",
        f"A language model made from {base_in_words(base)} by {METHODS[method]} from `{source}`.",
        "## How it was trained",
        table(("setting", "value"), settings),
        "## Figures",
        "\n".join(f"- {line}" for line in found),
        "## How to load it",
        "In this directory, with plain transformers:",
        program(LOAD_EXPORT),
        "## License",
        license_in_words(base),
        "Written by rlhf_lab from what the tuning noted in `tuning.json`.",
    ]
    path = out / CARD
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path
