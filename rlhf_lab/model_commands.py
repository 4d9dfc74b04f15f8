"""Commands that make models: reward model, supervised fine-tuning, DPO, export."""

from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from rlhf_lab.models import (
    export_language_model,
    export_policy,
    load_model,
    load_with_adapters,
)
from rlhf_lab.models.device import pick_device
from rlhf_lab.models.export import refuse_occupied
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import PreferenceFit, RewardModel, load_pairs, train_reward_model
from rlhf_lab.rewards.pairs import REEL
from rlhf_lab.supervised import Fitting
from rlhf_lab.training.model_card import write_run_card, write_tuning_card
from rlhf_lab.training.restore import checkpoint_name, load_policy
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.tuning import (
    DPOFit,
    DPOLoss,
    Drift,
    OwnTexts,
    SFTFit,
    fine_tune,
    load_examples,
    tune_on_pairs,
)


def train_reward(
    pairs: str,
    out: Path,
    base_model: str,
    n_pairs: int,
    prompt_column: str | None,
    seed: int,
    device: str,
    **settings: int | float,
) -> int:
    """Train a reward model, and say how good it is on pairs that it has not seen."""
    disable_progress_bar()
    console = Console()
    refuse_occupied(out)
    place = pick_device(device)
    read = load_pairs(pairs, n_pairs, seed, prompt_column, with_margins=settings["margin"] > 0)
    message = f"{len(read)} pairs from {pairs}; loading {base_model}"
    console.print(message, highlight=False, soft_wrap=True)
    model = RewardModel(load_model(base_model, device=place), seed)
    fitted = train_reward_model(model, read, seed=seed, **settings)
    model.save(out, base_model, {"pairs": Path(pairs).name, **fitted.to_dict()})
    for line in _described(fitted):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"written to {out}", highlight=False, soft_wrap=True)
    return 0


def _described(fitted: PreferenceFit) -> list[str]:
    """The accuracy, and what it can be compared with."""
    return [
        f"loss {fitted.first_loss:.3f} -> {fitted.last_loss:.3f} nats per pair",
        f"accuracy {fitted.accuracy:.3f} on {fitted.held_out_pairs} held-out pairs",
        *_best_judge(fitted),
    ]


def _best_judge(fitted: PreferenceFit | DPOFit) -> list[str]:
    """What an accuracy can be compared with, where the truth is known."""
    if fitted.bayes_accuracy is None:
        return []
    return [
        f"the best possible judge: {fitted.bayes_accuracy:.3f} on average, "
        f"{fitted.gold_accuracy:.3f} on these pairs"
    ]


def sft(
    texts: str,
    out: Path,
    base_model: str,
    column: str,
    prompt_column: str | None,
    n_texts: int,
    max_tokens: int | None,
    samples: int,
    gen_len: int,
    device: str,
    lora: dict[str, Any],
    **settings: int | float,
) -> int:
    """Fine-tune a model on texts, and say what it makes of texts that it has not seen."""
    disable_progress_bar()
    console = Console()
    refuse_occupied(out)
    fitting, place = Fitting(**settings), pick_device(device)
    examples = load_examples(texts, n_texts, fitting.seed, column, prompt_column)
    message = f"{len(examples)} texts from {texts}; loading {base_model}"
    console.print(message, highlight=False, soft_wrap=True)
    model = load_with_adapters(base_model, place, seed=fitting.seed, **lora)
    own_texts = _own_texts(texts, samples, gen_len)
    fitted = fine_tune(model, examples, fitting, max_tokens, own_texts)
    notes = {"method": "sft", "base_model": base_model, "texts": Path(texts).name, **lora}
    return _export_tuned(model, base_model, out, notes | fitted.to_dict(), _sft_lines(fitted))


