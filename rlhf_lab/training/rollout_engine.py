"""Rollout engine: generates responses instead of the built-in sampler, such as vLLM.

Values and the log-probs that learning starts from are the policy's, from one more forward pass; the
engine's log-probs, if it returns them, measure and correct the mismatch between the two.
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
    """Token ids of each response with its stop token and, optionally, data of each token.

    `logprobs` are those of the distribution that was sampled from (temperature and truncation
    applied); `support` has the ids that top-k and top-p left.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None
    support: list[list[list[int]]] | None = None


class RolloutEngine(Protocol):
    """Generates responses. An engine that returns the support sets `returns_support = True`."""

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
        output = output if isinstance(output, EngineOutput) else EngineOutput(output)
        if self.args.importance_correction != "none" and output.logprobs is None:
            raise RunError(
                f"importance_correction={self.args.importance_correction!r} requires the engine's "
                "log-probs. Return EngineOutput(tokens, logprobs) from write."
            )
        validate_responses(output.tokens, len(prompts), spec.gen_len, model.cfg.d_vocab)
        stops, pad_token = spec.stops(model.tokenizer), model.tokenizer.pad_token_id or 0
        prompt_tokens, prompt_mask = pad_prompts(prompts, pad_token, policy.device)
        check_context(model, prompt_tokens.shape[1], spec.gen_len)
        zeros = torch.zeros(len(prompts), spec.gen_len, device=policy.device)
        generated, engine_logprobs = zeros.long(), zeros.clone()
        for row, tokens in enumerate(output.tokens):
            generated[row, : len(tokens)] = torch.tensor(tokens)
            if output.logprobs is not None:
                engine_logprobs[row, : len(tokens)] = torch.tensor(output.logprobs[row])
        lengths = torch.tensor([len(tokens) for tokens in output.tokens], device=policy.device)
        mask = torch.arange(spec.gen_len, device=policy.device) < lengths[:, None]
        mask &= response_mask(generated, stops)
        generated = truncate_at_stop(generated, stops, pad_token)
        samples = Samples(
            torch.cat([prompt_tokens, generated], 1),
            prompt_mask,
            mask,
            logprobs=zeros,
            values=zeros.clone(),
            support=to_support(output.support, generated) if spec.truncates else None,
            engine_logprobs=None if output.logprobs is None else engine_logprobs * mask,
        )
        for rows in torch.arange(len(prompts), device=policy.device).split(rows_at_once):
            part = samples[rows]
            inputs = part.tokens, part.prefix_len, spec.temperature
            options = {"attention_mask": part.attention_mask, "support": part.support}
            found = run_policy(policy, *inputs, **options, forward=forward)
            samples.logprobs[rows] = found.logprobs.masked_fill(~part.mask, 0.0)
            samples.values[rows] = found.values.masked_fill(~part.mask, 0.0)
        return samples

    def _load(self, policy: TransformerWithValueHead) -> None:
        if has_hooks(policy):
            warnings.warn(
                "the policy's hooks do not run in rollout_engine. Remove them, or use the built-in "
                "sampler.",
                stacklevel=2,
            )
        if self._original is None:
            name = self.args.base_model
            self._original = load_pretrained_model(AutoModelForCausalLM, name, "language model")
        model = to_hugging_face(policy.base_model, self._original)
        self.engine.load(iter(model.named_parameters()))
        self.is_current = True


def validate_responses(rows: Sequence[Any], n_prompts: int, gen_len: int, d_vocab: int) -> None:
    """Raise RunError unless there is a valid response to each prompt."""
    if len(rows) != n_prompts:
        raise RunError(f"rollout_engine returned {len(rows)} responses to {n_prompts} prompts.")
    for row, ids in enumerate(rows):
        if not 1 <= len(ids) <= gen_len or not all(0 <= token < d_vocab for token in ids):
            raise RunError(
                f"rollout_engine returned {ids!r:.60} for prompt {row}. Return 1 to "
                f"gen_len={gen_len} token ids below {d_vocab}, the policy's vocabulary size."
            )


def to_support(rows: Sequence[Sequence[Sequence[int]]], generated: Tensor) -> Support:
    """Pad the support of each token; after a response, it is the padding token alone."""
    width = max(len(ids) for row in rows for ids in row)
    tokens = generated[..., None].repeat(1, 1, width)
    kept = torch.zeros_like(tokens, dtype=torch.bool)
    kept[..., 0] = True
    for row, steps in enumerate(rows):
        for position, ids in enumerate(steps):
            tokens[row, position, : len(ids)] = tokens.new_tensor(ids)
            kept[row, position] = torch.arange(width, device=kept.device) < len(ids)
    return Support(tokens, kept)
