"""Model card: a README.md next to saved weights, with settings and metrics of their training."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from rlhf_lab.files import partial_file
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.training.checkpoint import read_metadata
from rlhf_lab.training.run_dir import INFO, METRICS, RunDir

SIGNATURE = "Written by rlhf_lab"
RUN_LOADER = "rlhf_lab.training.resume.load_policy"
EXPORT_LOADER = "transformers.AutoModelForCausalLM.from_pretrained"
METRIC_NAMES = ("mean_reward", "true_reward", "kl_per_sequence", "response_length")


def write_run_card(run: RunDir, out: Path | None = None, which: str = "last") -> None:
    """Write the card of checkpoint `which` of a run, into `out` if it was exported there."""
    info, phase = run.read_info(), read_metadata(run.checkpoints / f"{which}.safetensors")["phase"]
    custom = info["custom_components"] + ["reward_fn"] * (info.get("scores") == "given")
    settings = info["args"] | {"device": info["device"]} | dict.fromkeys(custom, "custom")
    replaced = {"policy": "base_model", "reward_fn": "reward_model"}
    settings |= {replaced[name]: None for name in custom if name in replaced}
    lines = [line for line in run.read(METRICS) if line["phase"] <= phase]
    lines += [info["final"]] if info.get("final") and phase == info["phases_done"] else []
    names = [n for n in METRIC_NAMES if lines and None not in (lines[0].get(n), lines[-1].get(n))]
    results = [f"{name}: {lines[0][name]:.4g} -> {lines[-1][name]:.4g}" for name in names]
    write_card(out or run.path, settings, [f"learning phases: {phase}", *results])


def write_card(directory: Path, settings: Mapping[str, Any], results: Sequence[str]) -> None:
    """Write README.md, unless another program did; directories of this machine stay private."""
    path, base = directory / "README.md", settings["base_model"]
    if path.exists() and SIGNATURE.encode() not in path.read_bytes():
        return
    local = re.compile(r"(^|:)(\w:\\|[~.]{0,2}/)[^,]*[/\\]")
    public = {k: v for k, v in settings.items() if isinstance(v, str | int | float) and v != ""}
    public = {k: local.sub(r"\1", v) if isinstance(v, str) else v for k, v in public.items()}
    is_hub_id = base not in (None, *BUNDLED) and public["base_model"] == base
    loader = RUN_LOADER if (directory / INFO).exists() else EXPORT_LOADER
    data = ModelCardData(
        library_name=loader.partition(".")[0],
        pipeline_tag="text-generation",
        base_model=base if is_hub_id and not Path(base).exists() else None,
        license="mit" if base in BUNDLED else "unknown",
        tags=["rlhf", "rlhf_lab", settings.get("method") or settings["policy_loss"]],
    )
    lines = [f"---\n{data}\n---\n# {directory.name}\n", *(f"- {line}" for line in results)]
    lines += ["\nSettings:\n```json", json.dumps(public, indent=2), "```\n"]
    lines += [f"Load with `{loader}`. The license of the base model applies. {SIGNATURE}.\n"]
    with partial_file(path) as partial:
        partial.write_text("\n".join(lines), encoding="utf-8")
