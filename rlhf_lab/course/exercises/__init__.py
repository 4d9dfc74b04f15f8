"""The exercises of each lesson: cases, hints and slips, as data."""
