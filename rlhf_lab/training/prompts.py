"""Prompts of a run, from a data set or a list, in a seeded order; and the length of responses.

Dynamic sampling (DAPO) replaces prompts whose responses all have the same reward.
"""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.chat import Message, read_turns, render_chat, with_system
from rlhf_lab.config import RLHFArgs
from rlhf_lab.data_sources import read_rows
from rlhf_lab.errors import ConfigError, LoadError, require_list
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.samples import Samples, join_samples
from rlhf_lab.sampling import SamplingSpec, check_context, tokenize_prompts
from rlhf_lab.training.overrides import warn_if_set
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


def load_prompts(
    source: str | Path, column: str = "prompt", words: int | None = None, chat: bool = False
) -> list[Any]:
    """Load the prompts of a source (see `read_rows`): one per line, or those in a column.

    Args:
        column: of .jsonl and .csv files and of datasets.
        words: number of words to keep from the start of each; all if None.
        chat: return conversations: lists of messages, or texts as one turn of the user.
    """
    source, prompts = str(source), []
    for row in read_rows(source, "prompts", lines_as=column):
        value = row.fields.get(column) if isinstance(row.fields, dict) else None
        if not isinstance(value, list):
            text = row.text(column)
            value = text if words is None else " ".join(text.split()[:words])
        elif not chat:
            raise LoadError(
                f"{row.where} has a list under {column!r}. If it contains messages, set chat=True."
            )
        elif words is not None:
            raise LoadError(f"{row.where} has messages. Leave out prompt_words={words}.")
        prompts.append(read_turns(value, row.where, last="user") if chat else value)
    return prompts


def choose_prompts(args: RLHFArgs, given: Sequence[str | list[Message]] | None) -> list[Any]:
    """Return the texts or conversations: given, those of `args.prompts`, or the prefix."""
    if given is not None:
        warn_if_set(args, "prefix prompts", "prompts= is set")
    elif args.prompts is not None:
        warn_if_set(args, "prefix", "prompts is set")
    if given is None and args.prompts is not None:
        prompts = load_prompts(args.prompts, args.prompts_column, args.prompt_words, args.chat)
    else:
        prompts = [args.prefix] if given is None else list(given)
        require_list(given, "prompts=")
        for prompt in [] if args.chat else prompts:
            if not isinstance(prompt, str):
                problem = f"{prompt!r:.60}, which is not a text. Use texts, or set chat=True"
                raise ConfigError(f"prompts contains {problem}.")
        if args.chat:
            numbered = enumerate(prompts, 1)
            prompts = [read_turns(turns, f"prompt {n}", last="user") for n, turns in numbered]
    if not prompts:
        source = args.prompts if given is None else []
        raise ConfigError(f"prompts={source!r} contains no prompt. Add at least one.")
    return [with_system(x, args.system_prompt) for x in prompts] if args.chat else prompts


