"""The model card: a README.md beside saved weights, which says what was noted of their training."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from rlhf_lab import __version__
from rlhf_lab.config import RLHFArgs, reward_names
from rlhf_lab.errors import LoadError
from rlhf_lab.models.load import locate
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.training.checkpoint import read_notes
from rlhf_lab.training.run_dir import METRICS, RunDir, replacing

SIGNED = "Written by rlhf_lab"
TEMPLATE = f"""\
---
{{front_matter}}
---

# {{name}}

{{summary}}

## How it was trained

{{settings}}

## Figures

{{figures}}

## How to load it

In this directory:

```python
{{loading}}
```

## License

{{license}}

{SIGNED} {{version}} from what was noted in `{{source}}`.
"""
SETTINGS = (
    "batch_size seed steps learning_rate held_out beta label_smoothing kind good_weight "
    "bad_weight odds_weight policy_loss clip_coef advantages kl_estimator kl_in kl_coef "
    "kl_controller base_lr head_lr lora_rank lora_alpha lora_targets prefix prompts gen_len "
    "temperature top_k top_p precision device parts_handed_in"
).split()
FIGURES = {
    "mean_reward": "mean reward",
    "gold_reward": "gold reward, the known truth",
    "kl_per_sequence": "KL from the base model, nats per sequence",
    "kl_per_token": "KL from the base model, nats per token",
    "entropy_per_token": "entropy, nats per token",
    "response_length": "response length, tokens",
}
LOAD_RUN = """\
from rlhf_lab.training.restore import load_policy

policy, args = load_policy(".")"""
LOAD_OWN = """\
from pathlib import Path

from rlhf_lab.training.checkpoint import load_checkpoint, load_weights

file = Path("checkpoints/last.safetensors")
load_weights(policy, load_checkpoint(file)[0], file)  # policy: built as it was for the run"""
LOAD_HUGGING_FACE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")"""
LOAD_EXPORT = f"""{LOAD_HUGGING_FACE}
# rlhf_lab.models.export.load_value_head(".") reads the value head."""
UNKNOWN_LICENSE = (
    "These weights were made from the base model's, whose license holds for them; it is not known "
    "here. Look at the base model's page before passing them on."
)


def keep_run_card(run: RunDir) -> None:
    """Bring the card in a run's directory up to date; that it could not be is only a warning."""
    try:
        write_run_card(run)
    except Exception as error:
        warnings.warn(f"the model card was not written: {error}", stacklevel=2)


def write_run_card(run: RunDir, out: Path | None = None, which: str = "last") -> Path:
    """Write the card of a run's policy; a README.md that is no such card stays as it is.

    Args:
        out: the directory that the policy was exported to; the run's own when None.
        which: the name of the checkpoint.

    Raises:
        RunError: the directory holds no run, there is no such checkpoint, or the card cannot be
        written.
    """
    info, learned = run.read_info(), read_notes(run.checkpoints / f"{which}.safetensors")["phase"]
    args, own = RLHFArgs.from_dict(info["args"]), info.get("own_parts", [])
    lines = [line for line in run.read(METRICS) if line["phase"] <= learned]
    columns = {f"phase {line['phase']}": line for line in (*lines[:1], *lines[-1:])}
    if info.get("final") and learned == info["phases_done"]:
        columns["after training"] = info["final"]
    prompts = Path(args.prompts).name if args.prompts else None
    notes = args.to_dict() | {
        "base_model": None if "policy" in own else args.base_model,
        "method": args.policy_loss,
        "prompts": "handed in" if "prompts" in own else prompts,
        "prefix": None if "prompts" in own or prompts else args.prefix,
        "device": info["device"],
        "parts_handed_in": ", ".join(own) or "none",
    }
    return _write(
        run.path if out is None else out,
        "rlhf_lab" if out is None else "transformers",
        notes,
        summary=f"A policy after {learned} learning phase{'' if learned == 1 else 's'} of "
        f"reinforcement learning from {_base(notes['base_model'])}, paid by "
        f"{_reward(args, own, info)}. The run asked for {args.total_phases} phases of "
        f"{args.batch_size} sequences, with seed {args.seed}.",
        figures=_figures(columns),
        loading=LOAD_EXPORT if out else LOAD_OWN if "policy" in own else LOAD_RUN,
        source="run.json",
    )


