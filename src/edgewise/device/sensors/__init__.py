"""Sensors, one file each, found by name. Each file has ``make(root)``."""
