"""What the commands do that make models: train a reward model, export a policy."""

from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from rlhf_lab.models import export_policy, load_model
from rlhf_lab.models.device import pick_device
from rlhf_lab.models.export import refuse_occupied
from rlhf_lab.rewards import PreferenceFit, RewardModel, load_pairs, train_reward_model
from rlhf_lab.training.model_card import write_export_card
from rlhf_lab.training.restore import checkpoint_name, load_policy
from rlhf_lab.training.run_dir import RunDir


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
    read = load_pairs(pairs, n_pairs, seed, prompt_column)
    console.print(f"{len(read)} pairs from {pairs}; loading {base_model}", highlight=False)
    model = RewardModel(load_model(base_model, device=place), seed)
    fitted = train_reward_model(model, read, seed=seed, **settings)
    model.save(out, base_model, {"pairs": Path(pairs).name, **fitted.to_dict()})
    for line in _described(fitted):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"written to {out}", highlight=False, soft_wrap=True)
    return 0


def _described(fitted: PreferenceFit) -> list[str]:
    """The accuracy, and what it can be compared with."""
    lines = [
        f"loss {fitted.first_loss:.3f} -> {fitted.last_loss:.3f} nats per pair",
        f"accuracy {fitted.accuracy:.3f} on {fitted.held_out_pairs} held-out pairs",
    ]
    if fitted.bayes_accuracy is not None:
        lines.append(
            f"the best possible judge: {fitted.bayes_accuracy:.3f} on average, "
            f"{fitted.gold_accuracy:.3f} on these pairs"
        )
    return lines


def export(directory: Path, out: Path, checkpoint: str) -> int:
    """Write a run's policy as a Hugging Face directory, and say how close it is."""
    disable_progress_bar()
    refuse_occupied(out)
    which = int(checkpoint) if checkpoint.isdigit() else checkpoint
    policy, args = load_policy(directory, which)
    out, gap = export_policy(policy, args.base_model, out)
    write_export_card(RunDir.open(directory), checkpoint_name(which), out)
    Console().print(
        f"written to {out}; reloaded with transformers, its log-probs differ by at most "
        f"{gap:.1g} nats",
        highlight=False,
        soft_wrap=True,
    )
    return 0
