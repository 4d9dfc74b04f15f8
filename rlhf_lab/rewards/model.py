"""The reward model: a hooked transformer whose final normalized residual feeds a scalar head."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import einops
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_lab.errors import LoadError
from rlhf_lab.functional import last_token_mask
from rlhf_lab.models import load_model
from rlhf_lab.models.export import new_directory, write_language_model
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.padding import beginnings, pad_rows, run_left_padded
from rlhf_lab.models.reference import normalized_residuals
from rlhf_lab.sampling import tokenize_prompts

HEAD_FILE, NOTES_FILE = "reward_head.safetensors", "reward_model.json"


class RewardModel(nn.Module):
    """One number per text: a linear head on `ln_final.hook_normalized`, at the last real token.

    `base_model` stays an ordinary HookedModel, to be probed and patched like the policy.
    `seed` seeds the head, and touches no other random state.
    """

    mean: Float[Tensor, ""]
    std: Float[Tensor, ""]

    def __init__(self, base_model: HookedModel, seed: int = 0) -> None:
        super().__init__()
        self.base_model = base_model
        d_model, parameter = base_model.cfg.d_model, next(base_model.parameters())
        head = nn.utils.skip_init(nn.Linear, d_model, 1, bias=False)
        noise = torch.randn(1, d_model, generator=torch.Generator().manual_seed(seed))
        head.weight.data = noise / (d_model + 1) ** 0.5
        self.head = head.to(device=parameter.device, dtype=parameter.dtype)
        self.register_buffer("mean", torch.zeros((), device=parameter.device))
        self.register_buffer("std", torch.ones((), device=parameter.device))

    def token_scores(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq"]:
        """The head's score after each token, as if the text ended there; padding on either side."""

        def run(tokens: Int[Tensor, "batch seq"]) -> tuple[Float[Tensor, "batch seq"]]:
            normalized = normalized_residuals(self.base_model, tokens)
            return (einops.rearrange(self.head(normalized), "batch seq 1 -> batch seq"),)

        return run_left_padded(run, input_ids, attention_mask)[0]

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """The raw score of each row, which preferences are trained on.

        1. Score every position.
        2. Take the score at the last real token, after which everything has been read.

        Raises ValueError for a row without a real token.
        """
        scores = self.token_scores(input_ids, attention_mask)
        if attention_mask is None:
            return scores[:, -1]
        if not attention_mask.any(1).all():
            raise ValueError("attention_mask has a row without a real token; leave that row out.")
        return scores[last_token_mask(attention_mask)]

    def normalize(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Raw scores less the mean, over the standard deviation, of the texts trained on."""
        return (scores - self.mean) / self.std

    def set_normalization(self, scores: Float[Tensor, " batch"]) -> None:
        """Take mean and standard deviation from scores, in place; they are saved with the model."""
        self.mean.copy_(scores.mean())
        self.std.copy_(scores.std(correction=0).clamp_min(1e-6))

    def encode(
        self, texts: Sequence[str]
    ) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """Token ids, padded on the right, and their mask.

        BOS goes before a text and EOS behind it, as far as the tokenizer has them; what does not
        fit in the context is cut off before EOS.

        Raises:
            ConfigError: a word that a closed vocabulary does not have.
        """
        tokenizer = self.base_model.tokenizer
        texts = beginnings(texts, tokenizer, self.base_model.cfg.n_ctx)
        rows = tokenize_prompts(tokenizer, texts, tokenizer.bos_token_id is not None)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        room = self.base_model.cfg.n_ctx - len(end)
        return pad_rows([row[:room] + end for row in rows], next(self.parameters()).device)

    @torch.no_grad()
    def score(self, texts: Sequence[str], batch_size: int = 128) -> Float[Tensor, " batch"]:
        """The raw score of each text, some texts at a time."""
        chunks = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
        scores = [self(*self.encode(chunk)) for chunk in chunks]
        return torch.cat([torch.empty(0, device=self.mean.device), *scores])

    def save(self, out: str | Path, base_model: str, notes: dict[str, Any]) -> None:
        """Write a Hugging Face directory with the head, the normalisation and notes beside it.

        Args:
            base_model: the name that the language model was loaded from.
            notes: how it was trained and how good it is; goes to reward_model.json.

        Raises:
            LoadError: the directory is occupied or cannot be written.
        """
        with new_directory(Path(out)) as partial:
            write_language_model(self.base_model, base_model, partial)
            save_file({k: v.cpu() for k, v in self._of_head().items()}, partial / HEAD_FILE)
            written = json.dumps(notes, indent=2) + "\n"
            (partial / NOTES_FILE).write_text(written, encoding="utf-8")

    def _of_head(self) -> dict[str, Tensor]:
        """What is saved beside the language model, by its name there."""
        return {"head.weight": self.head.weight.detach(), "mean": self.mean, "std": self.std}

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device = "cpu") -> "RewardModel":
        """The reward model that `save` wrote.

        Raises:
            LoadError: there is none.
        """
        path = Path(directory) / HEAD_FILE
        if not path.is_file():
            raise LoadError(
                f"{str(directory)!r} is no reward model: it has no {HEAD_FILE}; "
                "train one with `train-reward`."
            )
        model = cls(load_model(str(directory), device=device))
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} is corrupt ({error}); train the model again.") from None
        for name, value in model._of_head().items():
            found = tensors.get(name)
            fits = found is not None and found.shape == value.shape and found.is_floating_point()
            if not fits or not found.isfinite().all() or (name == "std" and found <= 0):
                raise LoadError(
                    f"{path} is corrupt (its {name} does not fit); train the model again."
                )
            value.copy_(found)
        return model.requires_grad_(False).eval()


def refuse_reward_model(name: str) -> None:
    """Say so if a directory is to write texts and holds a reward model, which cannot.

    Raises:
        LoadError: it does.
    """
    if Path(name, HEAD_FILE).is_file():
        raise LoadError(
            f"{name!r} is a reward model, whose transformer no longer writes; give the language "
            "model that it was trained from, or name it as reward_model."
        )


class OfRewardModel:
    """What reads the scores of a reward model, some texts at a time.

    Args:
        model: a trained reward model, or the directory of one, which is loaded to `device`.

    Raises:
        LoadError: no reward model is there.
    """

    def __init__(
        self,
        model: RewardModel | str | Path,
        device: str | torch.device = "cpu",
        batch_size: int = 128,
    ) -> None:
        self.model = model if isinstance(model, RewardModel) else RewardModel.load(model, device)
        self.batch_size = batch_size


class LearnedReward(OfRewardModel):
    """The normalised reward of each text, by a reward model (`OfRewardModel`); a `reward_fn`."""

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """Mean 0 and variance 1 over the texts that the model was trained on."""
        return self.model.normalize(self.model.score(texts, self.batch_size))
