"""Data sets by name: each file here is one, ``fashion_mnist.py`` is ``"fashion-mnist"``.

A file defines ``load(*, split, cache_dir) -> Dataset`` and is found by its name alone.
"""
