"""Descriptions of accelerators, one TOML file each."""
