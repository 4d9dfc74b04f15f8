"""Options, numbers and texts that commands reject: one row per rule or kind of mistake."""

from pathlib import Path

import pytest

from rlhf_lab.__main__ import parse
from tests.bad_input.command_outcome import TRAIN, rejected, run, untouched

SMALL = " ".join(TRAIN) + " --out made"
REWARD, SFT = "train-reward --pairs reel --out made", "sft --texts reel --out made"
COMPARE = "compare reel-nano reel-nano-b"
DPO = "dpo --pairs reel --out made"
UNPARSED = {  # tyro shows a panel
    "": ("train", "resume", "doctor"),
    "resume": ("The run's directory", "resume --help"),
    "train --tot 3": ("--tot",),
    "report RUN --out=": ("--out", "the path is empty"),
    "resume RUN --seed 3": ("--seed", "resume --help"),
    "score good --direction up": ("up", "pos"),
    "train --normalize-reward maybe": ("got 'maybe'", "--no-normalize-reward"),
    "train --prepend-bos=no": ("got 'no'. Use --prepend-bos or --no-prepend-bos.",),
    "train -gen-len 4": ("-gen-len has one dash. Use --gen-len.",),
    "train --learning-rate 1": ("--learning-rate is the name elsewhere", "base_lr and head_lr."),
    f"{SMALL} --value-head both": ("invalid choice", "both", "detached"),
}
REJECTED = {
    "score RUN/run.json": ("'RUN/run.json' is a file", "`score < RUN/run.json`"),
    "sample RUN --system-prompt x": ("system_prompt", "chat=False"),
    f"{SFT} --system-prompt x": ("system_prompt='x' has no effect with chat=False",),
    f"{COMPARE} --text RUN/run.json": ("not a list of objects",),
    f"{COMPARE} --text RUN/none.txt": ("No such file",),
    f"{COMPARE} --length 99": ("length=99", "between 1 and"),
    f"{COMPARE} --out none/new.json": ("Use a new file",),
    "compare none reel-nano": ("language model 'none'", "(no directory /", "/none; "),
    # options without effect
    f"{COMPARE} --column foo": ("column='foo'", "--text"),
    f"{COMPARE} --base-checkpoint 3": ("checkpoint=3", "'reel-nano'"),
    "sample reel-nano --checkpoint best": ("checkpoint='best'", "'reel-nano'"),
    "best-of-n reel-nano --steps 3": ("steps=3", "--fit"),
    f"{SFT} --column foo": ("'foo'", "only 'text'"),
    f"{SFT} --chat": ("texts='reel' has no conversations",),
    f"{DPO} --prompt-column foo": ("no column 'foo'",),
    f"{SFT} --lora-alpha 3": ("lora_alpha=3.0", "lora_rank"),
    "train --preset sums --reward-fn sentiment --reward-model reel-sentiment": ("not sums",),
    "sample reel-nano --prompt this.zebra": ("'this.zebra'", "number 1 of 1"),
    "best-of-n reel-nano --n 2 4 --samples 3": ("samples=3", "at least n=4"),
    "best-of-n reel-nano --reward-fn diversity:2": ("whole batch",),
    "best-of-n reel-nano --fit RUN": ("RUN",),
    "best-of-n reel-nano --n 1 --n-prompts 1 --out x --fit x": ("out='x' is also the --fit",),
    "best-of-n reel-nano --out RUN/run.json": ("RUN/run.json", "Use a new file"),
    # numbers
    "sample RUN --temperature 1e-39": ("temperature=1e-39",),  # 0 in single precision
    "sample RUN --seed -1": ("seed", "2**63 - 1"),
    f"sample RUN -n {'9' * 14}": ("MemoryError",),
    f"{REWARD} --n-pairs 1": ("n_pairs=1", "at least 2"),
    f"{REWARD} --n-pairs 8 --steps 3 --learning-rate 1e30": ("learning_rate=1e+30", "ower"),
    f"{SFT} --gen-len 99 --n-texts 8 --steps 1": ("gen_len=99", "32"),
    "orpo --pairs p.jsonl --out made --n-pairs 4": ("'p.jsonl' is read whole", "Omit --n-texts"),
    "export RUN made --checkpoint 1.0": ("1.0", "is not a checkpoint"),
    # settings
    f"{SMALL} --device tpu": ("device='tpu'", "auto, cpu"),
    f"{SMALL} --reward-fn learned": ("reel-sentiment", "train-reward"),
    f"{SMALL} --reward-model reel-nano": ("is a GPT2LMHeadModel", "as reward_model"),
    f"{SMALL} --base-model reel-sentiment": ("not a language model", "as base_model"),
    f"{REWARD} --base-model reel-sentiment": ("not a language model",),
    f"{DPO} --base-model reel-sentiment": ("not a language model",),
    f"{SMALL}{'x' * 5000}": ("too long",),
    f"{SMALL} --base-model RUN": ("RUN", "export"),
    f"{SMALL} --value-head separate --critic-path reel-nano": ("reel-nano", "train-reward"),
    f"{SMALL} --stop-tokens xyzzy": ("stop_tokens='xyzzy'", "not one token", "Use"),
    "sample https://huggingface.co/gpt2": ("https",),
    "sample RUN/checkpoints/last.safetensors": ("last.safetensors", "of a checkpoint, its run."),
    "sample ~nouser": ("~nouser",),
}


@pytest.mark.parametrize("command", REJECTED, ids=lambda command: command[-60:])
def test_command_rejects_option_and_writes_nothing(here: Path, command: str) -> None:
    with untouched(here):
        rejected(command.split(), *REJECTED[command])


@pytest.mark.parametrize("command", UNPARSED)
def test_command_line_that_cannot_be_parsed_names_the_option(here: Path, command: str) -> None:
    with untouched(here):
        outcome = run(command.split())
    text = " ".join(outcome.err.split())
    assert outcome.status == 2 and all(word in text for word in UNPARSED[command]), text


def test_repeated_option_warns() -> None:
    for options in ("--record 0 --record=1", "--no-stop-at-eos --stop_at_eos"):
        with pytest.warns(UserWarning, match="option (record|stop_at_eos) is repeated; only the l"):
            parse(["train", *options.split()])


def test_model_with_nan_is_written_under_another_name(here: Path) -> None:
    command = f"{SFT} --n-texts 8 --samples 0 --steps 1 --learning-rate 1e37"
    rejected(command.split(), "nan or inf", "made was not written", "made-unverified")
    assert not (here / "made").exists() and (here / "made-unverified").is_dir()
