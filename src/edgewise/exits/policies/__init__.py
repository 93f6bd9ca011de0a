"""One file per policy, found by name; each has ``make(inputs, **options)``."""
