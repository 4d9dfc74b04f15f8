"""Course authoring: notebooks built from the masters, and the gate that proves them complete."""
