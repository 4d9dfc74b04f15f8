"""Rollout engine: generates responses instead of the built-in sampler, such as vLLM.

Values and the log-probs that learning starts from are the policy's; the engine's log-probs, if it
returns them, measure and correct the mismatch between the two.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models.export import to_hugging_face
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.models.load import load_pretrained_model
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.samples import Samples
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.rollout import score_tokens


class EngineOutput(NamedTuple):
    """Responses, with stop tokens, and optionally the log-prob of each token."""

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None  # under the distribution that was sampled from


class RolloutEngine(Protocol):
    """Generates responses by temperature, without top-k and top-p."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, under transformers' names, with an untied unembedding."""

    def write(self, prompts: list[list[int]], spec: SamplingSpec, seed: int) -> EngineOutput:
        """Generate a response to each prompt; `seed` differs between processes and phases."""


class EngineSampler:
    """Samples of an engine, with the policy's log-probs and values."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        self.trainer, self.engine, self.is_current = trainer, engine, False
        if trainer.sampling_spec.truncates:
            raise ConfigError(
                "top_k and top_p cannot be combined with a rollout_engine, which does not return "
                "the tokens that they left. Set both to None."
            )
        name = trainer.args.base_model
        self._original = load_pretrained_model(AutoModelForCausalLM, name, "language model")

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, seed: int) -> Samples:
        """Load changed weights, generate responses, and run the policy on them in parts."""
        policy, tokenizer, gen_len = self.trainer.policy, self.trainer.tokenizer, spec.gen_len
        if not self.is_current:
            if has_hooks(policy):
                warnings.warn("the policy's hooks do not run in rollout_engine.", stacklevel=2)
            self.engine.load(to_hugging_face(policy.base_model, self._original).named_parameters())
            self.is_current = True
        output = self.engine.write(list(map(list, prompts)), spec, seed)
        output = EngineOutput(*([output] if isinstance(output, list) else output))
        sizes, d_vocab = list(map(len, output.tokens)), policy.base_model.cfg.d_vocab
        is_valid = len(sizes) == len(prompts) and 0 < min(sizes) <= max(sizes) <= gen_len
        is_valid &= all(0 <= token < d_vocab for row in output.tokens for token in row)
        rows = zip(prompts, output.tokens, strict=False)
        is_valid &= not all(response[: len(prompt)] == list(prompt) for prompt, response in rows)
        if output.logprobs is not None or self.trainer.args.importance_correction != "none":
            is_valid &= list(map(len, output.logprobs or ())) == sizes
            is_valid &= all(x < 1e-3 for row in output.logprobs or () for x in row)
        if not is_valid:
            raise RunError(
                f"rollout_engine returned {output!r:.300}. Return {len(prompts)} responses of 1 to "
                f"{gen_len} token ids below {d_vocab}, without their prompts, and for each token a "
                "log-probability (importance_correction requires it)."
            )
        stops, pad_token = spec.stops(tokenizer), tokenizer.pad_token_id or 0
        ends = [next((t for t, x in enumerate(r, 1) if x in stops), len(r)) for r in output.tokens]

        def pad(rows: Sequence[Sequence[Any]], value: Any) -> Tensor:
            rows = [[*r[:n], *[value] * (gen_len - n)] for r, n in zip(rows, ends, strict=True)]
            return torch.tensor(rows, device=policy.device)

        prompt_tokens, prompt_mask = pad_rows(prompts, policy.device, pad_token, "left")
        tokens = torch.cat([prompt_tokens, pad(output.tokens, pad_token)], 1)
        mask = pad([[True] * end for end in ends], False)
        logprobs = None if output.logprobs is None else pad(output.logprobs, 0.0)
        return score_tokens(self.trainer, tokens, prompt_mask, mask, logprobs)