def dpo(
    pairs: str,
    out: Path,
    base_model: str,
    prompt_column: str | None,
    n_pairs: int,
    max_tokens: int | None,
    beta: float,
    label_smoothing: float,
    kind: Literal["sigmoid", "ipo"],
    samples: int,
    gen_len: int,
    device: str,
    lora: dict[str, Any],
    **settings: int | float,
) -> int:
    """Tune a model on preference pairs, and say how it judges pairs that it has not seen."""
    disable_progress_bar()
    console = Console()
    refuse_occupied(out)
    fitting, loss = Fitting(**settings), DPOLoss(beta, label_smoothing, kind)
    place = pick_device(device)
    read = load_pairs(pairs, n_pairs, fitting.seed, prompt_column)
    message = f"{len(read)} pairs from {pairs}; loading {base_model}"
    console.print(message, highlight=False, soft_wrap=True)
    model = load_with_adapters(base_model, place, seed=fitting.seed, **lora)
    own_texts = _own_texts(pairs, samples, gen_len)
    fitted = tune_on_pairs(model, read, fitting, loss, max_tokens, own_texts)
    notes = {"method": "dpo", "base_model": base_model, "pairs": Path(pairs).name, **lora}
    return _export_tuned(model, base_model, out, notes | fitted.to_dict(), _dpo_lines(fitted))


def _dpo_lines(fitted: DPOFit) -> list[str]:
    """What tuning on preferences came to, and what it can be compared with."""
    return [
        f"loss {fitted.first_loss:.3f} -> {fitted.last_loss:.3f} per pair",
        f"accuracy {fitted.accuracy:.3f} by implicit reward on {fitted.held_out_pairs} held-out "
        "pairs",
        *_best_judge(fitted),
        f"implicit reward {fitted.chosen_reward:+.3f} chosen, {fitted.rejected_reward:+.3f} "
        f"rejected, margin {fitted.margin:.3f}",
        *_drift_lines(fitted.drift),
    ]


def _own_texts(source: str, samples: int, gen_len: int) -> OwnTexts | None:
    """What to measure the drift on; Reel's texts have a true reward."""
    gold_fn = REWARDS["gold"] if source == REEL else None
    return OwnTexts(samples, gen_len, gold_fn) if samples else None


def _sft_lines(fitted: SFTFit) -> list[str]:
    """What fine-tuning came to."""
    return [
        f"loss {fitted.loss_before:.3f} -> {fitted.loss_after:.3f} nats per token on "
        f"{fitted.held_out_texts} held-out texts ({fitted.held_out_tokens} tokens)",
        f"perplexity {fitted.perplexity_before:.2f} -> {fitted.perplexity_after:.2f}",
        *_drift_lines(fitted.drift),
    ]


def _drift_lines(drift: Drift | None) -> list[str]:
    """How far the model has moved on texts of its own, if that was measured."""
    if drift is None:
        return []
    lines = [
        f"KL from the start {drift.kl_per_token:.4f} nats per token, "
        f"{drift.kl_per_sequence:.3f} per sequence, on {drift.samples} texts of its own"
    ]
    if drift.gold_before is not None:
        lines.append(f"their gold reward {drift.gold_before:.3f} -> {drift.gold_after:.3f}")
    return lines


def _export_tuned(
    model: HookedTransformer, base_model: str, out: Path, notes: dict[str, Any], lines: list[str]
) -> int:
    """Write the tuned model, and print the lines about it and what to do with it."""
    console = Console()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    out, gap = export_language_model(model, base_model, out, notes)
    write_tuning_card(out, notes, lines)
    console.print(
        f"written to {out}; reloaded with transformers, its log-probs differ by at most "
        f"{gap:.1g} nats; go on with: python -m rlhf_lab train --base-model {out}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def export(directory: Path, out: Path, checkpoint: str) -> int:
    """Write a run's policy as a Hugging Face directory, and say how close it is."""
    disable_progress_bar()
    refuse_occupied(out)
    which = int(checkpoint) if checkpoint.isdigit() else checkpoint
    policy, args = load_policy(directory, which)
    out, gap = export_policy(policy, args.base_model, out)
    write_run_card(RunDir.open(directory), out, checkpoint_name(which))
    Console().print(
        f"written to {out}; reloaded with transformers, its log-probs differ by at most "
        f"{gap:.1g} nats",
        highlight=False,
        soft_wrap=True,
    )
    return 0
