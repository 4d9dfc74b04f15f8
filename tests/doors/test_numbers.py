"""Numbers of all commands: out of range, not finite, huge, tiny, and written in other ways."""

from pathlib import Path

import pytest

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from tests.doors.door import refused, untouched

OF_COMMANDS = {
    "sample RUN -n 0": ("n=0", "1 or greater"),
    "sample RUN -n -3": ("n=-3", "1 or greater"),
    "sample RUN -n 1.5": ("-n", "1.5"),
    "sample RUN -n many": ("-n", "many"),
    "sample RUN -n 1000000000000000000000000000000": ("n=1000", "too large"),
    "sample RUN --seed 1.5": ("--seed", "1.5"),
    "sample RUN --gen-len 0": ("gen_len=0", "at least 1"),
    "sample RUN --gen-len 31": ("gen_len=31", "32"),
    "sample RUN --gen-len 9999999999999999999999": ("gen_len=9999999999999999999999", "32"),
    "sample RUN --temperature 0": ("temperature=0.0", "1e-6 or greater"),
    "sample RUN --temperature nan": ("temperature=nan", "finite"),
    "sample RUN --temperature inf": ("temperature=inf", "finite"),
    "sample RUN --temperature -1": ("temperature=-1.0", "1e-6 or greater"),
    "sample RUN --top-k 0": ("top_k=0", "1 or greater"),
    "sample RUN --top-k -1": ("top_k=-1", "1 or greater"),
    "train-reward --pairs reel --out made --steps 0": ("steps=0", "1 or greater"),
    "train-reward --pairs reel --out made --steps -1": ("steps=-1", "1 or greater"),
    "train-reward --pairs reel --out made --steps 1.0": ("--steps", "1.0"),
    "train-reward --pairs reel --out made --batch-size 0": ("batch_size=0", "1 or greater"),
    "train-reward --pairs reel --out made --learning-rate 0": ("learning_rate=0.0", "greater"),
    "train-reward --pairs reel --out made --learning-rate nan": ("learning_rate=nan", "finite"),
    "train-reward --pairs reel --out made --learning-rate 1e400": ("learning_rate=inf", "finite"),
    "train-reward --pairs reel --out made --held-out 0": ("held_out=0.0", "a share"),
    "train-reward --pairs reel --out made --held-out 1": ("held_out=1.0", "a share"),
    "train-reward --pairs reel --out made --held-out nan": ("held_out=nan", "a share"),
    "train-reward --pairs reel --out made --margin -1": ("margin=-1.0", "0 or greater"),
    "train-reward --pairs reel --out made --margin inf": ("margin=inf", "0 or greater"),
    "train-reward --pairs reel --out made --centering -1": ("centering=-1.0", "0 or greater"),
    "train-reward --pairs reel --out made --n-pairs 0": ("n_pairs=0", "at least 2"),
    "train-reward --pairs reel --out made --n-pairs 1": ("n_pairs=1", "at least 2"),
    "train-reward --pairs reel --out made --n-pairs -4": ("n_pairs=-4", "at least 2"),
    "sft --texts reel --out made --n-texts 0": ("n_texts=0", "1 or greater"),
    "sft --texts reel --out made --n-texts 1": ("1 example", "at least 2"),
    "sft --texts reel --out made --max-tokens 1": ("max_tokens=1", "at least 2"),
    "sft --texts reel --out made --max-tokens -7": ("max_tokens=-7", "at least 2"),
    "sft --texts reel --out made --samples -1": ("samples=-1", "0 or greater"),
    "sft --texts reel --out made --gen-len 0": ("gen_len=0", "1 or greater"),
    "sft --texts reel --out made --gen-len 99 --n-texts 8 --steps 1": ("gen_len=99", "32"),
    "sft --texts reel --out made --lora-rank -1": ("lora_rank=-1",),
    "sft --texts reel --out made --lora-rank 2 --lora-alpha nan --n-texts 8": ("lora_alpha=nan",),
    "sft --texts reel --out made --learning-rate -1": ("learning_rate=-1.0", "greater than 0"),
    "dpo --pairs reel --out made --beta 0": ("beta must", "got 0.0"),
    "dpo --pairs reel --out made --beta -1": ("beta must", "got -1.0"),
    "dpo --pairs reel --out made --beta nan": ("beta must", "got nan"),
    "dpo --pairs reel --out made --beta inf": ("beta=inf", "greater than 0"),
    "dpo --pairs reel --out made --label-smoothing 0.5": ("label_smoothing is 0.5", "below 0.5"),
    "dpo --pairs reel --out made --label-smoothing -0.1": ("label_smoothing is -0.1", "from 0"),
    "dpo --pairs reel --out made --kind dpo": ("invalid choice", "ipo"),
    "dpo --pairs reel --out made --steps 0": ("steps=0", "1 or greater"),
    "dpo --pairs reel --out made --held-out 2": ("held_out=2.0", "a share"),
    "dpo --pairs reel --out made --gen-len 99 --n-pairs 8 --steps 1": ("gen_len=99", "32"),
    "kto --examples reel --out made --beta 0": ("beta must", "got 0.0"),
    "kto --examples reel --out made --beta inf": ("beta=inf", "greater than 0"),
    "kto --examples reel --out made --good-weight -1": ("good_weight must", "got -1.0"),
    "kto --examples reel --out made --bad-weight nan": ("bad_weight must", "got nan"),
    "kto --examples reel --out made --bad-weight inf": ("bad_weight=inf", "0 or greater"),
    "kto --examples reel --out made --n-pairs 8 --batch-size 1": ("batch_size=1", "at least 2"),
    "kto --examples reel --out made --n-pairs 1": ("n_pairs=1", "at least 2"),
    "kto --examples reel --out made --max-tokens 1 --n-pairs 8": ("max_tokens=1", "at least 2"),
    "orpo --pairs reel --out made --odds-weight -1": ("odds_weight must", "got -1.0"),
    "orpo --pairs reel --out made --odds-weight nan": ("odds_weight must", "got nan"),
    "orpo --pairs reel --out made --odds-weight inf": ("odds_weight=inf", "0 or greater"),
    "orpo --pairs reel --out made --steps 0": ("steps=0", "1 or greater"),
    "resume RUN --kl-coef -1": ("kl_coef=-1.0", "0 or greater"),
    "resume RUN --kl-coef nan": ("kl_coef=nan", "finite"),
    "resume RUN --base-lr inf": ("base_lr=inf", "finite"),
    "resume RUN --base-lr 1e400": ("base_lr=inf", "finite"),
    "resume RUN --head-lr -1": ("head_lr=-1.0", "0 or greater"),
    "resume RUN --save-every 0": ("save_every=0", "1 or greater"),
    "resume RUN --total-phases 0": ("total_phases=0", "1 or greater"),
    "resume RUN --total-phases 1": ("total_phases=1",),
    "resume RUN --total-phases two": ("--total-phases", "two"),
    "export RUN made --checkpoint -1": ("number out of range",),
    "export RUN made --checkpoint 1.0": ("1.0", "is not a checkpoint"),
    "export RUN made --checkpoint 7": ("phase_000007",),
    "export RUN made --checkpoint 1000000000000000000": ("number out of range",),
}
TOO_LARGE = f"1{'0' * 30}"
"""More than a size of a tensor can be."""
LARGE = {
    f"{command} {TOO_LARGE}": (f"{command.split()[-1][2:].replace('-', '_')}={TOO_LARGE}", "large")
    for command in (
        "train --batch-size",
        "train --batches-per-learning-phase",
        "train --gen-len",
        "train --keep-checkpoints",
        "train --save-every",
        "train --total-phases",
        "resume RUN --total-phases",
        "train-reward --pairs reel --out made --n-pairs",
        "train-reward --pairs reel --out made --steps",
        "train-reward --pairs reel --out made --batch-size",
        "sft --texts reel --out made --n-texts",
        "sft --texts reel --out made --samples",
        "dpo --pairs reel --out made --batch-size",
        "dpo --pairs reel --out made --n-pairs",
    )
} | {
    "train --base-lr 1e300": ("base_lr=1e+300", "too large"),
    "train --kl-coef 1e300": ("kl_coef=1e+300", "too large"),
    "train --temperature 1e300": ("temperature=1e+300", "too large"),
    "resume RUN --kl-coef 1e300": ("kl_coef=1e+300", "too large"),
    "train-reward --pairs reel --out made --margin 1e300": ("margin=1e+300", "too large"),
    "train-reward --pairs reel --out made --learning-rate 1e300": ("1e+300", "too large"),
    "dpo --pairs reel --out made --beta 1e300": ("beta=1e+300", "too large"),
    "kto --examples reel --out made --good-weight 1e300": ("good_weight=1e+300", "too large"),
    "orpo --pairs reel --out made --odds-weight 1e300": ("odds_weight=1e+300", "too large"),
    "train-reward --pairs reel --n-pairs 8 --steps 3 --out made --learning-rate 1e30": (
        "learning_rate=1e+30",
        "lower",
    ),
    "sft --texts reel --n-texts 8 --samples 0 --steps 3 --out made --learning-rate 1e30": (
        "learning_rate=1e+30",
        "lower",
    ),
}
NOT_FINITE = {
    f"{option} {value}": (f"{option[2:].replace('-', '_')}={float(value)!r}", "finite")
    for option in ("--base-lr", "--kl-coef", "--temperature", "--clip-coef")
    for value in ("nan", "inf", "-inf", "1e400")
}
IN_OTHER_WORDS = {
    "--batch-size 16.0": ("--batch-size", "16.0"),
    "--batch-size 1e2": ("--batch-size", "1e2"),
    "--batch-size 0x10": ("--batch-size", "0x10"),
    "--batch-size 16k": ("--batch-size", "16k"),
    "--batch-size=": ("--batch-size",),
    "--batch-size True": ("--batch-size", "True"),
    "--batch-size None": ("--batch-size", "None"),
    "--batch-size ½": ("--batch-size", "½"),
    "--base-lr 1,5": ("--base-lr", "1,5"),
    "--base-lr 0x1p-3": ("--base-lr", "0x1p-3"),
    "--base-lr 1e": ("--base-lr", "1e"),
    "--base-lr fast": ("--base-lr", "fast"),
    "--base-lr None": ("--base-lr", "None"),
    "--top-k none": ("--top-k", "none"),
    "--stop-at-eos maybe": ("maybe",),
    "--seed 1.5": ("--seed", "1.5"),
    "--total-phases 9" + "9" * 5000: ("--total-phases",),
}
TAKEN = {
    "--batch-size 1_024": ("batch_size", 1024),
    "--batch-size +32": ("batch_size", 32),
    "--batch-size 032": ("batch_size", 32),
    "--base-lr 1": ("base_lr", 1.0),
    "--base-lr .5": ("base_lr", 0.5),
    "--base-lr 5e-5": ("base_lr", 5e-5),
    "--base-lr 1e-400": ("base_lr", 0.0),
    "--kl-coef -0.0": ("kl_coef", 0.0),
    "--seed 9223372036854775807": ("seed", 2**63 - 1),
    "--top-k None": ("top_k", None),
    "--top-p 1": ("top_p", 1.0),
    "--total-phases 1000000000": ("total_phases", 10**9),
    "--total_phases 7": ("total_phases", 7),
    "--total-phases 5 --total-phases 7": ("total_phases", 7),
}


@pytest.mark.parametrize("command", OF_COMMANDS | LARGE)
def test_a_number_that_a_command_cannot_take(here: Path, command: str) -> None:
    with untouched(here):
        refused(command.split(), *(OF_COMMANDS | LARGE)[command])


def test_a_model_that_cannot_be_read_again_is_kept_aside(here: Path) -> None:
    command = "sft --texts reel --n-texts 8 --samples 0 --steps 1 --out made --learning-rate 1e37"
    refused(command.split(), "nan or inf", "made was not written", "made-unverified")
    assert not (here / "made").exists() and (here / "made-unverified").is_dir()


@pytest.mark.parametrize("options", NOT_FINITE | IN_OTHER_WORDS, ids=lambda text: text[:40])
def test_a_number_of_a_run_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(["train", *options.split()], *(NOT_FINITE | IN_OTHER_WORDS)[options])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", TAKEN)
def test_a_number_in_another_form_means_what_python_means_by_it(options: str) -> None:
    name, value = TAKEN[options]
    call = parse(["train", *options.split()])
    args = next(a for a in (*call.args, *call.keywords.values()) if isinstance(a, RLHFArgs))
    assert getattr(args, name) == value
