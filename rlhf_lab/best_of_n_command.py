"""The command best-of-n: sample, choose and measure, and fine-tune on what was chosen."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from rlhf_lab.commands import Checkpoint, Device
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.fitting import Fitting
from rlhf_lab.tuning_commands import SFT


@dataclass(frozen=True)
class Changed:
    """What is sampled and rewarded; as the run has it, or the preset reel, where not given.

    Args:
        reward_fn: What chooses the best; see docs/rewards.md.
        reward_model: The classifier or reward model behind it.
        reward_weights: What each of several rewards is multiplied by.
        prefix: The prompt, unless there are prompts.
        prompts: A file of prompts.
        prompts_column: The column that they are in.
        answers_column: The column of the right answers.
        gen_len: Tokens to generate.
        temperature: Logits are divided by this.
        top_k: Sample from the k likeliest tokens.
    """

    reward_fn: str | None = None
    reward_model: str | None = None
    reward_weights: tuple[float, ...] | None = None
    prefix: str | None = None
    prompts: str | None = None
    prompts_column: str | None = None
    answers_column: str | None = None
    gen_len: int | None = None
    temperature: float | None = None
    top_k: int | None = None


def best_of_n_command(
    model: Positional[str],
    changed: Changed,
    n: tuple[int, ...] = (1, 2, 4, 8, 16),
    n_prompts: int = 256,
    samples: int | None = None,
    checkpoint: Checkpoint = 0,
    out: Path | None = None,
    fit: Path | None = None,
    fitting: Fitting = SFT,
    device: Device = "auto",
) -> int:
    """Sample several answers to each prompt, and measure what the best of n by the reward earns,
    beside the bound on its KL; fine-tune on the best with --fit (rejection sampling).

    Args:
        model: A run's directory, a bundled name (reel-nano), a Hugging Face directory or a hub id.
        n: Of how many answers the best is taken.
        n_prompts: Prompts to answer; a prompt may come several times.
        samples: Answers to each; twice the largest n when not given.
        out: A JSON file for the figures, which does not exist yet.
        fit: A directory for the model that is fine-tuned on the best of the largest n.
    """
    from rlhf_lab.models.export import validate_new_directory
    from rlhf_lab.training.best_of_n import draw_candidates, exact_figures

    numbers = sorted(set(n))
    if not numbers:
        raise ConfigError("n is empty; give how many answers the best is taken of, as in --n 4 16.")
    samples = 2 * numbers[-1] if samples is None else samples
    check_range(AT_LEAST_1, n=numbers[0], samples=samples, n_prompts=n_prompts)
    if samples < numbers[-1]:
        raise ConfigError(f"samples={samples} is below n={numbers[-1]}; give at least as many.")
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise ConfigError(f"out={str(out)!r} exists, or its directory does not; name a new file.")
    if fit is not None:
        validate_new_directory(fit)
    parts = _parts(model, changed, checkpoint, device)
    if fit is not None and not parts.sampling_spec.stops(parts.tokenizer):
        raise ConfigError("--fit learns where texts end, and stop_at_eos=False; set it True.")
    candidates = draw_candidates(parts, n_prompts, samples, fitting.seed, fitting.show_progress)
    exact = exact_figures(parts, numbers) if _is_untrained(model, checkpoint) else {}
    figures = [replace(candidates.figures(k), **exact.get(k, {})) for k in numbers]
    print_line("\n".join(_lines(figures, n_prompts, samples)))
    if out is not None:
        noted = {"model": model, "n_prompts": n_prompts, "samples": samples, "seed": fitting.seed}
        shown = {"figures": [f.to_dict() for f in figures], "args": parts.args.to_dict()}
        _write(out, noted | shown)
        print_line(f"written to {out}")
    if fit is not None:
        _fit(parts, candidates, numbers[-1], fit, fitting)
    return 0


def _is_run(model: str) -> bool:
    return Path(model).is_dir() and not Path(model, "config.json").exists()


def _is_untrained(model: str, checkpoint: int | str) -> bool:
    return not _is_run(model) or checkpoint == 0


def _parts(model: str, changed: Changed, checkpoint: int | str, device: str) -> Any:
    """The policy with its prompts and rewards.

    Raises:
        RunError: a run with parts of its own that are not there, or no run.
    """
    from rlhf_lab.models.device import pick_device
    from rlhf_lab.training import RunDir
    from rlhf_lab.training.components import Parts
    from rlhf_lab.training.restore import load_policy

    given = {name: value for name, value in asdict(changed).items() if value is not None}
    if "reward_fn" in given:
        given = {"reward_weights": None} | given
    if not _is_run(model):
        return Parts(RLHFArgs(**({"preset": "reel"} | given | _of_model(model, device))))
    info = RunDir.open(model).read_info()
    own = set(info.get("own_parts", [])) & {"policy", "prompts", "reward_fn"} - given.keys()
    if own:
        raise RunError(
            f"{model} was trained with its own {', '.join(sorted(own))}, which is not stored; name "
            "a reward with --reward-fn or prompts with --prompts, or use a run without."
        )
    args = replace(RLHFArgs.from_dict(info["args"]), device=device, **given)
    parts = Parts(args)
    if checkpoint != 0:
        parts.policy, _ = load_policy(model, checkpoint, pick_device(device))
    return parts


def _of_model(model: str, device: str) -> dict[str, Any]:
    from rlhf_lab.rewards.model import refuse_reward_model

    refuse_reward_model(model)
    return {"base_model": model, "device": device}


def _lines(figures: list[Any], n_prompts: int, samples: int) -> list[str]:
    """A table of the figures for the terminal."""
    known = figures[0].gold is not None
    lines = [
        f"{n_prompts} prompts, {samples} answers each; means with 95 % intervals over prompts; KL "
        "in nats per sequence"
    ]
    for f in figures:
        line = f"best of {f.n}: reward {f.reward:.4f} ± {f.reward_half:.4f}"
        line += f", gold {f.gold:.4f} ± {f.gold_half:.4f}" if known else ""
        line += f", KL at most {f.kl_bound:.3f}"
        if f.exact_kl is not None:
            line += f" (the grammar's: reward {f.exact_reward:.4f}, gold {f.exact_gold:.4f}, "
            line += f"KL {f.exact_kl:.3f})"
        lines.append(line)
    return lines


def _write(out: Path, content: dict[str, Any]) -> None:
    """Write the figures as JSON, with what they were measured on."""
    from rlhf_lab.training.run_dir import replacing

    with replacing(out) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fit(parts: Any, candidates: Any, n: int, out: Path, fitting: Fitting) -> None:
    """Fine-tune the model that sampled on the best answers, and export it."""
    from rlhf_lab.fitting import OwnTexts
    from rlhf_lab.models import export_language_model, merged_lora
    from rlhf_lab.training.model_card import write_tuning_card
    from rlhf_lab.tuning import fine_tune

    examples = candidates.chosen(n)
    base, args = parts.policy.base_model, parts.args
    own_texts = OwnTexts(gen_len=args.gen_len)
    fitted = fine_tune(base, examples, fitting, None, own_texts, parts.gold_fn)
    found = fitted.summary()
    print_line("\n".join([f"fine-tuned on {len(examples)} answers, the best of {n}", *found]))
    notes = {"method": "best_of_n", "n": n, "reward_fn": args.reward_fn}
    notes |= {"base_model": args.base_model, **fitted.to_dict()}
    with merged_lora(parts.policy):
        made, gap = export_language_model(base, args.base_model, out, notes)
    write_tuning_card(made, notes, found)
    print_line(f"written to {made}; its log-probs differ by at most {gap.weighed:.1g} nats")
