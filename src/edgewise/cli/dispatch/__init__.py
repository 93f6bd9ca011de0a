"""``edgewise dispatch``: which backend runs each operator of a transformer; one file a command."""

from edgewise.cli.main import Command

COMMANDS = {
    "trace": Command(
        "edgewise.cli.dispatch.trace:trace", "Show a model's operators, shapes and data flow."
    ),
    "measure": Command(
        "edgewise.cli.dispatch.measure:measure",
        "Measure operators on every backend here, and switching.",
    ),
    "plan": Command(
        "edgewise.cli.dispatch.plan:plan", "Choose a backend for each operator, and say why."
    ),
    "replay": Command(
        "edgewise.cli.dispatch.replay:replay",
        "Compare ways to choose, on measured costs: time, energy, switches.",
    ),
    "run": Command(
        "edgewise.cli.dispatch.run:run", "Run a mixed plan for real: predicted against measured."
    ),
}
