"""Selectors that learn from measured operators which backend suits others."""
