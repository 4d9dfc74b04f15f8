"""Paths of the bundled models that ship inside the package."""

from pathlib import Path

LANGUAGE_MODELS = ("reel-nano", "reel-nano-b", "reel-nano-c")  # one recipe, three seeds
REEL_MODELS = (*LANGUAGE_MODELS, "reel-sentiment")
# three seeds, and one whose grammar writes no long sum with steps
SUMS_MODELS = ("sums-nano", "sums-nano-b", "sums-nano-c", "sums-nano-unreachable")
BUNDLED = (*REEL_MODELS, *SUMS_MODELS)  # models in the package


def weights_dir(name: str) -> Path:
    """Return the Hugging Face directory of a bundled model.

    Raises ValueError for a name that is not bundled, or whose files are missing.
    """
    if name not in BUNDLED:
        raise ValueError(f"name is {name!r}, which is not bundled. Choose one of {BUNDLED}.")
    directory = Path(__file__).parent / "weights" / name
    if not (directory / "model.safetensors").is_file():
        raise ValueError(f"name is {name!r}, whose weights are missing. Install rlhf_lab again.")
    return directory
