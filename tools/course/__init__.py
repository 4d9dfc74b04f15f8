"""Course authoring: notebooks built from the masters, and the check that they are complete."""
