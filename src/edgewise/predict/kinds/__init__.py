"""Kinds of predictors, one file each, found by name."""
