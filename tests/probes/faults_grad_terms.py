"""Faults that are planted in GradTerms, one line each, to see whether a record's checks tell."""

from tests.probes.planting import Fault

TAKE = "grad_terms:term_gradients"
LOOK = "grad_terms:GradTerms.observe"
MULTIPLY = "grad_terms:gradient_products"

GRAD_TERMS = tuple(
    Fault(name, "GradTerms", *rest)
    for name, *rest in (
        ("G1 sign of the value loss", TAKE, "sign * term, list", "abs(sign) * term, list"),
        (
            "G2 terms in another order",
            LOOK,
            '"terms": list(GRADIENT_TERMS)',
            '"terms": list(GRADIENT_TERMS)[::-1]',
        ),
        (
            "G3 groups one late",
            LOOK,
            '"groups": [*groups.names, "all"]',
            '"groups": [*groups.names[1:], groups.names[0], "all"]',
        ),
        ("G4 squared norms", LOOK, ".clamp(min=0).sqrt()\n", ".clamp(min=0)\n"),
        ("G5 cosines without the norms", LOOK, "cosines_of(products)", "products"),
        (
            "G6 cosines of other terms",
            LOOK,
            '"cosines": cosines_of(products)',
            '"cosines": cosines_of(products).roll(1, 0)',
        ),
        (
            "G7 groups of the cosines rolled",
            LOOK,
            '"cosines": cosines_of(products)',
            '"cosines": cosines_of(products).roll(1, -1)',
        ),
        (
            "G8 norms of other terms",
            LOOK,
            '"norms": norms.float()',
            '"norms": norms.flip(0).float()',
        ),
        (
            "G9 the whole is the mean of the groups",
            LOOK,
            "products.sum(-1, keepdim=True)",
            "products.mean(-1, keepdim=True)",
        ),
        (
            "G10 the KL's weight forgotten",
            LOOK,
            "ctx.minibatch, seen.objective, ctx.kl_coef",
            "ctx.minibatch, seen.objective, 1.0",
        ),
        (
            "G11 half of the minibatch",
            LOOK,
            "ctx.minibatch, seen.objective",
            "ctx.minibatch[torch.arange(len(ctx.minibatch.mask) // 2)], seen.objective",
        ),
        (
            "G12 first term alone in the products",
            MULTIPLY,
            "for gradient in gradients]",
            "for gradient in [gradients[0]] * 4]",
        ),
    )
)
