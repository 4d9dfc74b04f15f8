"""Rollout engine: what writes the responses in place of the built-in sampler, such as vLLM.

It is an extension point of two methods, `load` and `write`; docs/parallel.md has an example. It
gives tokens only: log-probabilities and values are always the policy's own, of one more forward, so
that the ratio of the first minibatch is 1 whatever the engine computes in.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import response_mask, truncate_at_stop
from rlhf_lab.models import Forward, TransformerWithValueHead, run_policy
from rlhf_lab.models.export import to_hugging_face
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.models.load import load_pretrained_model
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.samples import Samples, Support
from rlhf_lab.sampling import SamplingSpec, check_context, pad_prompts


class RolloutEngine(Protocol):
    """What writes responses. One with top-k or top-p also has `returns_support = True`."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, under the names that transformers has for them.

        Called before the first `write`, and before the first after each learning phase. Embedding
        and unembedding are two tensors, as in what `export` writes.
        """

    def write(
        self, prompts: list[list[int]], spec: SamplingSpec, seed: int
    ) -> list[list[int]] | tuple[list[list[int]], list[list[list[int]]]]:
        """The token ids of a response to each prompt, its stop token included.

        With `returns_support`, also, for each of these tokens, the ids that top-k and top-p left.

        Args:
            spec: length, temperature, truncation, and what ends a response.
            seed: of this call; another one for each process and phase.
        """


class EngineSampler:
    """Samples whose tokens are an engine's, with the policy's log-probabilities and values.

    Args:
        engine: a `RolloutEngine`.
        base_model: what the policy was loaded from, which knows transformers' names.

    Raises:
        ConfigError: the engine lacks a method.
    """

    def __init__(self, engine: Any, base_model: str) -> None:
        missing = [name for name in ("load", "write") if not callable(getattr(engine, name, None))]
        if missing:
            raise ConfigError(
                f"rollout_engine={engine!r:.60} has no method {missing[0]}; see "
                "rlhf_lab.training.rollout_engine.RolloutEngine."
            )
        self.engine, self.base_model = engine, base_model
        self.is_current = self._has_warned = False
        self._original: PreTrainedModel | None = None

    def writes(self, spec: SamplingSpec) -> bool:
        """Whether the engine can write by a spec; what a truncated one leaves has to be known."""
        return not spec.truncates or getattr(self.engine, "returns_support", False)

    def refuse(self, spec: SamplingSpec) -> None:
        """Raise ConfigError for a run whose spec the engine cannot write by."""
        if not self.writes(spec):
            raise ConfigError(
                f"top_k={spec.top_k} and top_p={spec.top_p} leave tokens that rollout_engine does "
                "not tell; set both to None, or let the engine return them (returns_support)."
            )

    @torch.no_grad()
    def sample(
        self,
        policy: TransformerWithValueHead,
        prompts: Sequence[Sequence[int]],
        spec: SamplingSpec,
        seed: int,
        forward: Forward,
        rows_at_once: int,
    ) -> Samples:
        """What `sampling.sample` gives, written by the engine.

        1. Load the policy's weights into the engine, if they have changed.
        2. Let it write, and refuse what cannot be a response.
        3. Run the policy over the texts, some rows at a time.

        Raises:
            RunError: a response is missing, empty, too long, or has tokens that there are not.
        """
        self._load(policy)
        prompts = [list(prompt) for prompt in prompts]
        written, kept = self.engine.write(prompts, spec, seed), None
        if getattr(self.engine, "returns_support", False):
            written, kept = written
        d_vocab = policy.base_model.cfg.d_vocab
        _refuse_others(written, len(prompts), spec.gen_len, d_vocab)
        tokenizer = policy.base_model.tokenizer
        stops = spec.stops(tokenizer)
        pad_token = tokenizer.pad_token_id or 0
        prompt_tokens, prompt_mask = pad_prompts(prompts, pad_token, policy.device)
        check_context(policy.base_model, prompt_tokens.shape[1], spec.gen_len)
        generated, mask = _to_length(written, spec.gen_len, policy.device)
        mask &= response_mask(generated, stops)
        generated = truncate_at_stop(generated, stops, pad_token)
        tokens = torch.cat([prompt_tokens, generated], 1)
        support = None if kept is None or not spec.truncates else _support(kept, generated)
        attention_mask = torch.cat([prompt_mask, torch.ones_like(mask)], 1)
        outputs = [
            run_policy(
                policy,
                tokens[rows],
                prompt_tokens.shape[1],
                spec.temperature,
                attention_mask=attention_mask[rows],
                support=None if support is None else support[rows],
                forward=forward,
            )
            for rows in torch.arange(len(tokens), device=policy.device).split(rows_at_once)
        ]
        logprobs, values = (torch.cat([getattr(x, name) for x in outputs]) for name in _NOTED)
        return Samples(
            tokens,
            prompt_mask,
            mask,
            logprobs.masked_fill(~mask, 0.0),
            values.masked_fill(~mask, 0.0),
            support,
        )

    def _load(self, policy: TransformerWithValueHead) -> None:
        """Give the engine the weights as they are now, unless it has them."""
        if has_hooks(policy) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the policy has hooks, which do not run in rollout_engine: what it writes is "
                "without them, and its log-probabilities are with them.",
                stacklevel=2,
            )
        if self.is_current:
            return
        if self._original is None:
            name = self.base_model
            self._original = load_pretrained_model(AutoModelForCausalLM, name, "language model")
        self.engine.load(
            iter(to_hugging_face(policy.base_model, self._original).named_parameters())
        )
        self.is_current = True


_NOTED = ("logprobs", "values")
"""What is noted of each token beside its id."""


def _refuse_others(written: Any, n_rows: int, gen_len: int, d_vocab: int) -> None:
    """Raise RunError for what are no responses."""
    if len(written) != n_rows:
        raise RunError(f"rollout_engine wrote {len(written)} responses to {n_rows} prompts.")
    for row, tokens in enumerate(written):
        if not 1 <= len(tokens) <= gen_len:
            raise RunError(
                f"rollout_engine wrote {len(tokens)} tokens to prompt {row}, and a response has 1 "
                f"to gen_len={gen_len}; let it stop at spec.gen_len."
            )
        if not all(0 <= token < d_vocab for token in tokens):
            raise RunError(
                f"rollout_engine wrote a token to prompt {row} that is none of the {d_vocab} of "
                "the policy; give it the policy's tokenizer."
            )


def _to_length(
    written: Sequence[Sequence[int]], gen_len: int, device: torch.device
) -> tuple[Int[Tensor, "batch gen"], Bool[Tensor, "batch gen"]]:
    """Responses as rows of one length, and where they have tokens."""
    tokens, mask = pad_rows([list(row) for row in written], device)
    gap = (0, gen_len - tokens.shape[1])
    return torch.nn.functional.pad(tokens, gap), torch.nn.functional.pad(mask.bool(), gap)


def _support(
    kept: Sequence[Sequence[Sequence[int]]], generated: Int[Tensor, "batch gen"]
) -> Support:
    """What truncation left at each step; after a response, the token that stands there.

    Raises:
        RunError: a token that was written is not among them.
    """
    batch, gen_len = generated.shape
    width = max(len(step) for row in kept for step in row)
    tokens = generated[..., None].repeat(1, 1, width)
    is_kept = torch.zeros_like(tokens, dtype=torch.bool)
    is_kept[..., 0] = True
    for row, steps in enumerate(kept):
        for place, step in enumerate(steps):
            if int(generated[row, place]) not in step:
                raise RunError(
                    f"rollout_engine wrote a token to prompt {row}, as number {place}, that is not "
                    "among those that it says truncation left."
                )
            tokens[row, place, : len(step)] = tokens.new_tensor(step)
            is_kept[row, place] = torch.arange(width, device=tokens.device) < len(step)
    return Support(tokens, is_kept)
