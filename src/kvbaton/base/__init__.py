"""The words everything else is written in: ids, errors, the clock protocol."""
