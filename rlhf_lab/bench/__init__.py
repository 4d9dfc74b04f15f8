"""How long a phase takes and what it needs, beside other ways of doing the same work."""
