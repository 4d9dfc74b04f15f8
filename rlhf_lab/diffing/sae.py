"""Sparse autoencoders (SAEs) of SAELens, loaded where that package is installed."""

from pathlib import Path
from typing import Any

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.files import expand_home


def load_sae(directory: str | Path) -> Any:
    """Load a frozen `sae_lens.SAE` from cfg.json and sae_weights.safetensors.

    Its hook point is `cfg.metadata.hook_name`.

    Raises:
        ConfigError: If SAELens is not installed.
        LoadError: If the directory is not such a dictionary.
    """
    try:
        from sae_lens import SAE
    except ImportError:
        raise ConfigError("SAELens is not installed. Run `pip install sae-lens`.") from None
    try:
        return SAE.load_from_disk(str(expand_home(directory)), device="cpu").requires_grad_(False)
    except Exception as error:  # its readers raise errors of many kinds
        raise LoadError(f"{directory} is not a dictionary of SAELens ({error}).") from error
