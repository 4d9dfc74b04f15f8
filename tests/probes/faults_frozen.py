"""Faults of FrozenProbe, written before looking whether the checks of its record tell."""

from tests.probes.planting import Fault

OBSERVE = "frozen_probe:FrozenProbe.observe"
STEER = "frozen_probe:FrozenProbe._steer"
READ = "frozen_probe:_read"
KIND = "FrozenProbe"

FROZEN = (
    Fault(
        "reader fitted to the policy",
        KIND,
        OBSERVE,
        "for acts in (first, x))",
        "for acts in (x, x))",
    ),
    Fault(
        "held-out rows in the fit",
        KIND,
        OBSERVE,
        "fit_direction(acts[:, :cut], labels[:cut])",
        "fit_direction(acts, labels)",
    ),
    Fault("sites in reverse order", KIND, OBSERVE, '"sites": sites,', '"sites": sites[::-1],'),
    Fault(
        "layer off by one",
        KIND,
        OBSERVE,
        "torch.stack([acts[site] for site in sites])",
        "torch.stack([acts[site] for site in sites]).roll(1, 0)",
    ),
    Fault(
        "position stored one early",
        KIND,
        OBSERVE,
        '"position": columns[0]',
        '"position": columns[0] - 1',
    ),
    Fault(
        "projections permuted",
        KIND,
        READ,
        "return projection, values",
        "return projection.flip(1), values",
    ),
    Fault("gap the wrong way round", KIND, READ, "right - anew.double()", "anew.double() - right"),
    Fault(
        "called counts what is right", KIND, READ, '"called": called.double()', '"called": right'
    ),
    Fault(
        "shift measured on the fitted rows",
        KIND,
        READ,
        "moved = x[:, cut:] - first[:, cut:]",
        "moved = x[:, :cut] - first[:, :cut]",
    ),
    Fault(
        "floor of the two thirds and themselves",
        KIND,
        READ,
        "in halves_of(sides)]",
        "in halves_of(sides)[:1] * 2]",
    ),
    Fault(
        "floor of overlapping halves",
        KIND,
        READ,
        "fit_direction(fitted_now[:, half], labels[:cut][half])",
        "fit_direction(fitted_now, labels[:cut])",
    ),
    Fault(
        "control judged on true labels",
        KIND,
        "frozen_probe:_control",
        "shuffled[cut:])",
        "labels[cut:])",
    ),
    Fault(
        "a leak: control fitted to the held rows too",
        KIND,
        "frozen_probe:_control",
        "fit_direction(x[:, :few], shuffled[:few])",
        "fit_direction(x, shuffled)",
    ),
    Fault(
        "steered at another layer",
        KIND,
        STEER,
        "        site,\n",
        '        "blocks.1.hook_resid_post",\n',
    ),
    Fault("steered the other way", KIND, STEER, "alpha * vector", "-alpha * vector"),
    Fault(
        "steered at every position",
        KIND,
        "steering:continue_steered",
        "torch.cat([act[:, :-1], act[:, -1:] + added[:, None].to(act)], 1)",
        "act + added[:, None].to(act)",
    ),
    Fault(
        "steered one position early",
        KIND,
        "steering:continue_steered",
        "torch.cat([act[:, :-1], act[:, -1:] + added[:, None].to(act)], 1)",
        "torch.cat([act[:, :-2], act[:, -2:-1] + added[:, None].to(act), act[:, -1:]], 1)",
    ),
    Fault(
        "random directions longer than d0",
        KIND,
        STEER,
        "vector.norm().float().cpu()",
        "vector.norm().float().cpu() * 2",
    ),
    Fault(
        "grammatical share is true reward's",
        KIND,
        STEER,
        "grammatical(texts).float()",
        "true_reward(texts)",
    ),
    Fault(
        "interval of 80 %",
        KIND,
        READ,
        "bootstrap_means(rows.T, resamples=RESAMPLES)",
        "bootstrap_means(rows.T, resamples=RESAMPLES, level=0.8)",
    ),
    Fault(
        "Bayes' accuracy of another slot",
        KIND,
        "frozen_probe:_bayes",
        "belief[cut:, pos] > 0.5",
        "belief[cut:, pos - 4] > 0.5",
    ),
)
