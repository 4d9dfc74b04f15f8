"""Tools for the maintainers, run from the repository's root; the package imports none of them."""
