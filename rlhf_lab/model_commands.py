"""Commands that read a run or a model: sample and export.

Modules that need torch are imported in the functions, so that `--help` starts without them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from rlhf_lab.commands import Checkpoint, Device, RunDirectory, given
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, SEED, check_range
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.tuning_commands import format_written, prepare

ModelName = Annotated[
    Positional[str],
    arg(
        help="A run's directory, a bundled name (reel-nano), a Hugging Face directory or a hub id."
    ),
]
DEFAULT_GEN_LEN = 26


def is_run(model: str) -> bool:
    """Return True if a directory contains a run and not a model."""
    return Path(model).is_dir() and not Path(model, "config.json").exists()


def load_run_or_model(
    model: str, checkpoint: int | str, device: Any
) -> tuple[Any, RLHFArgs | None]:
    """Load the policy of a run with the run's settings, or a language model with None."""
    from rlhf_lab.models import TransformerWithValueHead, load_model
    from rlhf_lab.rewards.model import refuse_reward_model
    from rlhf_lab.training.diagnostics import broken_weight
    from rlhf_lab.training.restore import load_policy

    if is_run(model):
        policy, args = load_policy(model, checkpoint, device)
    else:
        refuse_reward_model(model)
        policy, args = TransformerWithValueHead(load_model(model, device=device)), None
    broken = broken_weight(policy)
    if broken:
        raise LoadError(f"The weight {broken} of {model!r} contains nan or inf.")
    return policy, args


def sample_command(
    model: ModelName,
    prompt: str | None = None,
    n: Annotated[int, arg(aliases=["-n"])] = 5,
    gen_len: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    chat: FlagCreatePairsOff[bool] = False,
    system_prompt: str | None = None,
) -> int:
    """Generate texts with a trained run, a bundled model, a directory or a hub id.

    Args:
        prompt: The text to continue; the run's prefix by default.
        n: Number of samples.
        gen_len: Tokens to generate; the run's, or 26.
        temperature: Logits are divided by this; the run's, or 1.
        top_k: Sample from the k most likely tokens; the run's, or all.
        seed: Seed of the sampling noise.
        chat: Render the prompt with the tokenizer's chat template, as a run in a chat always does.
        system_prompt: The system message of the chat; the run's by default.
    """
    import torch
    from rich.console import Console

    from rlhf_lab.models.device import pick_device
    from rlhf_lab.rewards import TextBatch, load_reward, requires_answers, score_batch
    from rlhf_lab.rewards.conversation import chat_answers
    from rlhf_lab.sampling import SamplingSpec, check_context, sample
    from rlhf_lab.views import sample_table

    check_range(AT_LEAST_1, n=n)
    check_range(SEED, seed=seed)
    place = pick_device(device)
    policy, args = load_run_or_model(model, checkpoint, place)
    tokenizer = policy.base_model.tokenizer
    spec = SamplingSpec(DEFAULT_GEN_LEN, stop_at_eos=True)
    if args is not None:
        spec = SamplingSpec.from_args(args, tokenizer)
    spec = replace(spec, **given(gen_len=gen_len, temperature=temperature, top_k=top_k))
    prompt, tokens, turns, spec = encode_prompt(tokenizer, args, spec, prompt, chat, system_prompt)
    check_context(policy.base_model, len(tokens), spec.gen_len)
    samples = sample(policy, [tokens] * n, spec, torch.Generator().manual_seed(seed))
    if not samples.logprobs[samples.mask].isfinite().all():
        raise ConfigError(f"The log-probs at temperature={spec.temperature} are nan. Raise it.")
    texts = samples.texts(tokenizer)
    reward_fn = load_reward(args, place) if args else None
    if reward_fn is None or requires_answers(reward_fn):  # a prompt has no right answer here
        print_line("\n".join(texts))
        return 0
    batch = TextBatch(texts, samples.prompt_texts(tokenizer))
    if turns is not None:
        responses = chat_answers(samples, tokenizer, spec.stops(tokenizer))
        batch = TextBatch.in_chat([turns] * n, responses)
    Console().print(sample_table(texts, score_batch(reward_fn, batch).rewards.tolist(), prompt))
    return 0


def encode_prompt(
    tokenizer: Any,
    args: RLHFArgs | None,
    spec: Any,
    prompt: str | None = None,
    chat: bool = False,
    system_prompt: str | None = None,
) -> tuple[str, list[int], list[dict[str, str]] | None, Any]:
    """Return a prompt as text and as token ids, the messages of a chat, and the sampling spec."""
    from rlhf_lab.chat import read_turns, render_chat, template_stops, with_system
    from rlhf_lab.sampling import tokenize_prompts

    in_chat = chat or bool(args and args.chat)
    system_prompt = system_prompt or (args.system_prompt if args else None)
    if system_prompt is not None and not in_chat:
        raise ConfigError("system_prompt requires a chat. Set --chat.")
    if prompt is None:
        prompt = args.prefix if args else ""
    if not in_chat:
        (tokens,) = tokenize_prompts(tokenizer, [prompt], args.prepend_bos if args else True)
        return prompt, tokens, None, spec
    if not (args and args.chat):  # the spec of a run in a chat has these stop tokens
        spec = replace(spec, stop_tokens=(*spec.stop_tokens, *template_stops(tokenizer)))
    turns = with_system(read_turns(prompt, "the prompt", "user"), system_prompt)
    rendered = render_chat(tokenizer, turns, "the prompt")
    (tokens,) = tokenize_prompts(tokenizer, [rendered], prepend_bos=False)
    return rendered, tokens, turns, spec


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
    from rlhf_lab.training.restore import checkpoint_name, load_policy

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
