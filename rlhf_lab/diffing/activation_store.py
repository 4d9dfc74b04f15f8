"""Activations of several models at the same tokens, sampled within a fixed memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.files import expand_home
from rlhf_lab.functional.masks import real_entries
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.training.capture import ROWS_AT_ONCE, capture_activations
from rlhf_lab.training.checkpoint import load_checkpoint, save_checkpoint

TOKEN_BYTES = 3 * 4  # of a token's id, text and position
Model = TransformerWithValueHead | HookedModel


class TokenPlaces(NamedTuple):
    """Ids of tokens, their texts, and their positions."""

    ids: Int[Tensor, " n"]
    texts: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]


class ActivationStore:
    """A uniform sample (reservoir) of tokens, with the activations of all models, of fixed size.

    Token g replaces a random one with probability capacity / g: uniform (Vitter 1985, algorithm R).

    Args:
        mb: limit of its tensors in megabytes (of 2**20 bytes).
        models: names of the models, in the order of the axis `model`.
    """

    def __init__(
        self,
        mb: float | int,
        models: Sequence[str] = ("base", "tuned"),
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
    ) -> None:
        self.mb, self.models, self.dtype = mb, tuple(models), dtype
        self.seen = self.n_texts = 0
        self.site: str | None = None  # of `collect_activations`
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = torch.empty(0, len(self.models), 0, dtype=dtype)
        self._places = torch.empty(0, 3, dtype=torch.int32)

    def __len__(self) -> int:
        return min(self.seen, len(self._rows))

    @property
    def activations(self) -> Float[Tensor, "n model d_model"]:
        """Activations of the kept tokens, in the stored dtype."""
        return self._rows[: len(self)]

    @property
    def places(self) -> TokenPlaces:
        """Texts and positions of the kept tokens."""
        return TokenPlaces(*self._places[: len(self)].long().unbind(1))

    def add(
        self, activations: Mapping[str, Float[Tensor, "n d_model"]], places: TokenPlaces
    ) -> None:
        """Offer tokens to the sample; raises ConfigError if the dtype or memory does not fit."""
        exact = torch.stack([activations[name].detach().cpu() for name in self.models], 1)
        rows = exact.to(self.dtype)
        if not rows.isfinite().all():
            raise ConfigError(
                f"Activations up to {exact.abs().max():.3g} are not finite in {self.dtype}. Use "
                "dtype=torch.bfloat16 or torch.float32, and omit tokens with nan."
            )
        if self._rows.shape[-1] == 0:
            self._allocate(rows.shape[-1])
        number = torch.arange(self.seen, self.seen + len(rows), dtype=torch.float64)
        noise = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        slot = torch.where(number < len(self._rows), number, (noise * (number + 1)).floor()).long()
        # the last token of a slot stays, as if tokens were added one by one
        last = {s: i for i, s in enumerate(slot.tolist()) if s < len(self._rows)}
        to, of = torch.tensor(list(last), dtype=torch.long), torch.tensor([*last.values()]).long()
        self._rows[to] = rows[of]
        self._places[to] = torch.stack([x.cpu() for x in places], 1).int()[of]
        self.seen += len(rows)
        self.n_texts = max(self.n_texts, int(places.texts.max()) + 1 if len(rows) else 0)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, from which `load` continues the sample."""
        tensors = {
            "activations": self.activations,
            "places": self._places[: len(self)],
            "random_state": self._generator.get_state(),
        }
        values = {name: getattr(self, name) for name in ("mb", "models", "seen", "n_texts", "site")}
        save_checkpoint(expand_home(path), tensors, {"activation_store": values})

    @classmethod
    def load(cls, path: str | Path) -> "ActivationStore":
        """Read a file of `save`; raises RunError for any other path."""
        tensors, metadata = load_checkpoint(expand_home(path))
        if "activation_store" not in metadata:
            raise RunError(f"{path} is a checkpoint. Use a file that ActivationStore.save wrote.")
        values, kept = {"site": None} | metadata["activation_store"], tensors["activations"]
        store = cls(values["mb"], values["models"], kept.dtype)
        if kept.shape[-1]:
            store._allocate(kept.shape[-1])
        store._rows[: len(kept)], store._places[: len(kept)] = kept, tensors["places"]
        store.seen, store.n_texts, store.site = values["seen"], values["n_texts"], values["site"]
        store._generator.set_state(tensors["random_state"])
        return store

    def _allocate(self, width: int) -> None:
        n_bytes = len(self.models) * width * self.dtype.itemsize + TOKEN_BYTES
        capacity = int(self.mb * 2**20 // n_bytes)
        if capacity < 1:
            raise ConfigError(f"mb={self.mb!r} must fit a token of {n_bytes} bytes.")
        self._rows = torch.zeros(capacity, len(self.models), width, dtype=self.dtype)
        self._places = torch.zeros(capacity, 3, dtype=torch.int32)


@torch.no_grad()
def collect_activations(
    store: ActivationStore,
    models: Mapping[str, Model],
    tokens: Int[Tensor, "batch seq"],
    site: str,
    mask: Bool[Tensor, "batch seq"] | None = None,
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> None:
    """Offer a store the activations of its models at its site; raises ConfigError for others.

    Args:
        models: by the store's names.
        site: a hook point of shape [batch seq d_model], such as "blocks.0.hook_resid_post".
        mask, attention_mask: True at the tokens to offer; False on left padding.
    """
    if models.keys() != {*store.models} or store.site not in (None, site):
        held = f"{[*store.models]} at {store.site or site}, not of {[*models]} at {site}"
        raise ConfigError(f"The store is of {held}. Use another store.")
    store.site = site
    real = real_entries(tokens, None if attention_mask is None else attention_mask.bool())
    offered, first = real & real_entries(tokens, mask), store.n_texts
    for rows in torch.arange(len(tokens)).split(ROWS_AT_ONCE):
        ids, chosen = tokens[rows], offered[rows].cpu()
        acts = {
            name: capture_activations(model, ids, [site], attention_mask=real[rows])[site]
            for name, model in models.items()
        }
        text, pos = chosen.nonzero().unbind(1)
        places = TokenPlaces(ids.cpu()[chosen], first + rows[text], pos)
        store.add({name: x.cpu()[chosen] for name, x in acts.items()}, places)
    store.n_texts = first + len(tokens)
