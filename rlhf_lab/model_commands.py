"""Commands that read a run or a model: sample and export.

Modules that need torch are imported in the functions, so that `--help` starts without them.
"""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

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
    from rlhf_lab.rewards.model import validate_language_model

    if checkpoint not in (0, "last"):
        raise ConfigError(f"checkpoint={checkpoint!r} requires a run, but {model!r} is a model.")
    validate_language_model(model)


def load_run_or_model(
    model: str, checkpoint: int | str, device: Any
) -> tuple[Any, RLHFArgs | None]:
    """Load the policy of a run with the run's settings, or a language model with None."""
    from rlhf_lab.models import TransformerWithValueHead, load_model
    from rlhf_lab.training.resume import load_policy

    if is_run(model):
        return load_policy(model, checkpoint, device)
    validate_model(model, checkpoint)
    return TransformerWithValueHead(load_model(model, device=device)), None


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

    from rlhf_lab.models.device import pick_device
    from rlhf_lab.rewards import RewardPipeline, load_reward, requires_answers
    from rlhf_lab.sampling import sample
    from rlhf_lab.views import sample_table

    check_range(AT_LEAST_1, n=n)
    check_range(SEED, seed=seed)
    place = pick_device(device)
    policy, args = load_run_or_model(model, checkpoint, place)
    model, tokenizer = policy.base_model, policy.base_model.tokenizer
    changes = given(settings) | ({} if prompt is None else {"prefix": prompt})
    prompts, spec = prompt_and_spec(model, args, **changes)
    samples = sample(policy, prompts.tokens * n, spec, torch.Generator().manual_seed(seed))
    texts = samples.texts(tokenizer)
    reward_fn = load_reward(args, place) if args else None
    if reward_fn is None or requires_answers(reward_fn):  # a prompt has no right answer here
        print_line("\n".join(texts))
        return 0
    scorer = RewardPipeline(args, tokenizer, reward_fn, stop_tokens=spec.stops(tokenizer))
    if prompts.turns is not None:
        scorer.conversations = {tuple(prompts.tokens[0]): prompts.turns[0]}
    rewards = scorer.read(reward_fn, samples, texts).rewards.tolist()
    Console().print(sample_table(texts, rewards, prompts.texts[0]))
    return 0


def prompt_and_spec(model: Any, args: RLHFArgs | None, **changes: Any) -> tuple[Any, Any]:
    """Return a prompt and the sampling spec of a run, or of a model, with changed settings."""
    from rlhf_lab.sampling import SamplingSpec
    from rlhf_lab.training.prompts import Prompts

    settings = OF_MODELS if args is None else {name: getattr(args, name) for name in OF_RUNS}
    settings = RLHFArgs(**settings | changes)
    return Prompts(settings, None, model), SamplingSpec.from_args(settings, model.tokenizer)


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
    from rlhf_lab.models import export_adapter, export_policy
    from rlhf_lab.training import RunDir
    from rlhf_lab.training.model_card import write_run_card
    from rlhf_lab.training.resume import checkpoint_name, load_policy

    prepare(out)
    policy, args = load_policy(directory, checkpoint)
    if adapter:
        export_adapter(policy.base_model, args.base_model, out)
        print_line(f"written to {out} in PEFT's format for {args.base_model}")
        return 0
    out, gap = export_policy(policy, args.base_model, out, args.critic_path)
    write_run_card(RunDir.open(directory), out, checkpoint_name(checkpoint))
    print_line(format_written(out, gap))
    return 0
