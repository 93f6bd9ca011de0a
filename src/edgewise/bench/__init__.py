"""Loads, competitors and the measurements that compare them."""
