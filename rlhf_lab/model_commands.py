"""Commands that read a run or a model: sample and export.

Modules that need torch are read from `rlhf_lab`, which imports them when they are used: `--help`
starts without them.
"""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

import rlhf_lab
from rlhf_lab.commands import Checkpoint, Device, RunDirectory, given, make_settings
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, SEED, check_range
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from rlhf_lab.files import expand_home
from rlhf_lab.tuning_commands import format_written, prepare

ModelName = Annotated[
    Positional[str],
    arg(
        help="A run's directory, a bundled name (reel-nano), a Hugging Face directory or a hub id."
    ),
]
OF_MODELS = {"prefix": "", "gen_len": 26, "top_k": None, "stop_at_eos": True}
OF_RUNS = "prefix prepend_bos chat system_prompt gen_len temperature top_k top_p".split()
OF_RUNS += "stop_at_eos stop_tokens stop_token_ids".split()
OF_SAMPLE = "Settings that replace those of the run; a model has gen_len 26 and samples all tokens."
SampleSettings = make_settings("gen_len temperature top_k chat system_prompt", OF_SAMPLE)


def is_run(model: str) -> bool:
    """Return True if a directory contains a run and not a model."""
    path = expand_home(model)
    return model != "" and path.is_dir() and not (path / "config.json").exists()


def validate_model(model: str, checkpoint: int | str) -> None:
    """Raise a LabError unless this is a language model, whose only state is first and last."""
    if checkpoint not in (0, "last"):
        raise ConfigError(f"checkpoint={checkpoint!r} is for runs, not for {model!r}. Omit it.")
    rlhf_lab.rewards.model.validate_language_model(model)


def load_run_or_model(
    model: str, checkpoint: int | str, device: Any
) -> tuple[Any, RLHFArgs | None]:
    """Load the policy of a run with the run's settings, or a language model with None."""
    if is_run(model):
        return rlhf_lab.training.resume.load_policy(model, checkpoint, device)
    validate_model(model, checkpoint)
    models = rlhf_lab.models
    return models.TransformerWithValueHead(models.load_model(model, device=device)), None


def sample_command(
    model: ModelName,
    settings: SampleSettings,
    prompt: str | None = None,
    n: Annotated[int, arg(aliases=["-n"])] = 5,
    seed: int = 0,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
) -> int:
    """Generate texts with a trained run, a bundled model, a directory or a hub id.

    Args:
        prompt: The text to continue; the run's prefix by default.
        n: Number of samples.
        seed: Seed of the sampling noise.
    """
    import torch
    from rich.console import Console

    check_range(AT_LEAST_1, n=n)
    check_range(SEED, seed=seed)
    place = rlhf_lab.models.device.pick_device(device)
    policy, args = load_run_or_model(model, checkpoint, place)
    info = {} if args is None else rlhf_lab.training.RunDir.open(model).read_info()
    model, tokenizer = policy.base_model, policy.base_model.tokenizer
    changes = given(settings) | ({} if prompt is None else {"prefix": prompt})
    of_run = OF_MODELS if args is None else {name: getattr(args, name) for name in OF_RUNS}
    changed = RLHFArgs(**of_run | changes)
    spec = rlhf_lab.sampling.SamplingSpec.from_args(changed, tokenizer)
    prompts = rlhf_lab.training.prompts.Prompts(changed, None, model)
    noise = torch.Generator().manual_seed(seed)
    samples = rlhf_lab.sampling.sample(policy, prompts.tokens * n, spec, noise)
    texts = samples.texts(tokenizer)
    rewards, training = rlhf_lab.rewards, rlhf_lab.training
    is_stored = args is not None and "reward_fn" not in info.get("custom_components", [])
    reward_fn = rewards.load_reward(args, place) if is_stored else None
    if reward_fn is None or rewards.requires_answers(reward_fn):
        print_line("\n".join(texts))
        return 0
    sources = training.components.loaded_sources(reward_fn)
    training.resume.warn_about_changes(info.get("sources", {}), sources)
    stops = spec.stops(tokenizer)
    scorer = rewards.RewardPipeline(args, tokenizer, reward_fn, stop_tokens=stops)
    if prompts.turns is not None:
        scorer.conversations = {tuple(prompts.tokens[0]): prompts.turns[0]}
    scores = scorer.read(reward_fn, samples, texts).rewards.tolist()
    Console().print(rlhf_lab.views.sample_table(texts, scores, prompts.texts[0]))
    return 0


def export(
    directory: RunDirectory,
    out: Positional[Path],
    checkpoint: Checkpoint = "last",
    adapter: FlagCreatePairsOff[bool] = False,
) -> int:
    """Write a run's policy as a Hugging Face model with its value head, and check it.

    Args:
        out: The directory to write, which must not exist.
        adapter: Write only the LoRA adapters, in PEFT's format.
    """
    prepare(out)
    models, training = rlhf_lab.models, rlhf_lab.training
    policy, args = training.resume.load_policy(directory, checkpoint)
    if adapter:
        models.export_adapter(policy.base_model, args.base_model, out)
        print_line(f"written to {out} in PEFT's format for {args.base_model}")
        return 0
    out, gap = models.export_policy(policy, args.base_model, out, args.critic_path)
    name = training.resume.checkpoint_name(checkpoint)
    training.model_card.write_run_card(training.RunDir.open(directory), out, name)
    print_line(format_written(out, gap))
    return 0
