"""Numbers and findings in words that never claim more than the data say."""

from __future__ import annotations

from dataclasses import dataclass

from edgewise.report.records import DemoReport, PolicySummary, SceneReport, wilson_interval

HERO = "edgewise"
_BASELINES = ("full_depth", "full-depth", "full depth", "full")


def format_share(share: float | None) -> str:
    """Write a share in per cent; only all is 100 %, and only nothing is 0 %.

    Example:
        >>> format_share(0.9844), format_share(0.99999), format_share(1.0), format_share(None)
        ('98.4 %', '99.9 %', '100 %', '–')
    """
    if share is None:
        return "–"
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    return f"{min(99.9, max(0.1, 100.0 * share)):.1f} %"


def say_policy(policy: str) -> str:
    """Write the name of a policy as a person would.

    Example:
        >>> say_policy("full_depth")
        'full depth'
    """
    return policy.replace("_", " ").replace("-", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What a demo found: one sentence, and the ranking behind it.

    Attributes:
        text: The finding.
        detail: How all policies did in the same scene; empty when there is nothing to compare.
        scene: The scene it speaks of; empty when no request was made.
    """

    text: str
    detail: str = ""
    scene: str = ""


def headline(report: DemoReport, *, hero: str = HERO) -> Headline:
    """Say what a demo found, from its summaries alone.

    Speaks of the first scene with a background load in which the hero answered requests, else of
    its first scene. The ranking is by answers that were right and in time, or in time where there
    are no labels, best first, whoever that is.

    Args:
        report: The demo.
        hero: The policy that the sentence is about.
    """
    scenes = {scene.name: scene for scene in report.scenes}
    loaded = [name for name, scene in scenes.items() if scene.load_spans]
    rows = [row for row in report.summaries if row.policy == hero and row.dsr is not None]
    rows.sort(key=lambda row: row.scene not in loaded)  # stable: else the first scene
    if not rows:
        return Headline(text=f"No request was answered by {say_policy(hero)}.")
    row = rows[0]
    scene = scenes.get(row.scene)
    where = f"In the scene “{row.scene if scene is None else scene.title}”"
    if scene is not None and scene.load_spans:
        where = f"With other programs busy for {_busy_s(scene):.2g} of {scene.duration_s:.2g} s"
    text = f"{where}, {say_policy(hero)} answered {format_share(row.dsr)} of {row.requests} "
    text += "requests in time"
    if row.accuracy is not None:
        text += f" at {format_share(row.accuracy)} accuracy"
    others = [
        other
        for other in report.summaries
        if other.scene == row.scene and other.policy != hero and other.dsr is not None
    ]
    full = next((other for other in others if other.policy in _BASELINES), None)
    if full is not None:
        text += f"; {say_policy(full.policy)} {format_share(full.dsr)}"
        if full.accuracy is not None:
            text += f" at {format_share(full.accuracy)}"
    detail = _ranking(row, others)
    if scene is not None and others:
        detail += _while_busy(scene)
    return Headline(text=text + ".", detail=detail, scene=row.scene)


def _busy_s(scene: SceneReport) -> float:
    """How long at least one background load ran."""
    busy_s, until_s = 0.0, 0.0
    for span in sorted(scene.load_spans, key=lambda span: span.start_s):
        stop_s = min(span.stop_s, scene.duration_s)
        busy_s += max(0.0, stop_s - max(span.start_s, until_s))
        until_s = max(until_s, stop_s)
    return busy_s


def _while_busy(scene: SceneReport) -> str:
    """How many of the requests that arrived during a load were answered in time."""
    met: dict[str, list[bool]] = {}
    for point in scene.points:
        if any(span.start_s <= point.start_s < span.stop_s for span in scene.load_spans):
            met.setdefault(point.policy, []).append(point.met)
    if not met:
        return ""
    shares = {policy: sum(seen) / len(seen) for policy, seen in met.items()}
    listed = ", ".join(
        f"{say_policy(policy)} {format_share(share)}"
        for policy, share in sorted(shares.items(), key=lambda item: -item[1])
    )
    return f" Of the requests that arrived while those programs ran, in time: {listed}."


def _ranking(hero: PolicySummary, others: list[PolicySummary]) -> str:
    if not others:
        return ""
    rows = [hero, *others]
    labelled = all(row.accuracy_in_time is not None for row in rows)

    def score(row: PolicySummary) -> float:
        return (row.accuracy_in_time if labelled else row.dsr) or 0.0

    rows.sort(key=score, reverse=True)
    what = "Right and in time" if labelled else "In time"
    listed = ", ".join(f"{say_policy(row.policy)} {format_share(score(row))}" for row in rows)
    first, second = rows[:2]
    low, _ = wilson_interval(score(first), first.requests)
    _, high = wilson_interval(score(second), second.requests)
    chance = ""
    if high >= low:
        chance = " The 95 % intervals of the first two overlap: their order may be chance."
    return f"{what}: {listed}.{chance}"
