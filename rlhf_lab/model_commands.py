"""Commands that make models: reward model, export; and where data and models are.

Settings are the dataclasses that the Python functions take; what needs torch is imported late.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from rlhf_lab.commands import Checkpoint, Device, RunDirectory
from rlhf_lab.console import print_line
from rlhf_lab.fitting import Fitting, RewardLoss

REWARD = Fitting()


@dataclass(frozen=True)
class PairSource:
    """Where preference pairs come from.

    Args:
        pairs: A .jsonl or .csv file with the columns chosen and rejected, or hub:NAME:SPLIT for a
            dataset with them; reel, for pairs of Reel reviews judged by a rater who knows the
            truth; or movie-reviews, for pairs of real reviews of which one is positive.
        n_pairs: Pairs to make, for --pairs reel and movie-reviews.
        prompt_column: The column of what stands before both texts of a pair; they are whole when
            not given.
    """

    pairs: str
    n_pairs: int = 10_000
    prompt_column: str | None = None


@dataclass(frozen=True)
class ModelPlace:
    """What is trained, and where it goes.

    Args:
        out: The directory to write, which does not exist yet; what --base-model takes, or
            --reward-model for a reward model.
        base_model: The language model to start from: a bundled name, a Hugging Face directory or a
            hub id.
    """

    out: Path
    base_model: str = "reel-nano"
    device: Device = "auto"


def train_reward(
    source: PairSource, place: ModelPlace, loss: RewardLoss, fitting: Fitting = REWARD
) -> int:
    """Train a reward model on preference pairs, and measure it on pairs that were held out."""
    from rlhf_lab.models import load_model
    from rlhf_lab.rewards import RewardModel, load_pairs, train_reward_model

    device = prepare(place.out, place.device)
    with_margins = loss.margin > 0
    pairs = load_pairs(
        source.pairs, source.n_pairs, fitting.seed, source.prompt_column, with_margins
    )
    print_line(f"{len(pairs)} pairs from {source.pairs}; loading {place.base_model}")
    model = RewardModel(load_model(place.base_model, device=device), fitting.seed)
    fitted = train_reward_model(model, pairs, fitting, loss)
    notes = {"pairs": Path(source.pairs).name, **fitted.to_dict()}
    model.save(place.out, place.base_model, notes)
    print_line("\n".join([*fitted.summary(), f"written to {place.out}"]))
    return 0


def prepare(out: Path, device: str = "auto") -> Any:
    """Refuse an occupied directory before anything is loaded; gives the device."""
    from transformers.utils.logging import disable_progress_bar

    from rlhf_lab.models.device import pick_device
    from rlhf_lab.models.export import validate_new_directory

    disable_progress_bar()
    validate_new_directory(out)
    return pick_device(device)


def export(
    directory: RunDirectory,
    out: Positional[Path],
    checkpoint: Checkpoint = "last",
    adapter: FlagCreatePairsOff[bool] = False,
) -> int:
    """Write a run's policy as a Hugging Face model, with its value head beside it, and check it.

    Args:
        out: The directory to write, which does not exist yet.
        adapter: Write the LoRA adapters alone, in PEFT's format, without the model below them and
            the value head.
    """
    from rlhf_lab.models import export_adapter, export_policy
    from rlhf_lab.training import RunDir
    from rlhf_lab.training.model_card import write_run_card
    from rlhf_lab.training.restore import checkpoint_name, load_policy

    prepare(out)
    policy, args = load_policy(directory, checkpoint)
    if adapter:
        gap = export_adapter(policy.base_model, args.base_model, out)
        exactly = f"read back, log-probs differ by at most {gap.weighed:.1g} nats"
        print_line(f"written to {out} in PEFT's format for {args.base_model}; {exactly}")
        return 0
    out, gap = export_policy(policy, args.base_model, out)
    write_run_card(RunDir.open(directory), out, checkpoint_name(checkpoint))
    print_line(written(out, gap))
    return 0


def written(out: Path, gap: Any) -> str:
    """Format where a model is and its log-prob gap, a `LogprobGap`, after reloading."""
    exactly = f"its log-probs differ by at most {gap.weighed:.1g} nats, weighed by probability"
    return f"written to {out}; reloaded with transformers, {exactly}"
