"""Ways to choose backends, one file each; `edgewise.dispatch.search` finds them by name."""
