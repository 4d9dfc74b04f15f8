"""The model card of a saved policy: README.md with what the run's directory knows, and no more."""

from pathlib import Path
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.card import (
    CARD,
    LOAD_EXPORT,
    base_in_words,
    front_matter,
    is_path,
    license_in_words,
    program,
    table,
)
from rlhf_lab.training.callbacks import Context
from rlhf_lab.training.checkpoint import read_notes
from rlhf_lab.training.run_dir import METRICS, RunDir, replacing

FIGURES = (
    ("mean_reward", "mean reward"),
    ("gold_reward", "gold reward, the known truth"),
    ("kl_per_sequence", "KL from the base model, nats per sequence"),
    ("kl_per_token", "KL from the base model, nats per token"),
    ("entropy_per_token", "entropy, nats per token"),
    ("response_length", "response length, tokens"),
)
LOAD_RUN = """\
from rlhf_lab.training.restore import load_policy

policy, args = load_policy(".")
"""
LOAD_OWN = """\
from pathlib import Path

from rlhf_lab.training.checkpoint import load_checkpoint, load_weights

file = Path("checkpoints/last.safetensors")
load_weights(policy, load_checkpoint(file)[0], file)
"""


def keep_run_card(ctx: Context) -> None:
    """Bring the card in a run's directory up to date, when its state is saved and when it ends."""
    if ctx.event == "run_end" or ctx.checkpoint.stem == "last":
        write_run_card(ctx.run)


def write_run_card(run: RunDir) -> Path:
    """Write the card of a run, whose policy is in its checkpoints.

    Raises:
        RunError: the directory holds no run, or cannot be written.
    """
    info = run.read_info()
    lines = run.read(METRICS)
    columns = {f"phase {line['phase']}": line for line in (*lines[:1], *lines[1:][-1:])}
    if info.get("final"):
        columns["after training"] = info["final"]
    own = "policy" in info.get("own_parts", [])
    how = (
        "In this directory, with `policy` built as it was for the run:"
        if own
        else "In this directory:"
    )
    loading = [how, program(LOAD_OWN if own else LOAD_RUN)]
    return _write(run.path, run.path.name, info, len(lines), columns, loading, "rlhf_lab")


def write_export_card(run: RunDir, which: str, out: Path) -> Path:
    """Write the card of an exported policy into its directory.

    Args:
        which: the name of the checkpoint, such as last.

    Raises:
        RunError: the directory holds no run, there is no such checkpoint, or `out` cannot be
        written.
    """
    info = run.read_info()
    learned = read_notes(run.checkpoints / f"{which}.safetensors")["phase"]
    lines = {line["phase"]: line for line in run.read(METRICS)}
    columns = {f"phase {phase}": lines[phase] for phase in sorted({0, learned}) if phase in lines}
    if info.get("final") and learned == info["phases_done"]:
        columns["after training"] = info["final"]
    loading = [
        "In this directory, with plain transformers:",
        program(LOAD_EXPORT),
        "The value head is in `value_head.safetensors`; `rlhf_lab.models.export.load_value_head` "
        "reads it.",
    ]
    return _write(out, out.name, info, learned, columns, loading, "transformers")


def _write(
    directory: Path,
    name: str,
    info: dict[str, Any],
    learned: int,
    columns: dict[str, dict[str, Any]],
    loading: list[str],
    library: str,
) -> Path:
    """Put the parts of a card together.

    Args:
        learned: learning phases behind the weights.
        columns: what was measured, by when.
    """
    args = RLHFArgs.from_dict(info["args"])
    own = info.get("own_parts", [])
    parts = [
        front_matter(_known(args, own), library, args.policy_loss),
        f"# {name}",
        _summary(args, own, info, learned),
        "## How it was trained",
        table(("setting", "value"), _settings(args, own, info)),
        "## Figures",
        _figures(columns),
        "## How to load it",
        *loading,
        "## License",
        license_in_words(_known(args, own)),
        f"Written by rlhf_lab {info['versions']['rlhf_lab']} from what the run noted.",
    ]
    path = directory / CARD
    with replacing(path) as partial:
        partial.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _summary(args: RLHFArgs, own: list[str], info: dict[str, Any], learned: int) -> str:
    """What these weights are, in two sentences."""
    phases = "1 learning phase" if learned == 1 else f"{learned} learning phases"
    return (
        f"A policy after {phases} of reinforcement learning from "
        f"{base_in_words(_known(args, own))}, paid by {_reward(args, own, info)}. "
        f"The run asked for {args.total_phases} phases of {args.batch_size} sequences, "
        f"with seed {args.seed}."
    )


def _known(args: RLHFArgs, own: list[str]) -> str | None:
    """The base model's name; none, if a policy was handed in."""
    return None if "policy" in own else args.base_model


def _reward(args: RLHFArgs, own: list[str], info: dict[str, Any]) -> str:
    """The reward in words."""
    if info.get("scores") == "given":
        return "scores that were handed in with the texts"
    if "reward_fn" in own:
        return "a function that was handed in"
    model = f"`{Path(args.reward_model).name if is_path(args.reward_model) else args.reward_model}`"
    if args.reward_fn == "sentiment":
        return f"the probability of class `{args.direction}` by the classifier {model}"
    if args.reward_fn == "learned":
        return f"the reward model {model}"
    return f"the rule `{args.reward_fn}`"


def _settings(args: RLHFArgs, own: list[str], info: dict[str, Any]) -> list[tuple[str, str]]:
    """What decides about the result, besides the base model and the reward."""
    start = Path(args.prompts).name if args.prompts else repr(args.prefix)
    given = sorted(set(own) - {"policy", "reward_fn"})
    rows = {
        "policy loss": f"`{args.policy_loss}`, clip_coef {args.clip_coef:g}",
        "advantages": f"`{args.advantages}`",
        "KL": f"`{args.kl_estimator}`, in the {args.kl_in}, first coefficient {args.kl_coef:g} "
        f"({args.kl_controller})",
        "learning rates": f"{args.base_lr:g} (transformer), {args.head_lr:g} (value head)",
        "adapters": f"rank {args.lora_rank} on {args.lora_targets}" if args.lora_rank else "none",
        "prompts": "handed in" if "prompts" in own else f"`{start}`",
        "tokens": f"up to {args.gen_len}, temperature {args.temperature:g}, top_k {args.top_k}, "
        f"top_p {args.top_p}",
        "precision, device": f"{args.precision}, {info['device']}",
        "other parts handed in": ", ".join(given) or "none",
    }
    return list(rows.items())


def _figures(columns: dict[str, dict[str, Any]]) -> str:
    """A row per figure that is known, a column per time; a phase is measured before it learns."""
    if not columns:
        return "No phase has ended yet."
    rows = []
    for field, spoken in FIGURES:
        values = [measured.get(field) for measured in columns.values()]
        if any(value is not None for value in values):
            rows.append((spoken, *("–" if v is None else f"{v:.4g}" for v in values)))
    told = "Phase n is a batch that the weights wrote after n learning phases."
    return f"{told}\n\n{table(('figure', *columns), rows)}"
