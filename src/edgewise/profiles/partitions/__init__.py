"""Partition profiles, one JSON file each."""
