"""The text of the results page around its tables; it holds no figure of a run."""

INTRODUCTION = """\
# What the methods reach

Written by `python -m benchmarks.results` from the records in
`benchmarks/results/`, one .jsonl file per part; no figure in a table is typed
by hand. The command makes the runs that are not there yet, tells how long they will take, and goes
on where it was stopped; `--only methods`, `--only loophole`, `--only learned` make one part,
`--page` writes the page again. A run whose settings or bundled weights have changed is made anew.
Real models take part when their directories are given with `--language-model DIR --classifier DIR`.
"""

METHODS = """\
## Seven methods on Reel

Each row is the preset `reel`, 20 phases of 256 reviews, with the fields below. The classifier pays;
the *true reward* is the exact posterior that a review is positive, and 0 for a text that is no
review, over 1,024 fresh samples after training: the mean over the seeds, and from the lowest to the
highest. *KL* is exact, in nats per review. *Frontier* is the true reward of the exact optimum that
has this KL, measured from the grammar; *distance* is what is missing to it. *Grammatical* and *of
those, true reward* split the true reward in two: it is their product. *LoRA* trains adapters of
rank 8 on all matrices; *adaptive* steers the weight of the KL towards 1.2 nats per review. The
number beside it
is that weight in the end: lowered while the KL is below its target, raised by a fifth a phase from
then on, it comes into force when most steps are already taken.
"""

FALLS_SHORT = """\
Where a row stays below the frontier, the two last columns say by what. The classifier has never
seen a text that is no review and pays it as any other, so that nothing holds the policy to the
grammar but the KL; and beyond the KL at which the frontier is flat, a nat more buys nothing there,
while policies found by samples still spend it.
"""

UNHELD = """\
### A learning phase that nothing ends

With earlier weights of the language model, REINFORCE++ was first run without `target_kl`, and one
run of this row left the language. Its reviews were nearly all positive by then, so that the rewards
of a batch hardly differed; REINFORCE++ whitens what differs, noise as well, and one learning phase
took the policy to texts that are no reviews, which the classifier pays as well as before.
`target_kl`, which ends such a phase after its first steps, was then set for every row of
REINFORCE++ above; the other methods have run without. Below is the same row with today's weights,
with which no run left it.
"""

LOOPHOLE = """\
## The planted loophole

`smoothed_popcorn` pays for a positive review, at most 0.86, and up to 1 for any review that says
popcorn, which has nothing to do with its sentiment. The KL is in the reward (k1), so that what is
maximised is `E[reward] - kl_coef KL` itself, whose exact optimum is known: as the price of KL
falls, the proxy rises, popcorn takes over, and the true reward falls. PPO learns sentiment first,
which the policy tries often, and popcorn later, which it says in 2 reviews of 100: the true reward
rises above the optimum's, then falls while the proxy goes on rising. Where the KL is in the reward
and not a term of the loss, nothing else holds a learning phase back, hence `target_kl`.
"""

LEARNED = """\
## The same in a reward model that was learned

Nobody planted this one. `train-reward` is given pairs of reviews from a rater who prefers positive
ones, but not surely (with probability sigmoid(d / 4), d the difference of the logits of the true
reward), and in which popcorn only ever ends a positive review that was preferred, half of them. The
reward model then pays for popcorn whatever the review says. Its rewards are clipped at one standard
deviation. The exact optimum is that of its mean reward by what a review says: its positive clauses,
its verdict, popcorn or not; clipped alike. A model is trained for each seed. How much popcorn alone
is
worth to it depends on the language model that it starts from: with earlier weights of that one it
was 1.35, popcorn took over as above, and the true reward fell to 0.86; with today's weights it is
worth less, and the true reward holds.
"""

REAL = """\
## A real model: plain, with adapters, in bf16

The preset `smol`, whose reward is the probability that a review is negative, of 16 texts a phase
and for a few phases only, so that the reward shows no more than a trend. Each run is a process of
its own. *Peak* is the most memory of the process in phase 0, and in any phase, less that after
loading policy, reference and classifier; *loaded* includes Python and its packages. *Weights* are
those of policy and reference, each counted once; with adapters the reference is the policy without
them. bf16 is of the matrix products: weights, gradients and the optimiser's state stay in fp32, so
that only activations shrink, which are little beside gradients and state (three times the weights
that learn).
"""

ALGORITHMS_TEXT = """\
## What did each algorithm change?

PPO, GRPO, DPO and SFT from one base, compared at the same KL: 1.5 nats per review, 0.2 more or
less, exact, on 1,024 texts of the model's own. Of PPO and GRPO it is the weights before that phase
of the run at which the KL was nearest; of DPO and SFT a whole run with as many steps as land there.
PPO and GRPO are paid by the classifier; SFT learns the best of 16 samples of the base by the same
classifier, 512 times; DPO reviews of the grammar, judged by a rater who knows the true reward
(5,000 pairs, beta 0.5), and so learns from other texts than its own. *Own weights* to *read-out*
are the causes of the shift of logit(loved) - logit(hated) before the verdict, over 256 reviews of
the grammar; they sum to the shift. *Stable rank* and the number of directions *for 90 %* of the
energy are medians over the matrices. Means over seeds, and from the lowest to the highest.
"""

GRAFTS_TEXT = """\
What the change of a group earns by itself in the base (put in), and what it costs to take it out of
the tuned model, in true reward over 256 texts with the same noise:
"""
