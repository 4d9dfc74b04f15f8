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

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import response_mask, truncate_at_stop
from rlhf_lab.models import Forward, TransformerWithValueHead, run_policy
from rlhf_lab.models.export import to_hugging_face
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.models.load import load_pretrained_model
from rlhf_lab.samples import Samples, Support
from rlhf_lab.sampling import SamplingSpec, check_context, pad_prompts


class EngineOutput(NamedTuple):
    """Token ids of each response, stop token included; optionally log-probs and support per token.

    The log-probs are of the distribution that was sampled from, the support is what top-k and top-p
    left of it.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None
    support: list[list[list[int]]] | None = None


class RolloutEngine(Protocol):
    """Generates responses; sets `returns_support = True` if it returns the support."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, under transformers' names, with an untied unembedding."""

    def write(self, prompts: list[list[int]], spec: SamplingSpec, seed: int) -> EngineOutput:
        """Generate a response to each prompt; `seed` differs between processes and phases."""


class EngineSampler:
    """Samples of an engine, with the policy's log-probs and values."""

    def __init__(self, engine: Any, args: RLHFArgs, spec: SamplingSpec) -> None:
        if not all(callable(getattr(engine, name, None)) for name in ("load", "write")):
            raise ConfigError(f"rollout_engine={engine!r:.60} must have methods load and write.")
        self.engine, self.args, self.is_current = engine, args, False
        self._original: Any = None
        if not self.supports(spec):
            raise ConfigError(
                "top_k and top_p require an engine that returns the support. Set both to None, or "
                "set returns_support=True in the engine and return EngineOutput.support."
            )

    def supports(self, spec: SamplingSpec) -> bool:
        """Return True if the engine can sample by this spec."""
        return not spec.truncates or getattr(self.engine, "returns_support", False)

    def _load(self, policy: TransformerWithValueHead) -> None:
        if has_hooks(policy):
            warnings.warn("the policy's hooks do not run in rollout_engine.", stacklevel=2)
        if self._original is None:
            name = self.args.base_model
            self._original = load_pretrained_model(AutoModelForCausalLM, name, "language model")
        self.engine.load(to_hugging_face(policy.base_model, self._original).named_parameters())
        self.is_current = True

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
        """Load changed weights, generate responses, and run the policy on them in parts."""
        if not self.is_current:
            self._load(policy)
        output, model = self.engine.write(list(map(list, prompts)), spec, seed), policy.base_model
        rows, logprobs, support = (
            output if isinstance(output, EngineOutput) else (output, None, None)
        )
        if self.args.importance_correction != "none" and logprobs is None:
            raise RunError(
                f"importance_correction={self.args.importance_correction!r} requires the engine's "
                "log-probs. Return EngineOutput(tokens, logprobs) from write."
            )
        limits = range(1, spec.gen_len + 1), range(model.cfg.d_vocab)
        valid = [len(row) in limits[0] and all(token in limits[1] for token in row) for row in rows]
        if len(rows) != len(prompts) or not all(valid):
            raise RunError(
                f"rollout_engine returned {rows!r:.200}. Return {len(prompts)} responses of 1 to "
                f"gen_len={spec.gen_len} token ids below {model.cfg.d_vocab}."
            )
        stops, pad_token = spec.stops(model.tokenizer), model.tokenizer.pad_token_id or 0
        prompt_tokens, prompt_mask = pad_prompts(prompts, pad_token, policy.device)
        check_context(model, prompt_tokens.shape[1], spec.gen_len)
        generated = pad_to(rows, spec.gen_len, 0).to(policy.device)
        mask = pad_to([[True] * len(row) for row in rows], spec.gen_len, False).to(policy.device)
        mask &= response_mask(generated, stops)
        generated = truncate_at_stop(generated, stops, pad_token)
        if logprobs is not None:
            logprobs = pad_to(logprobs, spec.gen_len, 0.0).to(policy.device) * mask
        samples = Samples(
            torch.cat([prompt_tokens, generated], 1),
            prompt_mask,
            mask,
            logprobs=torch.zeros_like(mask, dtype=torch.float32),
            values=torch.zeros_like(mask, dtype=torch.float32),
            support=to_support(support, generated) if spec.truncates else None,
            engine_logprobs=logprobs,
        )
        for part_rows in torch.arange(len(rows), device=policy.device).split(rows_at_once):
            part = samples[part_rows]
            inputs = part.tokens, part.prefix_len, spec.temperature
            options = {"attention_mask": part.attention_mask, "support": part.support}
            found = run_policy(policy, *inputs, **options, forward=forward)
            samples.logprobs[part_rows] = found.logprobs.masked_fill(~part.mask, 0.0)
            samples.values[part_rows] = found.values.masked_fill(~part.mask, 0.0)
        return samples


def pad_to(rows: Sequence[Sequence[Any]], length: int, value: Any) -> Tensor:
    """Return rows as one tensor, padded on the right."""
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def to_support(rows: Sequence[Sequence[Sequence[int]]], generated: Tensor) -> Support:
    """Pad the support of each token; after a response, it is the padding token alone."""
    width = max(len(ids) for row in rows for ids in row)
    none = [-1] * width
    padded = [[[*ids, *none][:width] for ids in row] for row in rows]
    tokens = pad_to(padded, generated.shape[1], none).to(generated.device)
    kept = tokens >= 0
    kept[..., 0] = True
    return Support(tokens.where(tokens >= 0, generated[..., None]), kept)
