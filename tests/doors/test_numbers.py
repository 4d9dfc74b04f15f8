"""Numbers that commands reject, one or two per option, and forms of numbers that they take."""

from pathlib import Path

import pytest

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from tests.doors.door import refused, untouched

REWARD, SFT = "train-reward --pairs reel --out made", "sft --texts reel --out made"
DPO, KTO = "dpo --pairs reel --out made", "kto --examples reel --out made"
ORPO = "orpo --pairs reel --out made"
REJECTED = {
    "sample RUN -n 0": ("n=0", "1 or greater"),
    "sample RUN -n many": ("-n", "many"),
    "sample RUN --gen-len 0": ("gen_len=0", "1 or greater"),
    "sample RUN --gen-len 31": ("gen_len=31", "32"),
    "sample RUN --temperature nan": ("temperature=nan",),
    "sample RUN --top-k 0": ("top_k=0", "1 or greater"),
    "sample RUN --seed -1": ("seed", "below 2**63"),
    f"{REWARD} --steps 0": ("steps=0", "1 or greater"),
    f"{REWARD} --steps 1.0": ("--steps", "1.0"),
    f"{REWARD} --learning-rate nan": ("learning_rate=nan",),
    f"{REWARD} --held-out 1": ("held_out=1.0",),
    f"{REWARD} --margin inf": ("margin=inf", "0 or greater"),
    f"{REWARD} --centering -1": ("centering=-1.0", "0 or greater"),
    f"{REWARD} --n-pairs 1": ("n_pairs=1", "at least 2"),
    f"{REWARD} --seed {2**63}": ("seed", "below 2**63"),
    f"{REWARD} --n-pairs 8 --steps 3 --learning-rate 1e30": ("learning_rate=1e+30", "lower"),
    f"{SFT} --n-texts 0": ("n_texts=0", "1 or greater"),
    f"{SFT} --n-texts 1": ("1 example", "at least 2"),
    f"{SFT} --max-tokens 1": ("max_tokens=1", "at least 2"),
    f"{SFT} --samples -1": ("samples=-1", "0 or greater"),
    f"{SFT} --gen-len 99 --n-texts 8 --steps 1": ("gen_len=99", "32"),
    f"{SFT} --lora-rank 2 --lora-alpha nan --n-texts 8": ("lora_alpha=nan",),
    f"{DPO} --beta 0": ("beta must", "got 0.0"),
    f"{DPO} --beta inf": ("beta=inf", "greater than 0"),
    f"{DPO} --label-smoothing 0.5": ("label_smoothing is 0.5", "below 0.5"),
    f"{DPO} --kind dpo": ("invalid choice", "ipo"),
    f"{KTO} --beta 0": ("beta must", "got 0.0"),
    f"{KTO} --good-weight -1": ("good_weight must", "got -1.0"),
    f"{KTO} --bad-weight inf": ("bad_weight=inf", "0 or greater"),
    f"{KTO} --n-pairs 8 --batch-size 1": ("batch_size=1", "at least 2"),
    f"{ORPO} --odds-weight nan": ("odds_weight must", "got nan"),
    "resume RUN --kl-coef -1": ("kl_coef=-1.0", "0 or greater"),
    "resume RUN --base-lr inf": ("base_lr=inf", "0 or greater"),
    "resume RUN --total-phases 1": ("total_phases=1",),
    "resume RUN --total-phases two": ("--total-phases", "two"),
    "export RUN made --checkpoint -1": ("number out of range",),
    "export RUN made --checkpoint 1.0": ("1.0", "is not a checkpoint"),
    "export RUN made --checkpoint 7": ("phase_000007",),
    "train --batch-size 16.0": ("--batch-size", "16.0"),
    "train --batch-size None": ("--batch-size", "None"),
    "train --base-lr 1,5": ("--base-lr", "1,5"),
    "train --top-k none": ("--top-k", "none"),
    "train --stop-at-eos maybe": ("maybe",),
    f"train --total-phases {'9' * 5000}": ("--total-phases",),
}
TAKEN = {
    "--batch-size 1_024": ("batch_size", 1024),
    "--base-lr 1": ("base_lr", 1.0),
    "--base-lr 5e-5": ("base_lr", 5e-5),
    "--kl-coef -0.0": ("kl_coef", 0.0),
    "--seed 9223372036854775807": ("seed", 2**63 - 1),
    "--top-k None": ("top_k", None),
    "--total_phases 7": ("total_phases", 7),
    "--total-phases 5 --total-phases 7": ("total_phases", 7),
}


@pytest.mark.parametrize("command", REJECTED, ids=lambda command: command[:60])
def test_command_rejects_number(here: Path, command: str) -> None:
    with untouched(here):
        refused(command.split(), *REJECTED[command])


def test_model_with_nan_is_written_under_another_name(here: Path) -> None:
    command = f"{SFT} --n-texts 8 --samples 0 --steps 1 --learning-rate 1e37"
    refused(command.split(), "nan or inf", "made was not written", "made-unverified")
    assert not (here / "made").exists() and (here / "made-unverified").is_dir()


@pytest.mark.parametrize("options", TAKEN)
def test_train_takes_other_forms_of_numbers(options: str) -> None:
    name, value = TAKEN[options]
    call = parse(["train", *options.split()])
    args = next(a for a in (*call.args, *call.keywords.values()) if isinstance(a, RLHFArgs))
    assert getattr(args, name) == value
