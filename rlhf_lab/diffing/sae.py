"""Sparse autoencoders (SAEs) of SAELens, loaded where that package is installed."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.files import expand_home


class SAEDictionary:
    """A SAELens dictionary of activations `[... d_model]` of one `site`."""

    def __init__(self, sae: Any) -> None:
        self.sae = sae.requires_grad_(False)
        self.site: str | None = getattr(sae.cfg.metadata, "hook_name", None)

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n latent"]:
        """Return the latents of activations."""
        return self.sae.encode(x.to(self.sae.dtype))

    @torch.no_grad()
    def decode(self, f: Float[Tensor, "*n latent"]) -> Float[Tensor, "*n d_model"]:
        """Return activations from latents, after an `encode` whose scaling the SAE reverts."""
        return self.sae.decode(f.to(self.sae.dtype))

    @property
    def decoder(self) -> Float[Tensor, "latent d_model"]:
        """Direction of each latent."""
        return self.sae.W_dec.detach()


def load_sae(directory: str | Path) -> SAEDictionary:
    """Load a dictionary that SAELens saved (cfg.json and sae_weights.safetensors).

    Raises:
        ConfigError: If SAELens is not installed.
        LoadError: If the directory is not such a dictionary.
    """
    try:
        from sae_lens import SAE
    except ImportError:
        raise ConfigError("SAELens is not installed. Run `pip install sae-lens`.") from None
    try:
        return SAEDictionary(SAE.load_from_disk(str(expand_home(directory)), device="cpu"))
    except Exception as error:  # its readers raise errors of many kinds
        raise LoadError(f"{directory} is not a dictionary of SAELens ({error}).") from error
