"""Rollout engine: generates responses instead of the built-in sampler, such as vLLM.

Values and the log-probs that learning starts from are the policy's; the engine's log-probs, if it
returns them, measure and correct the mismatch between the two.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import response_mask, truncate_at_stop
from rlhf_lab.models import run_policy
from rlhf_lab.models.export import to_hugging_face
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.models.load import load_pretrained_model
from rlhf_lab.samples import Samples, Support
from rlhf_lab.sampling import SamplingSpec, pad_prompts

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


class EngineOutput(NamedTuple):
    """Responses, with stop tokens; optionally log-probs and support of each token."""

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None  # under the distribution that was sampled from
    support: list[list[list[int]]] | None = None  # token ids that top-k and top-p left


class RolloutEngine(Protocol):
    """Generates responses; sets `returns_support = True` if it returns the support."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, under transformers' names, with an untied unembedding."""

    def write(self, prompts: list[list[int]], spec: SamplingSpec, seed: int) -> EngineOutput:
        """Generate a response to each prompt; `seed` differs between processes and phases."""


class EngineSampler:
    """Samples of an engine, with the policy's log-probs and values."""

    def __init__(self, trainer: "RLHFTrainer", engine: Any) -> None:
        self.trainer, self.engine, self.is_current, self._original = trainer, engine, False, None
        if not all(callable(getattr(engine, name, None)) for name in ("load", "write")):
            raise ConfigError(f"rollout_engine={engine!r:.60} must have methods load and write.")
        if not self.supports(trainer.sampling_spec):
            raise ConfigError(
                "top_k and top_p require an engine that returns the support. Set both to None, or "
                "set returns_support=True in the engine and return EngineOutput.support."
            )

    def supports(self, spec: SamplingSpec) -> bool:
        """Return True if the engine can sample by this spec."""
        return not spec.truncates or getattr(self.engine, "returns_support", False)

    def _load(self) -> None:
        if has_hooks(self.trainer.policy):
            warnings.warn("the policy's hooks do not run in rollout_engine.", stacklevel=2)
        model, name = self.trainer.policy.base_model, self.trainer.args.base_model
        if self._original is None:
            self._original = load_pretrained_model(AutoModelForCausalLM, name, "language model")
        self.engine.load(to_hugging_face(model, self._original).named_parameters())
        self.is_current = True

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, seed: int) -> Samples:
        """Load changed weights, generate responses, and run the policy on them in parts."""
        if not self.is_current:
            self._load()
        args, policy, gen_len = self.trainer.args, self.trainer.policy, spec.gen_len
        tokenizer, device = policy.base_model.tokenizer, policy.device
        output = self.engine.write(list(map(list, prompts)), spec, seed)
        rows, logprobs, support = EngineOutput(*([output] if isinstance(output, list) else output))
        if args.importance_correction != "none" and logprobs is None:
            raise RunError(
                f"importance_correction={args.importance_correction!r} requires the engine's "
                "log-probs. Return EngineOutput(tokens, logprobs) from write."
            )
        n_tokens, ids = [len(row) for row in rows], range(policy.base_model.cfg.d_vocab)
        is_valid = len(rows) == len(prompts) and 0 < min(n_tokens) <= max(n_tokens) <= gen_len
        if not is_valid or not all(token in ids for row in rows for token in row):
            raise RunError(
                f"rollout_engine returned {rows!r:.200}. Return {len(prompts)} responses of 1 to "
                f"gen_len={gen_len} token ids below {len(ids)}."
            )
        if logprobs is not None and [len(row) for row in logprobs] != n_tokens:
            raise RunError(
                f"rollout_engine returned {[len(row) for row in logprobs]} log-probs for "
                f"{n_tokens} tokens. Return one for each token."
            )

        def pad(rows: Sequence[Sequence[Any]], value: Any) -> Tensor:
            padded = [[*row, *[value] * (gen_len - len(row))] for row in rows]
            return torch.tensor(padded, device=device)

        stops, pad_token = spec.stops(tokenizer), tokenizer.pad_token_id or 0
        prompt_tokens, prompt_mask = pad_prompts(prompts, pad_token, device)
        generated = pad(rows, 0)
        mask = pad([[True] * n for n in n_tokens], False) & response_mask(generated, stops)
        generated, options = truncate_at_stop(generated, stops, pad_token), {}
        if logprobs is not None:
            options["engine_logprobs"] = pad(logprobs, 0.0) * mask
        options["support"] = None
        if spec.truncates:  # after a response, the padding token alone
            width = max(len(left) for row in support for left in row)
            filled = [[[*left, *[-1] * (width - len(left))] for left in row] for row in support]
            left = pad(filled, [-1] * width)
            kept = left >= 0
            kept[..., 0] = True
            options["support"] = Support(left.where(left >= 0, generated[..., None]), kept)
        tokens, zeros = torch.cat([prompt_tokens, generated], 1), mask.float() * 0
        samples = Samples(tokens, prompt_mask, mask, zeros, zeros.clone(), **options)
        for indices in torch.arange(len(rows), device=device).split(args.rows_at_once):
            part = samples[indices]
            inputs = policy, part.tokens, part.prefix_len, spec.temperature
            options = {"attention_mask": part.attention_mask, "support": part.support}
            found = run_policy(*inputs, **options, forward=self.trainer.forward)
            samples.logprobs[indices] = found.logprobs.masked_fill(~part.mask, 0.0)
            samples.values[indices] = found.values.masked_fill(~part.mask, 0.0)
        return samples
