"""Ways to find a plan, one file each; `edgewise.placement.search` finds them by name."""
