"""Reward model, a hooked transformer with a scalar head; also as a reward or as a critic."""

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

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.files import expand_home
from rlhf_lab.functional import last_token_mask
from rlhf_lab.models import (
    TransformerWithCritic,
    TransformerWithValueHead,
    build_policy,
    load_model,
)
from rlhf_lab.models.build import in_weight_precision
from rlhf_lab.models.export import new_directory, write_language_model
from rlhf_lab.models.hooked_model import HookedModel, normalized_residual
from rlhf_lab.models.padding import pad_rows, run_left_padded
from rlhf_lab.sampling import tokenize_prompts

HEAD_FILE, NOTES_FILE = "reward_head.safetensors", "reward_model.json"


class RewardModel(nn.Module):
    """One score per text: a linear head on `ln_final.hook_normalized` at the last real token.

    `base_model` stays an ordinary HookedModel that can be probed and patched like the policy.
    `seed` initializes the head without using the global random state.
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

    @property
    def value_head(self) -> nn.Linear:
        """The head, by the name that instruments read from a policy."""
        return self.head

    def token_scores(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq"]:
        """Score the text up to each token. The padding may be on either side."""

        def run(tokens: Int[Tensor, "batch seq"]) -> tuple[Float[Tensor, "batch seq"]]:
            normalized = normalized_residual(self.base_model, tokens)
            return (einops.rearrange(self.head(normalized), "batch seq 1 -> batch seq"),)

        return run_left_padded(run, input_ids, attention_mask)[0]

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """Return the score of each row at its last real token, before normalization."""
        scores = self.token_scores(input_ids, attention_mask)
        if attention_mask is None:
            return scores[:, -1]
        if not attention_mask.any(1).all():
            raise ValueError("attention_mask has a row without a real token. Remove the row.")
        return scores[last_token_mask(attention_mask)]

    def normalize(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Subtract the mean of the training texts and divide by their standard deviation."""
        return (scores - self.mean) / self.std

    def set_normalization(self, scores: Float[Tensor, " batch"]) -> None:
        """Set mean and standard deviation from scores, in place."""
        self.mean.copy_(scores.mean())
        self.std.copy_(scores.std(correction=0).clamp_min(1e-6))

    def encode(
        self, texts: Sequence[str]
    ) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """Tokenize texts with BOS and EOS if the tokenizer has them; return ids and mask.

        Texts are truncated to the context before EOS and padded on the right.
        """
        tokenizer = self.base_model.tokenizer
        rows = tokenize_prompts(tokenizer, texts, tokenizer.bos_token_id is not None)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        room = self.base_model.cfg.n_ctx - len(end)
        return pad_rows([row[:room] + end for row in rows], next(self.parameters()).device)

    @torch.no_grad()
    def score(self, texts: Sequence[str], batch_size: int = 128) -> Float[Tensor, " batch"]:
        """Score texts in batches, before normalization."""
        chunks = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
        scores = [self(*self.encode(chunk)) for chunk in chunks]
        return torch.cat([torch.empty(0, device=self.mean.device), *scores])

    def save(self, out: str | Path, base_model: str, notes: dict[str, Any]) -> None:
        """Write a new Hugging Face directory with the head, the normalization and notes.

        Args:
            base_model: the name that the language model was loaded from.
            notes: training settings and accuracy, for reward_model.json.
        """
        with new_directory(expand_home(out), self) as partial:
            write_language_model(self.base_model, base_model, partial)
            save_file({k: v.cpu() for k, v in self._head_state().items()}, partial / HEAD_FILE)
            text = json.dumps(notes, indent=2) + "\n"
            (partial / NOTES_FILE).write_text(text, encoding="utf-8")

    def _head_state(self) -> dict[str, Tensor]:
        return {"head.weight": self.head.weight.detach(), "mean": self.mean, "std": self.std}

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device = "cpu") -> "RewardModel":
        """Load a reward model that `save` wrote, without gradients. Raise LoadError otherwise."""
        path = expand_home(directory) / HEAD_FILE
        if not path.is_file():
            problem = f"{str(directory)!r} is not a reward model: there is no {path.absolute()}"
            raise LoadError(f"{problem}. Train one with `train-reward`.")
        model = cls(load_model(str(directory), device=device))
        try:
            tensors = load_file(path)
            for name, value in model._head_state().items():
                stored = tensors[name]
                is_float = stored.is_floating_point() and stored.isfinite().all()
                fits = is_float and stored.shape == value.shape
                if not fits or (name == "std" and stored <= 0):
                    raise ValueError(f"its {name} does not fit")
                value.copy_(stored)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise LoadError(f"{path} is corrupt ({error}). Train the model again.") from None
        return model.requires_grad_(False).eval()


def validate_language_model(name: str) -> None:
    """Raise LoadError if a directory is a reward model, which cannot generate text."""
    if (expand_home(name) / HEAD_FILE).is_file():
        raise LoadError(
            f"{name!r} is a reward model, whose transformer no longer generates text. Use the "
            "language model that it was trained from, or pass it as reward_model."
        )


class LearnedReward:
    """The normalized score of each text by a reward model; a `reward_fn`.

    Args:
        model: a trained reward model, or its directory, which is loaded to `device`.
    """

    def __init__(
        self,
        model: RewardModel | str | Path,
        device: str | torch.device = "cpu",
        batch_size: int = 128,
    ) -> None:
        self.model = model if isinstance(model, RewardModel) else RewardModel.load(model, device)
        self.batch_size = batch_size

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """Return scores of mean 0 and variance 1 over the training texts."""
        return self.model.normalize(self.model.score(texts, self.batch_size))


def add_critic_from_reward_model(
    policy: TransformerWithValueHead, directory: str | Path
) -> TransformerWithCritic:
    """Add a critic whose value of a text so far is its normalized score by a reward model.

    1. Use the reward model's transformer as the critic, to be trained.
    2. Fold its head and its normalization into the value head: (w x - mean) / std.

    Raises:
        LoadError: If the directory is not a reward model.
        ConfigError: If its tokens differ from the policy's.

    Source: the value model of Stiennon et al. 2020, "Learning to summarize from human feedback".
    """
    model = RewardModel.load(directory, policy.device)
    critic, base = model.base_model.requires_grad_(True), policy.base_model
    if critic.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise ConfigError(
            f"critic_path={str(directory)!r} has other tokens than the policy. Train a reward "
            "model with the tokenizer of base_model."
        )
    head = nn.Linear(model.head.in_features, 1)
    head.weight.data.copy_(model.head.weight / model.std)
    head.bias.data.copy_(-model.mean / model.std)
    return TransformerWithCritic(base, head, critic=critic)


def load_policy_and_critic(
    args: RLHFArgs, device: str | torch.device = "cpu"
) -> TransformerWithValueHead:
    """Load the policy of the settings, with a critic from `critic_path` if it is set."""
    validate_language_model(args.base_model)
    policy = build_policy(args, device)
    if args.critic_path is not None:
        policy = add_critic_from_reward_model(policy, args.critic_path)
    return in_weight_precision(policy, args.weight_precision)
