"""ActivationStore: activations of several models at the same tokens, within a fixed memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.training.capture import ROWS_AT_ONCE, capture_activations
from rlhf_lab.training.checkpoint import load_checkpoint, save_checkpoint

DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
"""What activations are stored as, by name."""
PLACE_BYTES = 3 * 4
"""What a token's id, text and position take."""
Model = TransformerWithValueHead | HookedModel


class TokenPlaces(NamedTuple):
    """Where tokens come from: their ids, the texts that they stand in, and where in these."""

    ids: Int[Tensor, " n"]
    texts: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]


class ActivationStore:
    """A uniform sample (reservoir) of all tokens that it was shown, of a size that never grows.

    1. The first tokens are kept, as many as the megabytes hold.
    2. Token number g from then on is kept with probability capacity / g, in the place of one that
       is drawn among those there.

    So every token that was shown has the same chance, however many there are and however they were
    cut into batches (Vitter 1985, algorithm R). A row holds all models' activations at one token.

    Args:
        mb: megabytes (of 2**20 bytes) that its tensors take at most; its file has 8 kB more.
        models: names of the models, in the order of the axis `model`.
        dtype: float16 by default: 11 bits of mantissa, up to 65,504.
        seed: of what is kept.

    Raises:
        ConfigError: megabytes that are no number above 0, names that are none or the same, or
            another dtype.
    """

    def __init__(
        self,
        mb: float | int,
        models: Sequence[str] = ("base", "tuned"),
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
    ) -> None:
        if isinstance(mb, bool) or not mb > 0:
            raise ConfigError(f"mb={mb!r} must be a number greater than 0.")
        if not models or len(set(models)) != len(models) or "" in models:
            raise ConfigError(f"models={tuple(models)!r} must be names that differ.")
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype={dtype} cannot be stored; choose of {', '.join(DTYPES)}.")
        self.mb, self.models, self.dtype = mb, tuple(models), dtype
        self.seen = self.n_texts = self._filled = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = torch.empty(0, len(self.models), 0, dtype=dtype)
        self._places = torch.empty(0, 3, dtype=torch.int32)

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._filled

    @property
    def capacity(self) -> int:
        """Tokens that it can hold; 0 until the first are added, which say how wide they are."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are taken, in use or not."""
        return self._rows.nbytes + self._places.nbytes

    @property
    def activations(self) -> Float[Tensor, "n model d_model"]:
        """What is kept, in the stored dtype."""
        return self._rows[: len(self)]

    @property
    def places(self) -> TokenPlaces:
        """Where the kept tokens come from."""
        return TokenPlaces(*self._places[: len(self)].long().unbind(1))

    def add(
        self, activations: Mapping[str, Float[Tensor, "n d_model"]], places: TokenPlaces
    ) -> None:
        """Show it tokens, of which it keeps some.

        Raises:
            ConfigError: other models than its own, activations of another shape than those before,
                nan, or numbers that its dtype cannot hold; too few megabytes for one token.
        """
        rows = self._as_rows(activations, len(places.ids))
        if self._rows.shape[-1] == 0:
            self._make_room(rows.shape[-1])
        number = torch.arange(self.seen, self.seen + len(rows), dtype=torch.float64)
        noise = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        slot = torch.where(number < self.capacity, number, (noise * (number + 1)).floor()).long()
        # of several tokens for one slot the last stays, as if they had come one by one
        last = {s: i for i, s in enumerate(slot.tolist()) if s < self.capacity}
        to, of = torch.tensor(list(last), dtype=torch.long), torch.tensor([*last.values()]).long()
        self._rows[to] = rows[of]
        self._places[to] = torch.stack([x.cpu() for x in places], 1).int()[of]
        self.seen += len(rows)
        self._filled = min(self.seen, self.capacity)
        self.n_texts = max(self.n_texts, int(places.texts.max()) + 1 if len(rows) else 0)

    def beside_itself(self, model: str) -> "ActivationStore":
        """One model's activations as those of two, for controls; as large as this store.

        Raises:
            ConfigError: the store has no such model.
        """
        if model not in self.models:
            raise ConfigError(
                f"model={model!r} is not in the store; choose of {', '.join(self.models)}."
            )
        twice = ActivationStore(self.mb, (model, f"{model} again"), self.dtype)
        twice._rows = self.activations[:, [self.models.index(model)] * 2].clone()
        twice._places = self._places[: len(self)].clone()
        twice.seen = twice._filled = len(self)
        twice.n_texts = self.n_texts
        return twice

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, from which `load` goes on as if nothing had happened.

        Raises:
            RunError: the file cannot be written.
        """
        tensors = {
            "activations": self.activations,
            "places": self._places[: len(self)],
            "random_state": self._generator.get_state(),
        }
        notes = {
            "mb": self.mb,
            "models": list(self.models),
            "dtype": str(self.dtype),
            "seen": self.seen,
            "n_texts": self.n_texts,
        }
        save_checkpoint(Path(path), tensors, {"activation_store": notes})

    @classmethod
    def load(cls, path: str | Path) -> "ActivationStore":
        """Read what `save` wrote.

        Raises:
            RunError: no such file, a broken one, or one that is no store.
        """
        tensors, notes = load_checkpoint(Path(path))
        if "activation_store" not in notes:
            raise RunError(f"{path} holds no activations; name a file of ActivationStore.save.")
        notes = notes["activation_store"]
        store = cls(notes["mb"], notes["models"], DTYPES[notes["dtype"]])
        kept = tensors["activations"]
        if kept.shape[-1]:
            store._make_room(kept.shape[-1])
        store._rows[: len(kept)], store._places[: len(kept)] = kept, tensors["places"]
        store.seen, store.n_texts, store._filled = notes["seen"], notes["n_texts"], len(kept)
        store._generator.set_state(tensors["random_state"])
        return store

    def _make_room(self, width: int) -> None:
        """Take all the memory that there will ever be."""
        a_token = len(self.models) * width * self.dtype.itemsize + PLACE_BYTES
        capacity = int(self.mb * 2**20 // a_token)
        if not capacity:
            raise ConfigError(
                f"mb={self.mb!r} holds no token of {len(self.models)} models of width {width}, "
                f"which takes {a_token} bytes; give more megabytes."
            )
        self._rows = torch.zeros(capacity, len(self.models), width, dtype=self.dtype)
        self._places = torch.zeros(capacity, 3, dtype=torch.int32)

    def _as_rows(
        self, activations: Mapping[str, Tensor], n: int
    ) -> Float[Tensor, "n model d_model"]:
        """All models side by side in the stored dtype, or a refusal."""
        if set(activations) != set(self.models):
            raise ConfigError(
                f"activations are of {', '.join(activations)}, but the store is for "
                f"{', '.join(self.models)}; give those of each of its models."
            )
        width = self._rows.shape[-1] or next(iter(activations.values())).shape[-1]
        for name, x in activations.items():
            if x.shape != (n, width):
                raise ConfigError(
                    f"activations of {name!r} have the shape {tuple(x.shape)}, not "
                    f"{(n, width)} as the tokens and what is stored; give a row per token."
                )
        rows = torch.stack([activations[name].detach().cpu() for name in self.models], 1)
        if not rows.isfinite().all():
            raise ConfigError("activations hold nan or inf; leave those tokens out.")
        kept = rows.to(self.dtype)
        if not kept.isfinite().all():
            raise ConfigError(
                f"activations reach {rows.abs().max():.3g}, which dtype={self.dtype} cannot hold; "
                "make the store with torch.bfloat16 or torch.float32."
            )
        return kept


@torch.no_grad()
def collect_activations(
    store: ActivationStore,
    models: Mapping[str, Model],
    tokens: Int[Tensor, "batch seq"],
    site: str,
    mask: Bool[Tensor, "batch seq"] | None = None,
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> None:
    """Show a store what models have at one site, on the same texts, some rows at a time.

    Texts are numbered from `store.n_texts` on, so that `store.places` tells which is which over
    several calls.

    Args:
        models: by the store's names.
        site: a hook point that has d_model numbers per position, such as
            "blocks.0.hook_resid_post".
        mask: True at the tokens to show; those of the attention mask when None.
        attention_mask: False on left padding.

    Raises:
        ConfigError: what `store.add` or `capture_activations` refuse.
    """
    there = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
    shown = there if mask is None else there & mask
    first = store.n_texts
    for rows in torch.arange(len(tokens)).split(ROWS_AT_ONCE):
        ids, chosen = tokens[rows], shown[rows].cpu()
        found = {
            name: capture_activations(model, ids, [site], attention_mask=there[rows])[site]
            for name, model in models.items()
        }
        wide = next((tuple(x.shape) for x in found.values() if x.ndim != 3), None)
        if wide is not None:
            raise ConfigError(
                f"the site {site!r} has the shape {wide}; choose one of [batch seq d_model]."
            )
        text, pos = chosen.nonzero().unbind(1)
        places = TokenPlaces(ids.cpu()[chosen], first + rows[text], pos)
        store.add({name: x.cpu()[chosen] for name, x in found.items()}, places)
    store.n_texts = first + len(tokens)
