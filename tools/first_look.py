"""The README's figure: one review in the loop of RLHF, drawn from a real run."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab import functional as F
from rlhf_lab.cli_runner import run_program
from rlhf_lab.files import write_marked
from rlhf_lab.probes.reel_truth import ReelTruth
from rlhf_lab.training.rollout import Rollout
from rlhf_lab.views.marks import Number, ink_on, pick_color, tag, text, text_width
from rlhf_lab.views.pictures import Picture

PREFIX, REVIEWS = 3, 64  # <bos> this movie; reviews to choose from
LEFT, MARGIN = 190, 100  # left and right of the tokens
BLOCKS = {"block 0: attention, then MLP": 230, "block 1: attention, MLP": 190, "final norm": 152}
HOOKS = {
    "hook_embed": 263,
    "blocks.0.hook_resid_post": 222,
    "blocks.1.hook_resid_post": 182,
    "ln_final.hook_normalized": 142,
}
ALT = (
    "One review in the loop: frozen reference, policy with hook points, value head and sentiment "
    "classifier; below, KL and advantage of each token before training and after some phases, and "
    "the exact advantage"
)
CAPTION = (
    "A real run, python -m rlhf_lab train --seed 1. Circles are hook points, where each activation "
    "can be read, patched or steered during training.",
    "KL is spent on the words that decide. GAE blames every token of this review; by the exact "
    "advantage, only a few words change the expected reward.",
)


class Row(NamedTuple):
    """A number of each generated token."""

    title: str
    label: str
    values: Float[Tensor, " gen"]
    total: str


def draw(
    out: Path = Path("docs/first-look.svg"), seed: int = 1, phases: int = 8, review: int = 14
) -> int:
    """Train on Reel for some phases, and draw how the policy reads one review before and after.

    Args:
        out: The file to write.
        seed: Seed of the run.
        phases: Phases to train.
        review: Number of the review, of 64 from the grammar.
    """
    trainer, truth = RLHFTrainer(RLHFArgs(preset="reel", seed=seed)), ReelTruth()
    tokens, tokenizer = truth.reviews(REVIEWS)[0][review, None], trainer.tokenizer
    reward = trainer.reward_fn(tokenizer.batch_decode(tokens, skip_special_tokens=True))
    kl_rows, advantage_rows = [], []
    while trainer.phase <= phases:
        rollout = trainer.rollout_phase()
        if trainer.phase in (0, phases):
            label = f"phase {trainer.phase}"
            kl, advantage = read(trainer, rollout, tokens, reward)
            kl_rows.append(Row("KL to the reference", label, kl, f"sum {kl.sum():.2f}"))
            mean = f"mean {advantage.mean():.2f}"
            advantage_rows.append(Row("advantage", label, advantage, mean))
        trainer.learning_phase(rollout)
        trainer.phase += 1
    exact = truth.generated(tokens, PREFIX)[1][0]
    exact_row = Row("advantage", "exact, by the grammar", exact, f"sum {exact.sum():.2f}")
    words = tokenizer.convert_ids_to_tokens(tokens[0])[1:]
    write_marked(out, figure(words, reward.item(), [*kl_rows, *advantage_rows, exact_row]))
    print(f"written: {out}")
    return 0


@torch.no_grad()
def read(
    trainer: RLHFTrainer,
    rollout: Rollout,
    tokens: Int[Tensor, "1 seq"],
    reward: Float[Tensor, " 1"],
) -> tuple[Float[Tensor, " gen"], Float[Tensor, " gen"]]:
    """Compute the KL, and the advantages in units of the reward, of each token of a review.

    The values are of standardized rewards; the rollout's mean and deviation convert them.
    """
    logits, states = trainer.policy(tokens)
    both = [F.generated_logits(x, PREFIX) for x in (logits, trainer.reference(tokens))]
    kl = F.kl_per_token(*map(F.log_probs, both))
    values = F.generated_values(states, PREFIX)
    values = values * rollout.raw_rewards.std() + rollout.raw_rewards.mean()
    at_end = F.token_rewards(reward, torch.ones_like(values, dtype=torch.bool))
    return kl[0].abs(), F.compute_gae(values, at_end, lam=trainer.args.gae_lambda)[0]


def figure(words: Sequence[str], reward: float, rows: Sequence[Row]) -> str:
    """Draw the models above the words of a review, and the numbers of each token below."""
    widths = [max(34.0, text_width(word) + 8) for word in words]
    starts = [LEFT + sum(widths[:i]) for i in range(len(words) + 1)]
    parts = _models([x + width / 2 for x, width in zip(starts, widths, strict=False)], reward)
    for i, (word, x, width) in enumerate(zip(words, starts, widths, strict=False)):
        parts.append(
            tag("rect", class_="paper s5", x=x + 1, y=290, width=width - 2, height=22, rx=4)
        )
        parts.append(text(x + width / 2, 305, word, "soft" * (i < PREFIX - 1), "middle"))
    parts.append(text(LEFT - 12, 305, "one review", "title", "end"))
    y, drawn = 330.0, ""
    for title, label, values, total in rows:
        if title != drawn:
            drawn, y = title, y + 18
            parts.append(text(LEFT - 12, y - 4, title, "title", "end"))
        limit = max(row.values.abs().max().item() for row in rows if row.title == title)
        parts.append(text(LEFT - 12, y + 17, label, "soft", "end"))
        parts.append(text(starts[-1] + 8, y + 16, total.replace("-", "−"), "soft"))
        kind = "sequential" if title.startswith("KL") else "diverging"
        for i, value in enumerate(values.tolist(), PREFIX - 1):
            color = pick_color(value, limit, kind)
            tile = {"x": starts[i] + 1, "y": y, "width": widths[i] - 2, "height": 24, "rx": 3}
            mark = tag("rect", class_="axis", fill=color.hex, **tile)
            if abs(value) >= 0.05:
                number = f"{value:.2f}".replace("0.", ".").replace("-", "−")
                place = {"x": starts[i] + widths[i] / 2, "y": y + 16, "text_anchor": "middle"}
                mark += tag("text", tag("tspan", number, fill=ink_on(color).hex), **place)
            hint = tag("title", f"{words[i]}, {title}, {label}: {value:.3f}")
            parts.append(tag("g", hint, mark))
        y += 28
    parts += [text(LEFT, y + 20 + 16 * i, line, "soft") for i, line in enumerate(CAPTION)]
    return Picture((starts[-1] + MARGIN, y + 48), parts, ALT).svg


def _models(middles: Sequence[Number], reward: float) -> list[str]:
    """Draw reference, policy, value head and classifier above the words."""
    width, last = middles[-1] - LEFT + 20, middles[-1]
    unembed, head, judge = middles[2] - 20, middles[9], last - 205
    parts = [_box(LEFT - 4, 12, width + 8, 30, "s5", "the same weights as in phase 0")]
    parts.append(_box(LEFT - 4, 132, width + 8, 142, "s1"))
    parts += [_line(x, 288, x, 134, "s1", 0.35) for x in middles]
    parts += [_box(LEFT + 4, y, width - 8, 22, "s1", name) for name, y in BLOCKS.items()]
    parts.append(text(LEFT - 12, 31, "frozen reference", "title", "end"))
    parts.append(text(LEFT - 12, 118, "policy, in training", "title", "end"))
    for name, y in HOOKS.items():
        parts.append(tag("circle", class_="paper s5", cx=middles[0], cy=y, r=4))
        parts.append(text(LEFT - 12, y + 4, name, "soft", "end"))
    parts.append(_box(unembed, 80, 170, 32, "s1", "unembedding: π(next token)"))
    x = unembed + 60
    parts += [_arrow(x, 132, 113, 1), _arrow(x, 80, 43, 5)]
    parts.append(text(unembed + 70, 66, "KL(π ‖ reference), a price per token", "title"))
    parts.append(_box(head, 80, 200, 32, "s2", "value head, on a hook: V(state)"))
    x = head + 40
    parts += [_arrow(x, 142, 113, 2), _arrow(last, 288, 113, 4)]
    parts.append(tag("circle", class_="paper s2", cx=head + 40, cy=142, r=4))
    parts.append(_box(judge, 80, 220, 32, "s4", f"sentiment classifier: reward {reward:.3f}"))
    middle = (head + 200 + judge) / 2
    parts.append(text(middle, 100, "advantage", "title", "middle"))
    parts.append(_line(head + 202, 96, middle - 36, 96, "s2"))
    return [*parts, _line(middle + 36, 96, judge - 2, 96, "s4")]


def _box(x: Number, y: Number, width: Number, height: Number, kind: str, words: str = "") -> str:
    frame = tag("rect", class_=f"paper {kind}", x=x, y=y, width=width, height=height, rx=6)
    return frame + text(x + width / 2, y + height / 2 + 4, words, "", "middle")


def _line(x1: Number, y1: Number, x2: Number, y2: Number, kind: str, opacity: Number = 1) -> str:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", class_=kind, **ends, stroke_opacity=opacity)


def _arrow(x: Number, below: Number, above: Number, color: int) -> str:
    head = f"{x:.1f},{above} {x - 4:.1f},{above + 9} {x + 4:.1f},{above + 9}"
    line = _line(x, below, x, above, f"s{color}")
    return line + tag("polygon", class_=f"f{color}", points=head)


if __name__ == "__main__":
    sys.exit(run_program(draw, "tools.first_look"))
