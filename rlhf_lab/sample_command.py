"""The command `sample`: a run or a model continues a prompt, or answers it in a chat.

What needs torch is imported within the functions, so that `--help` starts without it.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from tyro.conf import FlagCreatePairsOff, Positional, arg

from rlhf_lab.commands import Checkpoint, Device
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, SEED, check_range
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError, LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lab.chat import Message
    from rlhf_lab.samples import Samples
    from rlhf_lab.sampling import SamplingSpec

DEFAULT_GEN_LEN = 26


def write_samples(
    model: Positional[str],
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
    """Let a model write: a trained run, a bundled model, a directory or a hub id.

    Args:
        model: A run's directory, a bundled name (reel-nano), a Hugging Face directory or a hub id.
        prompt: What to continue; the run's own prefix when not given.
        n: How many samples.
        gen_len: Tokens to generate; the run's own, or 26.
        temperature: Logits are divided by this; the run's own, or 1.
        top_k: Sample from the k likeliest tokens; the run's own, or all.
        seed: Seeds the sampling noise.
        chat: Put the prompt as a user's turn into the tokenizer's chat template; a run as it did.
        system_prompt: The system message of the chat; the run's own when not given.
    """
    import torch

    from rlhf_lab.models import TransformerWithValueHead, load_model
    from rlhf_lab.models.device import pick_device
    from rlhf_lab.rewards.model import refuse_reward_model
    from rlhf_lab.sampling import SamplingSpec, check_context, sample
    from rlhf_lab.training.diagnostics import broken_weight
    from rlhf_lab.training.restore import load_policy

    if n < 1:
        raise ConfigError(f"n={n} is too small; ask for at least 1 sample.")
    check_range(AT_LEAST_1, n=n)
    check_range(SEED, seed=seed)
    place, args = pick_device(device), None
    if Path(model).is_dir() and not Path(model, "config.json").exists():
        policy, args = load_policy(model, checkpoint, place)
        spec = SamplingSpec.from_args(args, policy.base_model.tokenizer)
    else:
        refuse_reward_model(model)
        policy = TransformerWithValueHead(load_model(model, device=place))
        spec = SamplingSpec(DEFAULT_GEN_LEN, stop_at_eos=True)
    given = {"gen_len": gen_len, "temperature": temperature, "top_k": top_k}
    spec = replace(spec, **{name: value for name, value in given.items() if value is not None})
    asked = ask(policy.base_model.tokenizer, args, spec, prompt, chat, system_prompt)
    check_context(policy.base_model, len(asked.tokens), spec.gen_len)
    broken = broken_weight(policy)
    if broken:
        raise LoadError(f"the weight {broken} of {model!r} holds nan or inf; use a whole model.")
    noise = torch.Generator().manual_seed(seed)
    samples = sample(policy, [asked.tokens] * n, asked.spec, noise)
    if not samples.logprobs[samples.mask].isfinite().all():
        raise ConfigError(
            f"{model!r} gives nan at temperature={spec.temperature}; raise it, such as to 1."
        )
    _show(samples, policy.base_model.tokenizer, asked, args, place)
    return 0


class Asked(NamedTuple):
    """What a model is asked.

    Args:
        prompt: as it is shown, rendered where it is a chat.
        tokens: its ids, with at most one BOS.
        spec: with the chat template's end of a turn among the stop tokens, in a chat.
        turns: the messages of a chat; None otherwise.
    """

    prompt: str
    tokens: list[int]
    spec: "SamplingSpec"
    turns: "list[Message] | None"


def ask(
    tokenizer: "PreTrainedTokenizerBase",
    args: RLHFArgs | None,
    spec: "SamplingSpec",
    prompt: str | None = None,
    chat: bool = False,
    system_prompt: str | None = None,
) -> Asked:
    """A prompt as a run would have given it to its policy, or as a model is given one.

    Args:
        args: of the run, whose prefix, chat and system prompt count where others are not given;
            None for a model that is of no run.

    Raises:
        ConfigError: a system prompt without a chat.
    """
    from rlhf_lab.chat import read_turns, render_chat, template_stops, with_system
    from rlhf_lab.sampling import tokenize_prompts

    in_chat = chat or bool(args and args.chat)
    system_prompt = system_prompt or (args.system_prompt if args else None)
    if system_prompt is not None and not in_chat:
        raise ConfigError("system_prompt is a message of a chat; give --chat, too.")
    if prompt is None:
        prompt = args.prefix if args else ""
    if not in_chat:
        (tokens,) = tokenize_prompts(tokenizer, [prompt], args.prepend_bos if args else True)
        return Asked(prompt, tokens, spec, None)
    if not (args and args.chat):  # the spec of a run in a chat has them
        spec = replace(spec, stop_tokens=(*spec.stop_tokens, *template_stops(tokenizer)))
    turns = with_system(read_turns(prompt, "the prompt", "user"), system_prompt)
    rendered = render_chat(tokenizer, turns, "the prompt")  # the template puts a BOS, or none
    (tokens,) = tokenize_prompts(tokenizer, [rendered], prepend_bos=False)
    return Asked(rendered, tokens, spec, turns)


def _show(
    samples: "Samples",
    tokenizer: "PreTrainedTokenizerBase",
    asked: Asked,
    args: RLHFArgs | None,
    place: object,
) -> None:
    """Print the texts; those of a run with their rewards, unless these ask for right answers."""
    from rich.console import Console

    from rlhf_lab.rewards import TextBatch, load_reward, requires_answers, score_batch
    from rlhf_lab.rewards.conversation import chat_answers
    from rlhf_lab.views import sample_table

    texts = samples.texts(tokenizer)
    reward_fn = load_reward(args, place) if args else None
    if reward_fn is None or requires_answers(reward_fn):  # a custom prompt has none
        print_line("\n".join(texts))
        return
    written = TextBatch(texts, samples.prompt_texts(tokenizer))
    if asked.turns is not None:
        answers = chat_answers(samples, tokenizer, asked.spec.stops(tokenizer))
        written = TextBatch.in_chat([asked.turns] * len(texts), answers)
    rewards = score_batch(reward_fn, written).rewards.tolist()
    Console().print(sample_table(texts, rewards, asked.prompt))
