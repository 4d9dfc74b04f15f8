"""Write docs/settings.md: every field of RLHFArgs by group, with its defaults and meaning.

python docs/make_settings.py
"""

import dataclasses
import re
from pathlib import Path

from rlhf_lab.commands import read_help
from rlhf_lab.config import GROUPS, RLHFArgs
from rlhf_lab.config.presets import NO_CRITIC, PAPER_METHODS

HEAD = """\
# Settings

Every field of `RLHFArgs` is also an option of `python -m rlhf_lab train`: `batch_size` becomes
`--batch-size`. If the preset `reel`, which `train` uses by default, has another value, it is in
parentheses. `None` disables a setting unless noted otherwise.
"""
PAPERS = {
    "ppo": "Schulman et al. 2017, 1707.06347; same as preset `reel`",
    "grpo": "Shao et al. 2024, 2402.03300",
    "dr_grpo": "Liu et al. 2025, 2503.20783",
    "rloo": "Ahmadian et al. 2024, 2402.14740",
    "reinforce++": "Hu 2025, 2501.03262",
    "remax": "Li et al. 2023, 2310.10505",
    "opo": "Hao et al. 2025, 2505.23585",
    "dapo": "Yu et al. 2025, 2503.14476",
    "gspo": "Zheng et al. 2025, 2507.18071",
    "cispo": "MiniMax 2025, 2506.13585",
    "gkd": "Agarwal et al. 2023, 2306.13649; on-policy, with the reverse KL",
}
METHODS_TEXT = """\
## Methods

`RLHFArgs(method="grpo")` and `train --method grpo` apply the settings of the method's paper, except
for learning rates, `batch_size`, `target_kl` and fields that you set yourself. The run logs a
warning if your settings differ from the paper's (for numbers, by more than a factor of 10). With
`dataclasses.replace` or `--config run.json`, a method or preset does not change other fields,
because all of them are already set.

`dr_grpo`, `opo`, `dapo`, `gspo` and `cispo` were published without a KL penalty, so watch the KL.
`dapo` lacks the paper's filter for overlong responses. `cispo` uses ScaleRL's upper clip (5; arXiv
2510.13786) and no lower clip. `gkd` has a [teacher](running.md#distillation) and no reward.
Every method except `ppo` also sets {no_critic}.

| method | paper (arXiv) | values that differ from the defaults |
|---|---|---|
"""
TABLE = ["| field | default | meaning |", "|---|---|---|"]


def page() -> str:
    """Format the whole page."""
    no_critic = ", ".join(f"`{name}={value!r}`" for name, value in NO_CRITIC.items())
    methods = METHODS_TEXT.format(no_critic=no_critic)
    methods += "\n".join(map(_method_row, PAPER_METHODS)) + "\n"
    return "\n".join([HEAD, *("\n".join(_section(*item)) for item in GROUPS.items()), methods])


def _method_row(name: str) -> str:
    """Format a method, its paper, and the settings that it sets."""
    plain = RLHFArgs()
    specific = {
        field: value
        for field, value in PAPER_METHODS[name].items()
        if field not in NO_CRITIC and value != getattr(plain, field)
    }
    settings = ", ".join(f"`{field}={value!r}`" for field, value in specific.items())
    return f"| `{name}` | {PAPERS[name]} | {settings} |"


def _section(title: str, group: type) -> list[str]:
    """Format a heading and a table with a row per field."""
    lines = [f"## {title[0].upper()}{title[1:]}", "", *TABLE]
    plain, reel, meanings = RLHFArgs(), RLHFArgs(preset="reel"), read_help()
    for field in dataclasses.fields(group):
        name, literal = field.name, re.search(r"Literal\[(.*?)\]", str(field.type))
        default, changed = getattr(plain, name), getattr(reel, name)
        in_reel = "" if changed == default else f" (`{changed!r}`)"
        values = f" Choices: {literal[1].replace(chr(39), '`')}." if literal else ""
        meaning = meanings[name].replace("; off when None.", ".")
        cells = f"`{name}`", f"`{default!r}`{in_reel}", meaning + values
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    path = Path(__file__).parent / "settings.md"
    path.write_text(page(), encoding="utf-8")
    print(f"written: {path}")
