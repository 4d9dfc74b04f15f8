"""Commands that train models from data: reward model, SFT, DPO, ORPO and KTO.

Settings are the dataclasses that the Python functions take. Modules that need torch are read from
`rlhf_lab`, which imports them when they are used.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

import rlhf_lab
from rlhf_lab.commands import Device
from rlhf_lab.config import AdapterArgs, ChatArgs, RLHFArgs
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss, RewardLoss

REWARD = FitConfig()
SFT = FitConfig(steps=200, batch_size=32, learning_rate=1e-4, held_out=0.1)
PREFERENCES = FitConfig(steps=200, batch_size=32, learning_rate=1e-4)
PairCount = Annotated[int, arg(help="Pairs to make from reel.")]


@dataclass(frozen=True)
class ModelOptions:
    """Options of all commands that train a model from data."""

    out: Path
    """The directory to write, which must not exist."""
    base_model: str = "reel-nano"
    """The model to start from: a bundled name, a Hugging Face directory or a hub id."""
    prompt_column: str | None = None
    """Column of the prompts, which are not learned; `prompt` by default, if it exists."""
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class TuningOptions(ModelOptions):
    """Options that sft, dpo, orpo and kto share."""

    adapters: AdapterArgs
    drift_eval: DriftEvalConfig
    max_tokens: int | None = None
    """Truncate prompt and text to this many tokens; to the model's context by default."""


@dataclass(frozen=True)
class PairOptions:
    """Preference pairs."""

    pairs: str
    """A file or hub:NAME:SPLIT with the columns chosen and rejected; or reel, for pairs of Reel
    reviews compared by their true reward.
    """
    n_pairs: PairCount = 10_000


def train_reward(
    loss: RewardLoss, model: ModelOptions, pairs: PairOptions, fitting: FitConfig = REWARD
) -> int:
    """Train a reward model on preference pairs and measure it on held-out pairs."""
    rewards, fit, column = rlhf_lab.rewards, fitting, model.prompt_column
    place = prepare(model.out, model.device, pairs.pairs, pairs.n_pairs)
    data = rewards.load_pairs(pairs.pairs, pairs.n_pairs, fit.seed, column, loss.margin > 0)
    print_line(f"{len(data)} pairs from {pairs.pairs}; loading {model.base_model}")
    base = rlhf_lab.models.load_model(model.base_model, device=place)
    reward_model = rewards.RewardModel(base, fit.seed)
    fitted = rlhf_lab.tuning.train_reward_model(reward_model, data, fit, loss)
    notes = {"pairs": Path(pairs.pairs).name, **fitted.to_dict()}
    reward_model.save(model.out, model.base_model, notes)
    print_line("\n".join([*fitted.summary(), f"written to {model.out}"]))
    return 0


def sft(
    texts: str,
    tuning: TuningOptions,
    chat: ChatArgs,
    column: str = "text",
    n_texts: int = 10_000,
    fitting: FitConfig = SFT,
) -> int:
    """Fine-tune a model on texts, or with --chat on the last response of each conversation.

    Args:
        texts: A file with the column --column, a text file with one text per line, or
            hub:NAME:SPLIT; or reel, for reviews from the grammar.
        column: Column of the texts; with --chat, of lists of messages that end with a response,
            or of responses.
        n_texts: Texts to take from reel.
    """
    library, prompts = rlhf_lab.tuning, tuning.prompt_column
    RLHFArgs(**asdict(chat))  # validates their combination
    load = lambda: library.load_examples(texts, n_texts, fitting.seed, column, prompts)
    if chat.chat:
        load = lambda: library.read_conversations(texts, column, prompts, chat.system_prompt)
    notes = {"method": "sft", "texts": texts} | asdict(chat)
    return _tune(notes, load, library.fine_tune, tuning, fitting, n_texts)


def dpo(
    pairs: PairOptions, loss: DPOLoss, tuning: TuningOptions, fitting: FitConfig = PREFERENCES
) -> int:
    """Tune a model on preference pairs without a reward model and measure it on held-out pairs. The
    base model is the reference.
    """
    return _tune_on_pairs("dpo", pairs, loss, tuning, fitting)


def orpo(
    pairs: PairOptions, loss: ORPOLoss, tuning: TuningOptions, fitting: FitConfig = PREFERENCES
) -> int:
    """Fine-tune a model on the chosen texts of preference pairs and away from the rejected ones,
    without a reference. With --samples 0, no copy of the base model is loaded.
    """
    return _tune_on_pairs("orpo", pairs, loss, tuning, fitting)


