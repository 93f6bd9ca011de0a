"""Edgewise runs neural networks on small machines so that answers arrive in time."""
