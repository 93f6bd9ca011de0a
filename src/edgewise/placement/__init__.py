"""Decider 3: whose prefix runs on the shared accelerator, and who gets which cores."""