def _tune_on_pairs(
    method: str, pairs: PairOptions, loss: Any, tuning: TuningOptions, fitting: FitConfig
) -> int:
    n, seed, column = pairs.n_pairs, fitting.seed, tuning.prompt_column
    load = lambda: rlhf_lab.rewards.load_pairs(pairs.pairs, n, seed, column)
    tune = partial(rlhf_lab.tuning.train_on_pairs, loss=loss)
    return _tune({"method": method, "pairs": pairs.pairs}, load, tune, tuning, fitting, n)


def kto(
    examples: str,
    loss: KTOLoss,
    tuning: TuningOptions,
    n_pairs: PairCount = 10_000,
    fitting: FitConfig = PREFERENCES,
) -> int:
    """Tune a model on texts labeled good or bad and measure it on held-out texts. The base model
    is the reference.

    Args:
        examples: A file or hub:NAME:SPLIT with the columns label (good or bad, true or false, 1 or
            0) and response or completion; a source of --pairs, whose pairs are split.
    """
    source = examples, n_pairs, fitting.seed, tuning.prompt_column
    load = lambda: rlhf_lab.tuning.load_labeled_examples(*source)
    tune = partial(rlhf_lab.tuning.train_on_labels, loss=loss)
    return _tune({"method": "kto", "examples": examples}, load, tune, tuning, fitting, n_pairs)


def prepare(out: Path, device: str = "auto", source: str = "reel", n: int = 10_000) -> Any:
    """Validate a new directory and the number of rows of a source, and return the device."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rlhf_lab.models.export.validate_new_directory(out)
    if source != "reel" and n != 10_000:
        raise ConfigError(f"{source!r} is read whole, not {n} rows. Omit --n-texts or --n-pairs.")
    return rlhf_lab.models.device.pick_device(device)


def _tune(
    notes: dict[str, Any],
    load: Callable[[], Any],
    tune: Callable[..., Any],
    tuning: TuningOptions,
    fitting: FitConfig,
    n: int,
) -> int:
    """Load data and a model, tune the model, and write it with its metadata, `notes`."""
    RLHFArgs(**asdict(tuning.adapters))  # validates their combination
    kind, source = list(notes.items())[1]
    place = prepare(tuning.out, tuning.device, source, n)
    rlhf_lab.rewards.model.validate_language_model(tuning.base_model)
    data = load()
    n = tuning.drift_eval.samples
    print_line(f"{len(data)} {kind} from {source}; loading {tuning.base_model}, KL on {n} samples")
    make_model = rlhf_lab.models.build.load_with_adapters
    model = make_model(tuning.base_model, tuning.adapters, place, fitting.seed)
    if notes.get("chat"):
        data = rlhf_lab.tuning.render_examples(model.tokenizer, data)
    more = {"max_tokens": tuning.max_tokens, "drift_eval": tuning.drift_eval}
    is_reel = source == rlhf_lab.rewards.pairs.REEL
    true_reward_fn = rlhf_lab.organism.REWARDS["true_reward"] if is_reel else None
    fitted = tune(model, data, fitting, true_reward_fn=true_reward_fn, **more)
    notes |= {kind: Path(source).name} | asdict(tuning.adapters)
    written = write_tuned(model, tuning.base_model, tuning.out, fitted, notes)
    print_line(f"{written}; continue with: python -m rlhf_lab train --base-model {tuning.out}")
    return 0


def write_tuned(model: Any, base_model: str, out: Path, fitted: Any, notes: dict[str, Any]) -> str:
    """Print the results of tuning, write the model with its metadata and card; return a report."""
    results = fitted.summary()
    print_line("\n".join(results))
    notes |= {"base_model": base_model, **fitted.to_dict()}
    out, gap = rlhf_lab.models.export.export_language_model(model, base_model, out, notes)
    rlhf_lab.training.model_card.write_card(out, notes, results)
    return format_written(out, gap)


def format_written(out: Path, gap: Any) -> str:
    """Format where a model is and its log-prob gap, a `LogprobGap`, after reloading."""
    exactly = f"its log-probs differ by at most {gap.weighed:.1g} nats, weighed by probability"
    return f"written to {out}; reloaded with transformers, {exactly}"
