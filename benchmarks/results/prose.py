"""The text of the results page around its tables; numbers of runs are filled in."""

INTRODUCTION = """\
# Results of the methods

On Reel, you can compare each method with the exact optimum. Numbers are means over five seeds, with
the range in brackets.
"""

METHODS = """\
## Methods on Reel

PPO and the estimators that share its settings get closest to the exact optimum. Most published
methods get nearly as close with their papers' settings, but not ReMax and OPO. CISPO, which has no
KL penalty, stops writing grammatical reviews in four of five seeds. The classifier cannot detect
this, because it was only trained on reviews.

Each dot is a run of 20 phases of 256 reviews, with the preset `reel`. The distance is the gap
between the policy's true reward (1,024 new samples) and the highest possible one at the same KL.
Rows in lower case are [published methods](settings.md#methods); ReMax has a lower learning rate,
because it diverges at the preset's. An "estimator" row uses its method's advantages and PPO's other
settings.
"""

ALT = "Distance from the exact optimum of each method and seed, with mean true reward and KL"

PPO_NUMBERS = """\
With PPO, the default for `train`, the true reward rises from {:.3f} to {}, and the
KL is {} nats per review.
"""

VARIANT_NUMBERS = """\
Over the seven rows with PPO's settings, the mean true reward is {:.3f} by default, {:.3f} with
rank-8 adapters on all matrices, {:.3f} with a KL controller that targets 1.2 nats per review, and
{:.3f} with both.
"""

OPTIONS = """\
To reproduce a published method, run `python -m rlhf_lab train --method NAME`. For the other rows,
see `benchmarks/results/settings.py`.
"""

LOOPHOLE = """\
## A planted loophole

With the reward `smoothed_popcorn`, a positive review scores at most 0.86, but any review that
ends in popcorn can score up to 1. PPO learns sentiment first, because only about 2% of the
untrained policy's reviews end in popcorn. For a while, PPO's true reward is even higher than that
of the exact optimum at the same KL. Later, it falls while the proxy reward keeps rising.

The KL penalty is part of the reward (k1), so the objective is `E[reward] - kl_coef KL`. The first
table shows averages over the last five of 40 phases, with the exact optimum in parentheses:
"""

PHASES_TEXT = """\
The second table shows phases at `kl_coef={:g}`, with the exact optimum at the same KL:
"""

LEARNED = """\
## A loophole in a learned reward model

A reward model can also learn a loophole from biased pairs, but here it does little harm. Each seed
has a reward model trained on 10,000 pairs, in which half of the preferred positive reviews end in
popcorn, and no other reviews do. Popcorn adds {:.2f} standard deviations to the reward. After 40
phases of PPO with `kl_coef={:g}`, only {:.0%} of the reviews end in popcorn ({:.0%} for the exact
optimum), and the true reward is {:.3f} ({:.3f}).
"""

REAL = """\
## A real model: all weights, adapters, bf16

Training adapters instead of all weights cuts the peak memory to about a quarter. On a CPU, bf16
saves almost no memory, because weights, gradients and optimizer state stay in fp32.

Each row is a single run of SmolLM2-135M-Instruct for six phases with the preset `smol`. *Loaded* is
the process's memory with all models loaded, and *peak* is the peak memory minus *loaded*. With 16
texts per phase, the rewards only indicate a trend.
"""

REAL_OPTIONS = """\
For the LoRA row, add `--lora-rank 8 --lora-targets W_Q,W_K,W_V,W_O --base-lr 0.0003`. For the
bf16 row, add `--precision bf16`.
"""

ALGORITHMS_TEXT = """\
## Changes made by each algorithm

At the same KL, PPO and GRPO get a higher true reward than SFT and DPO. In all four, the sentiment
logits shift mainly because the components' own weights changed, not because their inputs did.

All runs stop at an exact KL between 1.3 and 1.7 nats per review. PPO and GRPO (with PPO's other
settings) maximize the classifier's reward. SFT trains on 512 texts, each the classifier's favorite
among 16 samples, and DPO (beta 0.5) on 5,000 pairs from a rater who knows the true reward. The last
four columns split the shift of logit(loved) - logit(hated) before the verdict:
"""

REPLICATES_TEXT = """\
If you add a single component's weight change to the base model, the first MLP's change raises the
reward the most in {} of {} runs.
"""

AGAIN = """\
## Repeating the runs

`python -m benchmarks.results` trains every run that has no record in `benchmarks/results/` yet, and
then writes this page. `--only methods` trains just that part.
"""
