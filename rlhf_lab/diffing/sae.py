"""Sparse autoencoders (SAEs) of SAELens, loaded where that package is installed."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError, LoadError

_FILES = ("cfg.json", "sae_weights.safetensors")


class SAEDictionary:
    """A SAELens dictionary that reads and writes activations `[... d_model]` of one site.

    Args:
        sae: an SAE of SAELens.
        site: where it was trained, if its configuration says so.
    """

    def __init__(self, sae: Any) -> None:
        self.sae = sae.requires_grad_(False)
        self.site: str | None = getattr(sae.cfg.metadata, "hook_name", None)

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n latent"]:
        """The latents of activations."""
        return self.sae.encode(x.to(self.sae.dtype))

    @torch.no_grad()
    def decode(self, f: Float[Tensor, "*n latent"]) -> Float[Tensor, "*n d_model"]:
        """Activations from latents; after an `encode` whose scaling the SAE takes back."""
        return self.sae.decode(f.to(self.sae.dtype))

    @property
    def decoder(self) -> Float[Tensor, "latent d_model"]:
        """The direction that each latent writes."""
        return self.sae.W_dec.detach()


def load_sae(directory: str | Path) -> SAEDictionary:
    """Load a dictionary that SAELens saved (cfg.json and sae_weights.safetensors).

    Nothing is downloaded, and nothing is read but these two files.

    Raises:
        ConfigError: SAELens is not installed.
        LoadError: the directory does not hold such a dictionary.
    """
    missing = [name for name in _FILES if not Path(directory, name).is_file()]
    if missing:
        raise LoadError(
            f"{directory} has no {missing[0]}; name a directory that SAELens's save_model wrote."
        )
    try:
        from sae_lens import SAE
    except ImportError:
        raise ConfigError(
            f"{directory} is a dictionary of SAELens, which is not installed; run "
            "`pip install sae-lens`."
        ) from None
    try:
        return SAEDictionary(SAE.load_from_disk(str(directory), device="cpu"))
    except Exception as error:  # its readers raise errors of many kinds
        raise LoadError(
            f"{directory} cannot be read as a dictionary of SAELens ({error}); save it again."
        ) from error