def deal(n_prompts: int, start: int, count: int, seed: int) -> list[int]:
    """Return `count` prompts from position `start` on, of rounds that each shuffle all prompts."""
    first, skipped = divmod(start, n_prompts)
    rounds = range(first, (start + count - 1) // n_prompts + 1)
    generators = [phase_generator(seed, turn, "prompts") for turn in rounds]
    orders = [torch.randperm(n_prompts, generator=generator) for generator in generators]
    return torch.cat(orders)[skipped : skipped + count].tolist()


class Prompts:
    """A run's prompts as token ids, and which of them each batch continues.

    Attributes:
        texts, tokens: the prompts, in a chat rendered by its template.
        turns: messages of each; None without a chat.
        labels: text after each that a response is compared with; None without labels.
        answers: right answer to each; None without `answers_column`.
        digest: checksum of texts, labels and answers.
    """

    def __init__(
        self, args: RLHFArgs, given: Sequence[str | list[Message]] | None, model: HookedModel
    ) -> None:
        self.args = args
        self.texts, self.turns = choose_prompts(args, given), None
        if args.chat:
            self.turns, n = self.texts, len(self.texts)
            self.texts = [
                render_chat(model.tokenizer, turns, f"prompt {number} of {n}")
                for number, turns in enumerate(self.turns, 1)
            ]
        self.labels = self._column("labels_column", given)
        self.answers = self._column("answers_column", given)
        prepend_bos = args.prepend_bos and not args.chat  # a template has its own
        self.tokens = tokenize_prompts(model.tokenizer, self.texts, prepend_bos)
        if not all(self.tokens):
            raise ConfigError("A prompt has no token. Set a prefix, or prepend_bos=True.")
        if (token := max(map(max, self.tokens))) >= model.cfg.d_vocab:
            raise ConfigError(f"A prompt has the unknown token {token}. Use the model's tokenizer.")
        row = max(range(len(self.tokens)), key=lambda n: len(self.tokens[n]))
        check_context(model, len(self.tokens[row]), args.gen_len, prompt=f"prompt {row + 1}")
        self.digest = zlib.crc32(json.dumps([self.texts, self.labels, self.answers]).encode())

    def _column(self, field: str, given: Sequence[Any] | None) -> list[str] | None:
        column = getattr(self.args, field)
        if column is None:
            return None
        if given is not None:
            raise ConfigError(f"{field}={column!r} needs a file, not passed prompts. Remove it.")
        rows = read_rows(self.args.prompts, "prompts", lines_as=self.args.prompts_column)
        return [row.text(column) for row in rows]

    def of_batch(self, batch: int) -> list[list[int]]:
        """Return the prompt of each row of a batch, counted from 0, grouped by prompt."""
        each = self.args.samples_per_prompt
        return [self.tokens[i] for i in self._indices(batch) for _ in range(each)]

    def replacements_for(self, batch: int) -> Iterator[list[int]]:
        """Yield prompts without end in a seeded order, first those that are not in the batch."""
        generator = phase_generator(self.args.seed, batch, "resampled_prompts")
        order = torch.randperm(len(self.tokens), generator=generator).tolist()
        used = set(self._indices(batch))
        for i in itertools.cycle(sorted(order, key=used.__contains__)):
            yield self.tokens[i]

    def _indices(self, batch: int) -> list[int]:
        n = self.args.batch_size // self.args.samples_per_prompt
        return deal(len(self.tokens), batch * n, n, self.args.seed)


def phase_spec(spec: SamplingSpec, args: RLHFArgs, phase: int) -> SamplingSpec:
    """Return the sampling spec with a phase's number of tokens, drawn with `gen_len_min`."""
    if args.gen_len_min is None:
        return spec
    generator = phase_generator(args.seed, phase, "lengths")
    drawn = torch.randint(args.gen_len_min, spec.gen_len + 1, (), generator=generator)
    return dataclasses.replace(spec, gen_len=int(drawn))


def informative_rollout_phase(trainer: "RLHFTrainer") -> Rollout:
    """Run a rollout phase that resamples up to `args.dynamic_sampling` times.

    Prompts whose responses all have the same raw reward (see `informative_groups`) are replaced by
    others, with new noise, until each is informative or the limit is reached. Penalties and clips
    do not count, as in the paper. Callbacks and reward moments do not see replaced samples. Prompts
    and noise depend on seed, phase and draw only.

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2, which draws without bound.
    """
    args, others = trainer.args, trainer.prompts.replacements_for(trainer.phase)
    samples, rewards, by_name = _sample_and_score(trainer, trainer.next_prompts())
    group = trainer.rewards.groups(samples)
    resampled_prompts, dull = 0, ~F.informative_groups(rewards, group)
    while resampled_prompts < args.dynamic_sampling and dull.any():
        resampled_prompts += 1
        prompts = itertools.islice(others, int(dull.sum()) // args.samples_per_prompt)
        rows = [prompt for prompt in prompts for _ in range(args.samples_per_prompt)]
        fresh, new_rewards, new_by_name = _sample_and_score(trainer, rows, resampled_prompts)
        order = torch.arange(len(dull), device=dull.device)
        order[dull] = len(dull) + torch.arange(len(rows), device=dull.device)
        samples = join_samples([samples, fresh], trainer.tokenizer.pad_token_id or 0)[order]
        rewards = rewards.masked_scatter(dull, new_rewards)
        by_name = {k: v.masked_scatter(dull, new_by_name[k]) for k, v in by_name.items()}
        dull = ~F.informative_groups(rewards, group)
    trainer.emit("after_rollout", samples=samples)
    changes = {"resampled_prompts": resampled_prompts, "rewards_by_name": by_name}
    rollout = dataclasses.replace(score_samples(trainer, samples, rewards), **changes)
    trainer.emit("after_score", samples=samples, rollout=rollout)
    return rollout


def _sample_and_score(
    trainer: "RLHFTrainer", prompts: list[list[int]], draw: int = 0
) -> tuple[Samples, Float[Tensor, " rows"], dict[str, Float[Tensor, " rows"]]]:
    generator = phase_generator(trainer.args.seed, trainer.phase, "sampling", draw)
    samples = trainer.sample(prompts, generator)
    output, device = trainer.rewards.read(trainer.reward_fn, samples), samples.tokens.device
    by_name = {name: rewards.to(device) for name, rewards in output.by_name.items()}
    return samples, output.rewards.to(device), by_name
