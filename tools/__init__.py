"""Tools of the makers, run from the repository's root; the package imports none of them."""
