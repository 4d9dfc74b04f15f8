"""Model card: a README.md next to saved weights, with settings and metrics of their training."""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from rlhf_lab import __version__
from rlhf_lab.config import RLHFArgs
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.training.checkpoint import read_metadata
from rlhf_lab.training.run_dir import METRICS, RunDir, replacing

SIGNATURE = "Written by rlhf_lab"
TEMPLATE = """\
---
{{ card_data }}
---
# {{ name }}
{{ base }} after {{ method }}.
{% for line in metrics %}
- {{ line }}{% endfor %}

Load it in this directory:
```python
{{ program }}
```
Settings:
```json
{{ settings }}
```
The license of the base model applies. {{ signature }}
"""
METRIC_NAMES = "mean_reward true_reward kl_per_sequence kl_per_token response_length".split()
PATHS = "base_model reward_model reward_fn prompts critic_path adapter_path texts pairs examples"
LOAD_RUN = """\
from rlhf_lab.training.resume import load_policy

policy, args = load_policy(".")"""
LOAD_EXPORT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")"""


def keep_run_card(run: RunDir) -> None:
    """Update the card in a run's directory; warn if it cannot be written."""
    try:
        write_run_card(run)
    except Exception as error:
        warnings.warn(f"the model card was not written: {error}", stacklevel=2)


def write_run_card(run: RunDir, out: Path | None = None, which: str = "last") -> Path:
    """Write the card of checkpoint `which` of a run, into `out` if it was exported there."""
    info, phase = run.read_info(), read_metadata(run.checkpoints / f"{which}.safetensors")["phase"]
    args, custom = RLHFArgs.from_dict(info["args"]), info.get("custom_components", [])
    lines = [line for line in run.read(METRICS) if line["phase"] <= phase]
    if info.get("final") and phase == info["phases_done"]:
        lines.append(info["final"])
    metrics = [
        f"{name}: {lines[0][name]:.4g} -> {lines[-1][name]:.4g}"
        for name in METRIC_NAMES
        if lines and None not in (lines[0].get(name), lines[-1].get(name))
    ]
    settings = args.to_dict() | {"device": info["device"], "custom_components": ", ".join(custom)}
    settings |= {"base_model": None} if "policy" in custom else {}
    if "reward_fn" in custom or info.get("scores") == "given":
        settings |= {"reward_fn": "custom", "reward_model": None}
    method = f"{phase} learning phases of reinforcement learning ({args.policy_loss})"
    return _write(out or run.path, settings, method, metrics, LOAD_EXPORT if out else LOAD_RUN)


def write_tuning_card(out: Path, notes: Mapping[str, Any], found: Sequence[str]) -> Path:
    """Write the card of a tuned model from the contents of tuning.json and measured results."""
    return _write(out, notes, f"tuning ({notes['method']})", found, LOAD_EXPORT)


def _write(
    directory: Path, settings: Mapping[str, Any], method: str, metrics: Sequence[str], program: str
) -> Path:
    path, base = directory / "README.md", settings["base_model"]
    if path.exists() and SIGNATURE.encode() not in path.read_bytes():
        return path
    public = {k: v for k, v in settings.items() if isinstance(v, str | int | float) and v != ""}
    for name in public.keys() & PATHS.split():  # directories of this machine stay private
        public[name] = re.sub(r"(^|:)(\w:\\|[~.]{0,2}/)[^,]*[/\\]", r"\1", public[name])
    tag = settings.get("method") or settings["policy_loss"]
    is_local = base in (None, *BUNDLED) or public["base_model"] != base or Path(base).exists()
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers" if program == LOAD_EXPORT else "rlhf_lab",
            pipeline_tag="text-generation",
            base_model=None if is_local else base,
            license="mit" if base in BUNDLED else "unknown",
            tags=["rlhf", "reinforcement-learning", "rlhf_lab", tag],
        ),
        template_str=TEMPLATE,
        name=directory.name,
        base=f"`{public['base_model']}`" if base else "A custom model",
        method=method,
        metrics=metrics,
        settings=json.dumps(public, indent=2),
        program=program,
        signature=f"{SIGNATURE} {__version__}.",
    )
    with replacing(path) as partial:
        partial.write_text(card.content, encoding="utf-8")
    return path
