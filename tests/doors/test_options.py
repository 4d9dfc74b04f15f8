"""Options, paths and texts that commands reject: one row per kind of mistake."""

from pathlib import Path

import pytest

from tests.doors.door import TRAIN, accepted, refused, untouched

LONG, HALF = "x" * 300, "\udcff"
OPTIONS = {
    "preset without a name": (["train", "--preset"], ["--preset", "train --help"]),
    "checkpoint as a power": (["sample", "RUN", "--checkpoint", "²"], ["is not a checkpoint"]),
    "checkpoint of 5000 digits": (["sample", "RUN", "--checkpoint", "7" * 5000], ["checkpoint"]),
    "checkpoint elsewhere": (["sample", "RUN", "--checkpoint", "../last"], ["is not a checkpoint"]),
    "checkpoint unknown": (["sample", "RUN", "--checkpoint", "lsat"], ["No checkpoint"]),
    "more samples than memory": (["sample", "RUN", "-n", "9" * 14], ["memory"]),
    "train, long": ([*TRAIN, "--out", "x" * 5000], ["characters", "too long"]),
    "resume, long": (["resume", LONG], ["300 characters"]),
    "report to a long name": (["report", "RUN", "--out", LONG], ["too long"]),
    "sft of a long name": (["sft", "--texts", LONG, "--out", "made"], ["too long"]),
    "export to a long name": (["export", "RUN", LONG], ["too long"]),
    "sample of no user": (["sample", "~nouser"], ["~nouser"]),
    "prompts of no user": ([*TRAIN, "--prompts", "~nouser/p.txt"], ["~nouser/p.txt"]),
    "half a character to score": (["score", f"good {HALF}"], ["UTF-8"]),
    "half a character to sample": (["sample", "RUN", "--prompt", f"this {HALF}"], ["prompt"]),
    "half a character as prefix": ([*TRAIN, "--prefix", f"this {HALF}"], ["prompt"]),
    "half a character in JSON": ([*TRAIN, "--prompts", "half.jsonl"], ["prompt"]),
    "a text of every kind": (["score", "a great movie", "<b>[/b]", "\x1b[31m"], []),
}
UNKNOWN = {
    f"{command} --colour red": ("--colour", f"`rlhf_lab {command.split()[0]} --help`")
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
}
COMMANDS = UNKNOWN | {
    "": ("train", "resume", "doctor"),
    "tran": ("tran",),
    "resume": ("The run's directory", "resume --help"),
    "sample": ("sample --help",),
    "report": ("report --help",),
    "export RUN": ("export --help",),
    "train-reward": ("--pairs", "--out"),
    "sft --out made": ("--texts",),
    "dpo --out made": ("--pairs",),
    "orpo": ("--pairs", "--out"),
    "kto --out made": ("--examples",),
    "train RUN": ("RUN",),
    "export RUN made more": ("more",),
    "doctor all": ("all",),
    "train --batch-size": ("--batch-size",),
    "train --no-seed": ("--no-seed",),
    "train --tot 3": ("--tot",),
    "train --learning-rate 1e-3": ("--learning-rate",),
    "score good --direction up": ("up", "pos"),
    "score good --device tpu": ("device='tpu'", "auto, cpu"),
    "score good --reward-fn kindness": ("kindness", "choose sentiment"),
    "sample RUN --device cuda:99": ("device='cuda:99'",),
    "sft --texts reel --out made --device tpu": ("device='tpu'", "auto, cpu"),
    "dpo --pairs reel --out made --base-model ./nowhere": ("./nowhere", "model directory"),
    "sft --texts nowhere.txt --out made": ("texts='nowhere.txt'", "No such file"),
    "kto --examples nowhere.jsonl --out made": ("examples='nowhere.jsonl'", "No such file"),
    "train-reward --pairs Reel --out made": ("pairs='Reel'", "No such file"),
    "sft --texts hub: --out made": ("hub:", "hub:NAME"),
    "resume RUN --seed 3": ("--seed", "resume --help"),
    "resume RUN --preset reel": ("--preset", "resume --help"),
    "resume RUN --out made": ("--out",),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_command_rejects_option(here: Path, name: str) -> None:
    (here / "half.jsonl").write_text('{"prompt": "this \\ud800 film"}\n' * 4)
    arguments, words = OPTIONS[name]
    if words:
        refused(arguments, *words)
    else:
        accepted(arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_misspelled_command_is_rejected_in_one_line(here: Path, command: str) -> None:
    with untouched(here):
        message = refused(command.split(), *COMMANDS[command]).sentences[0]
    assert "---" not in message and "helptext" not in message