def write_tuning_card(out: Path, notes: Mapping[str, Any], found: Sequence[str]) -> Path:
    """Write the card of a tuned model into its directory.

    Args:
        notes: what tuning.json holds.
        found: what was measured, a line each.

    Raises:
        RunError: the card cannot be written.
    """
    how = {
        "sft": f"supervised fine-tuning on texts from `{notes.get('texts')}`",
        "best_of_n": f"rejection sampling: fine-tuning on the best of {notes.get('n')} answers",
        "dpo": f"direct preference optimization on pairs from `{notes.get('pairs')}`",
        "orpo": f"odds ratio preference optimization on pairs from `{notes.get('pairs')}`",
        "kto": f"Kahneman-Tversky optimization on judged texts from `{notes.get('examples')}`",
    }[notes["method"]]
    return _write(
        out,
        "transformers",
        notes,
        summary=f"A language model made from {_base(notes['base_model'])} by {how}.",
        figures="\n".join(f"- {line}" for line in found),
        loading=LOAD_HUGGING_FACE,
        source="tuning.json",
    )


def _write(directory: Path, library: str, notes: Mapping[str, Any], **words: str) -> Path:
    """Fill in the template, unless a README.md is there that this package did not write."""
    path, base_model = directory / "README.md", notes["base_model"]
    if path.exists() and SIGNED.encode() not in path.read_bytes():
        return path
    is_bundled = base_model in BUNDLED
    is_on_hub = not (base_model is None or is_bundled or _is_path(base_model))
    front_matter = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=locate(base_model)[0] if is_on_hub else None,
        license="mit" if is_bundled else "unknown",
        tags=["rlhf", "reinforcement-learning", "rlhf_lab", notes["method"]],
    )
    known = {name: notes[name] for name in SETTINGS if notes.get(name) is not None}
    settings = [(name, f"`{v}`" if isinstance(v, str) else str(v)) for name, v in known.items()]
    card = TEMPLATE.format(
        name=directory.name,
        front_matter=front_matter.to_yaml(),
        settings=_table([("setting", "value"), *settings]),
        version=__version__,
        license=f"{_base(base_model)}, under the MIT license." if is_bundled else UNKNOWN_LICENSE,
        **words,
    )
    with replacing(path) as partial:
        partial.write_text(card, encoding="utf-8")
    return path


def _base(name: str | None) -> str:
    """The base model in words: None if it was handed in; a directory without its place."""
    if name is None:
        return "a model that was handed in"
    if name in BUNDLED:
        return f"`{name}`, which comes with rlhf_lab"
    return f"the model in a local directory `{Path(name).name}`" if _is_path(name) else f"`{name}`"


def _is_path(name: str) -> bool:
    """Whether a name is that of a directory, here or where the run was."""
    try:
        return locate(name)[1]
    except LoadError:
        return True


def _reward(args: RLHFArgs, own: Sequence[str], info: Mapping[str, Any]) -> str:
    """The reward in words."""
    if info.get("scores") == "given":
        return "scores that were handed in with the texts"
    if "reward_fn" in own:
        return "a function that was handed in"
    model = Path(args.reward_model).name if _is_path(args.reward_model) else args.reward_model
    models = {
        "sentiment": f"the probability of class `{args.direction}` by the classifier `{model}`",
        "learned": f"the reward model `{model}`",
    }
    names = reward_names(args.reward_fn)
    said = [models.get(name, f"the rule `{name}`") for name in names]
    if args.reward_weights is not None:
        pairs = zip(args.reward_weights, said, strict=True)
        said = [f"{weight:g} times {each}" for weight, each in pairs]
    return " plus ".join(said)


def _figures(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per figure that is known, a column per time; a phase is measured before it learns."""
    if not columns:
        return "No phase has ended yet."
    rows = []
    for name, words in FIGURES.items():
        values = [column.get(name) for column in columns.values()]
        if any(value is not None for value in values):
            rows.append((words, *("–" if value is None else f"{value:.4g}" for value in values)))
    said = "Phase n is a batch that the weights wrote after n learning phases."
    return f"{said}\n\n{_table([('figure', *columns), *rows])}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose first row is the head."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines.insert(1, " | ".join(["---"] * len(rows[0])))
    return "\n".join(f"| {line} |" for line in lines)
