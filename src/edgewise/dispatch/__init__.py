"""Decider 2: which backend runs each operator or segment, with the cost of switching counted."""
