"""Commands that measure models: best-of-n, and compare, which measures what training changed.

Modules that need torch are read from `rlhf_lab`, which imports them when they are used: `--help`
starts without them.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

import rlhf_lab
from rlhf_lab.commands import Checkpoint, Device, given, make_settings
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, check_range, reward_names
from rlhf_lab.console import PAGE_COLUMNS, print_line
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.fitting import DriftEvalConfig, FitConfig
from rlhf_lab.model_commands import ModelName, is_run, load_run_or_model, validate_model
from rlhf_lab.tuning_commands import SFT, write_tuned

REPLACED = "reward_fn reward_model prompts prompts_column answers_column gen_len"
OF_BEST = "Settings that replace those of the run, or of preset reel for a model."
BestOfNSettings = make_settings(REPLACED, OF_BEST)


def best_of_n_command(
    model: ModelName,
    settings: BestOfNSettings,
    n: tuple[int, ...] = (1, 2, 4, 8, 16),
    n_prompts: int = 256,
    samples: int | None = None,
    checkpoint: Checkpoint = 0,
    out: Path | None = None,
    fit: Path | None = None,
    fitting: FitConfig = SFT,
    device: Device = "auto",
) -> int:
    """Sample several responses to each prompt, and measure the reward of the best of n and the
    bound on its KL; with --fit, fine-tune on the best (rejection sampling).

    Args:
        n: Values of n.
        n_prompts: Number of prompts, which may repeat.
        samples: Responses to each; twice the largest n by default.
        out: A new JSON file for the results.
        fit: A new directory for the model fine-tuned on the best of the largest n.
    """
    from rlhf_lab.training.best_of_n import draw_candidates, exact_figures

    numbers = sorted(set(n)) or [0]
    samples = 2 * numbers[-1] if samples is None else samples
    check_range(AT_LEAST_1, n=numbers[0], samples=samples, n_prompts=n_prompts)
    if samples < numbers[-1]:
        raise ConfigError(f"samples={samples} must be at least n={numbers[-1]}.")
    _validate_new_file(out, fit)
    if fit is not None:
        rlhf_lab.models.export.validate_new_directory(fit)
    for name, value in vars(fitting).items() if fit is None else ():
        if name not in ("seed", "show_progress") and value != getattr(SFT, name):
            raise ConfigError(f"{name}={value!r} has no effect without --fit. Set it.")
    trainer = _load_trainer(model, given(settings), checkpoint, device)
    if fit is not None and not trainer.sampling_spec.stops(trainer.tokenizer):
        raise ConfigError("--fit requires texts that end. Set stop_at_eos=True in the run.")
    candidates = draw_candidates(trainer, n_prompts, samples, fitting.seed, fitting.show_progress)
    exact = exact_figures(trainer, numbers) if checkpoint == 0 or not is_run(model) else {}
    results = [candidates.figures(k) | exact.get(k, {}) for k in numbers]
    print_line(f"{n_prompts} prompts, {samples} responses each; means with 95 % intervals over")
    print_line("\n".join(["prompts; KL in nats per sequence", *map(_format_result, results)]))
    if out is not None:
        notes = {"model": model, "n_prompts": n_prompts, "samples": samples, "seed": fitting.seed}
        notes |= {"figures": results, "args": trainer.args.to_dict()}
        _write_text(out, json.dumps(notes, indent=2) + "\n")
    if fit is not None:
        _fit_best(trainer, candidates, numbers[-1], fitting, fit)
    return 0


def _fit_best(trainer: Any, candidates: Any, n: int, fitting: FitConfig, out: Path) -> None:
    examples, args = candidates.chosen(n), trainer.args
    base, drift_eval = trainer.policy.base_model, DriftEvalConfig(gen_len=args.gen_len)
    fitted = rlhf_lab.tuning.fine_tune(
        base, examples, fitting, drift_eval=drift_eval, true_reward_fn=trainer.true_reward_fn
    )
    print_line(f"fine-tuned on {len(examples)} responses, the best of {n}")
    notes = {"method": "best_of_n", "n": n, "reward_fn": args.reward_fn}
    with rlhf_lab.models.lora.merged_lora(trainer.policy):
        print_line(write_tuned(base, args.base_model, out, fitted, notes))


def _load_trainer(model: str, changes: dict[str, Any], checkpoint: int | str, device: str) -> Any:
    """Build the policy, prompts and reward of a run or a model."""
    no_logs = {"wandb_mode": "disabled", "loggers": "", "log_probes": False, "device": device}
    if not is_run(model):
        validate_model(model, checkpoint)
        settings = {"preset": "reel", "base_model": model} | changes | no_logs
        return rlhf_lab.RLHFTrainer(RLHFArgs(**settings))
    info = rlhf_lab.training.RunDir.open(model).read_info()
    custom = {"policy", "prompts", "reward_fn"} - changes.keys()
    custom &= set(info.get("custom_components", []))
    if custom:
        raise RunError(
            f"{model} was trained with a custom {', '.join(sorted(custom))}, which is not stored. "
            "Set --reward-fn or --prompts, or use another run."
        )
    if "reward_fn" in changes:
        changes |= {"reward_weights": None}
        if "sentiment" not in (names := reward_names(changes["reward_fn"])):
            changes |= {"direction": "pos", "positive_label": None}
            if "learned" not in names:
                changes = {"reward_model": RLHFArgs.reward_model} | changes
    resume = rlhf_lab.training.resume
    trainer = rlhf_lab.RLHFTrainer(replace(resume.read_args(info), **changes, **no_logs))
    of_models, replaced = {resume.FROZEN, "the model of reference"}, set()
    if checkpoint != 0:
        place = rlhf_lab.models.device.pick_device(device)
        policy, _ = resume.load_policy(model, checkpoint, place)
        trainer.policy.load_state_dict(policy.state_dict())
        replaced |= of_models
    if changes.keys() & {"prompts", "prompts_column", "answers_column"}:
        replaced.add("prompts")
    if changes.keys() & {"reward_fn", "reward_model"}:
        replaced |= trainer.sources.keys() - of_models - {"prompts"}
    sources = {k: v for k, v in trainer.sources.items() if k not in replaced}
    resume.warn_about_changes(info.get("sources", {}), sources)
    return trainer


def _format_result(r: dict[str, Any]) -> str:
    line = "best of {n}: reward {reward:.4f} ± {reward_half:.4f}"
    if "true_reward" in r:
        line += ", true reward {true_reward:.4f} ± {true_reward_half:.4f}"
    line += ", KL at most {kl_bound:.3f}"
    if "exact_kl" in r:
        line += " (exact: reward {exact_reward:.4f}, true reward {exact_true_reward:.4f}, "
        line += "KL {exact_kl:.3f})"
    return line.format(**r)


def compare_command(
    base: ModelName,
    tuned: ModelName,
    methods: tuple[Literal["split", "weights", "patching"], ...] = ("split", "weights", "patching"),
    ranks: tuple[int, ...] = (0, 1, 2, 4, 8),
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0),
    base_checkpoint: Annotated[
        int | str | None, arg(help="Of a run as BASE; 0 if both are the same run, else last.")
    ] = None,
    checkpoint: Annotated[int | str, arg(help="Of a run as TUNED.")] = "last",
    out: Path | None = None,
    device: Device = "auto",
    text: str | None = None,
    column: str = "text",
    n_texts: int = 32,
    length: int | None = None,
    words: tuple[str, str] | None = None,
) -> int:
    """Measure what training changed between two models: the shift of the logit difference of two
    words, by component, by rank of the change, and along the line between the weights.

    Args:
        methods: How components are attributed: split, by their outputs at the last position;
            weights, by derivatives along their change (slow on a large model); patching, by
            patching their outputs into the other model.
        ranks: Singular directions of each matrix's change that are applied.
        alphas: Points of the line; 0 is BASE, 1 is TUNED.
        out: A new file: the numbers if it ends in .json, else a page with the tables.
        text: A file of texts for both models; by default a run's eval text, or the grammar's texts.
        column: The column of the texts.
        n_texts: Number of texts.
        length: Tokens of each text; those of the shortest text by default.
        words: Two words of one token each, as in --words " good" " bad"; by default loved and hated
            on Reel, so and hm on sums.
    """
    import torch
    from rich.console import Console

    from rlhf_lab.organism.language import REEL_LANGUAGE, read_language

    check_range(AT_LEAST_1, n_texts=n_texts)
    _validate_new_file(out)
    if text is None and column != "text":
        raise ConfigError(f"column={column!r} has no effect without --text. Set it.")
    if base_checkpoint is None:
        base_checkpoint = 0 if Path(base).resolve() == Path(tuned).resolve() else "last"
    place = rlhf_lab.models.device.pick_device(device)
    sources = (base, base_checkpoint), (tuned, checkpoint)
    models = [load_run_or_model(*source, place)[0].base_model for source in sources]
    rows, source = _token_rows(models[0], (tuned, base), text, column, n_texts)
    rows = [row for row in rows if row][:n_texts]
    shortest = min([models[0].cfg.n_ctx, *map(len, rows)])
    length = shortest if length is None else length
    words = words or (read_language(models[0].tokenizer) or REEL_LANGUAGE).contrast
    if not 1 <= length <= shortest:
        raise ConfigError(f"length={length} must be between 1 and {shortest}.")
    tokens = torch.tensor([row[:length] for row in rows], device=place)
    print_line(f"{len(tokens)} texts of {length} tokens, {source}")
    with Console().status("comparing"):
        result = rlhf_lab.diffing.compare(*models, tokens, words, -1, methods, ranks, alphas)
    return _report_comparison(result, {"base": base, "tuned": tuned, "text": source}, out)


def _report_comparison(result: Any, names: dict[str, str], out: Path | None) -> int:
    """Print the tables and failed checks, write them to `out`, and return the exit status."""
    from rich.console import Console

    tables = [table for table in result.tables() if table.row_count]
    Console().print(*tables)
    failed = [check for check in result.checks if not check.ok]
    print_line(f"{len(result.checks) - len(failed)} of {len(result.checks)} checks hold")
    for check in failed:
        print_line(f"Do not rely on these numbers: {check.name} is off by {check.value:.3g}.")
    if out is not None and out.suffix.lower() == ".json":
        _write_text(out, json.dumps(names | result.to_dict(), indent=2) + "\n")
    elif out is not None:
        page = Console(record=True, width=PAGE_COLUMNS, file=io.StringIO())
        title = "{base} and {tuned}, on {n} texts: {text}".format(**names, n=result.n)
        page.print(title, *tables, markup=False)
        _write_text(out, page.export_html())
    return 1 if failed else 0


def _token_rows(
    model: Any, runs: tuple[str, str], text: str | None, column: str, n_texts: int
) -> tuple[list[list[int]], str]:
    """Return the tokens of each text, from a file, a run or a grammar, and their source."""
    from rlhf_lab.organism.language import read_language

    if text is not None:
        texts = [row.text(column) for row in rlhf_lab.data_sources.read_rows(text, "text", column)]
        has_bos = model.tokenizer.bos_token_id is not None
        return rlhf_lab.sampling.tokenize_prompts(model.tokenizer, texts, has_bos), f"from {text}"
    for run in filter(is_run, runs):
        stored = rlhf_lab.probes.store.ProbeStore(rlhf_lab.training.RunDir.open(run)).kept_text()
        if stored is not None:
            rows = [row[mask].tolist() for row, mask in zip(*stored, strict=True)]
            return rows, f"the eval text of {run}"
    language = read_language(model.tokenizer)
    if language is None:
        raise ConfigError("There is no text for both models to read. Set --text.")
    return language.contexts(n_texts).tolist(), language.contexts_name


def _validate_new_file(out: Path | None, taken: Path | None = None) -> None:
    """Raise ConfigError unless `out` is a new file in a directory; called before hours of work."""
    if out is not None and (out.exists() or not out.parent.is_dir() or out == taken):
        reason = "exists, or its directory does not" if out != taken else "is also the --fit"
        raise ConfigError(f"out={str(out)!r} {reason}. Use a new file.")


def _write_text(out: Path, text: str) -> None:
    out.write_text(text, encoding="utf-8")
    print_line(f"written to {out}")
