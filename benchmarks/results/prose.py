"""What the page of results says around its tables; no figure of a run is in here."""

INTRODUCTION = """\
# What the methods reach

Written by `python -m benchmarks.results` from one JSON file per run in [results](results); no
figure in a table is typed by hand. The command makes the runs that are not there yet, one after
another, and goes on where it was stopped; `--only methods`, `--only loophole`, `--only learned`
make one part, `--page` writes the page again. Real models are made when their directories are given
with `--language-model DIR --classifier DIR`. Records that were made from other bundled weights or
other settings are made anew.
"""

METHODS = """\
## Seven methods on Reel

Each row is the preset `reel`, 20 phases of 256 reviews, with the fields below. The classifier pays;
*gold* is the exact posterior that a review is positive, and 0 for a text that is no review, over
1,024 fresh samples after training: the mean of the seeds, and from the lowest to the highest. *KL*
is exact, in nats per review. *Frontier* is the gold reward of the exact optimum that has this KL
(`rlhf_lab.organism.frontier`, the grammar being the reference), *distance* what is missing to it:
the price of finding a policy by samples. *Grammatical* and *of those, gold* split the gold reward
in two: their product is the gold reward. *LoRA* trains adapters of rank 8 on all matrices;
*adaptive* steers the weight of the KL towards 1.2 nats per review.
"""

FALLS_SHORT = ""

LOOPHOLE = """\
## The planted loophole

`soft_popcorn` pays for a positive review, softly, and a bonus for the word popcorn, which has
nothing to do with what a review says.
"""

LEARNED = """\
## The same in a reward model that was learned

Nobody planted this one.
"""

REAL = """\
## A real model, plain, with adapters, in bf16
"""
