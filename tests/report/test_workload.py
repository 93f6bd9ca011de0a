from __future__ import annotations

import csv
import importlib.util
import io
import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from edgewise.placement.plan import Share
from edgewise.report.workload import (
    Figures,
    PlayedPlan,
    PlayedRequest,
    PlayedWorkload,
    TenantResult,
    error_ratio,
    finding,
    render_workload_page,
    requests_csv,
)

needs_jinja = pytest.mark.skipif(
    importlib.util.find_spec("jinja2") is None, reason="jinja2 is not installed"
)
_VOID = {"meta", "br", "link", "img", "hr", "input"}
NONE = Figures(mean_s=None, p95_s=None, p99_s=None, miss=None, dsr=None, cpu_busy=None)


def request(
    number: int, tenant: str, outcome: str = "answered", took_s: float = 0.02
) -> PlayedRequest:
    due_s = 0.1 * number
    return PlayedRequest(
        tenant=tenant,
        due_s=due_s,
        sent_s=due_s + 1e-4,
        done_s=due_s + took_s,
        outcome=outcome,  # type: ignore[arg-type]
        met=None if tenant == "<b>" else outcome == "answered" and took_s < 0.05,
        plan=number // 50,
        service_s=0.004,
        load_s=0.002,
        missed=True,
        reason="" if outcome == "answered" else "the queue is full",
    )


def shares(place: int) -> tuple[Share, ...]:
    return tuple(
        Share(
            tenant=name, place=place, cut="conv_7", cores=1, workers=1, threads=1, sram_bytes=1024
        )
        for name in ("door", "<b>")
    )


@pytest.fixture(name="played")
def make_played() -> PlayedWorkload:
    requests = [request(n, "door" if n % 2 else "<b>") for n in range(96)]
    requests += [request(96, "door", took_s=0.3), request(97, "door", "refused", 0.0)]
    seen = Figures(mean_s=0.02, p95_s=0.04, p99_s=0.05, miss=0.25, dsr=0.9, cpu_busy=0.125)
    said = replace(seen, mean_s=0.021)
    results = tuple(
        TenantResult(
            tenant=name,
            model="net",
            budget_s=budget_s,
            rate_per_s=5,
            requests=50,
            outcomes={"answered": 49, "refused": 1},
            predicted=replace(said, dsr=said.dsr if budget_s else None),
            observed=replace(seen, dsr=seen.dsr if budget_s else None),
        )
        for name, budget_s in (("door", 0.05), ("<b>", None))
    )
    plans = tuple(
        PlayedPlan(
            number=n,
            from_s=at_s,
            warm_s=0.5,
            drain_s=0.1,
            reason="rates changed" if n else "",
            residency="pinned",
            shares=shares(n),
        )
        for n, at_s in ((0, -1.0), (1, 5.0))
    )
    return PlayedWorkload(
        name="shop",
        objective="mean",
        queue="first come, first served",
        forecast="formulas",
        duration_s=10,
        warm_up_s=1,
        accelerator="tpu",
        accelerator_provenance="simulated",
        accelerator_busy=(0.2, 0.21),
        tenants=results,
        plans=plans,
        requests=tuple(requests),
        rates={"door": ((0.0, 4.0), (5.0, 6.0)), "<b>": ((0.0, 5.0),)},
        late_p99_s=1e-4,
        notes=("Some note.",),
    )


class Page(HTMLParser):
    """Tags that are open, and whatever would leave the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in {"href", "src"}]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in {"href", "src"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render(played: PlayedWorkload) -> Page:
    return Page(render_workload_page(played, command="edgewise run-workload x", created="today"))


@needs_jinja
def test_the_page_is_whole_and_asks_nothing_of_the_network(played: PlayedWorkload) -> None:
    page = render(played)
    assert not page.open
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)


@needs_jinja
def test_the_page_says_what_is_simulated_and_what_was_measured(played: PlayedWorkload) -> None:
    assert "accelerator simulated, CPU measured" in render(played).text
    alone = replace(played, accelerator=None, accelerator_busy=(None, None))
    assert "accelerator simulated" not in render(alone).text


@needs_jinja
def test_the_page_shows_predictions_plans_and_every_kind_of_end(played: PlayedWorkload) -> None:
    page = render(played)
    for words in (
        "predicted 21 ms (+5.0 %)",
        "predicted 20 %, observed 21 %",
        "rates changed",
        "place 1, 1 core",
        "1 KiB held",
        "1 refused of 50",
        "the queue is full",
        "Some note.",
    ):
        assert words in page.text
    assert page.links.count("#late") == 2  # the key and the one that was late
    assert page.links.count("#lost") == 2


@needs_jinja
def test_names_are_text_and_not_markup(played: PlayedWorkload) -> None:
    page = render(played)
    assert "<b>" in page.text


@needs_jinja
def test_an_early_end_stands_at_the_top(played: PlayedWorkload) -> None:
    assert (
        "Stopped early: after 4.0 of 10 s"
        in render(replace(played, stopped="after 4.0 of 10 s")).text
    )


@needs_jinja
def test_a_play_without_a_request_has_a_page(played: PlayedWorkload) -> None:
    tenants = tuple(
        replace(t, requests=0, outcomes={}, predicted=NONE, observed=NONE) for t in played.tenants
    )
    page = render(replace(played, requests=(), tenants=tenants, late_p99_s=None))
    assert "No request of shop was answered." in page.text


def test_the_finding_counts_and_compares(played: PlayedWorkload) -> None:
    text = finding(played)
    assert text.startswith("98 of 100 requests of 2 tenants were answered, in 20 ms on average")
    assert "predicted 21 ms (+5.0 %)" in text
    assert "90.0 % of those with a budget were in time" in text
    assert "1 change of plan, no lost requests" in text


def test_an_unstable_prediction_has_no_error(played: PlayedWorkload) -> None:
    first = played.tenants[0]
    unstable = replace(first, predicted=replace(first.predicted, mean_s=math.inf))
    text = finding(replace(played, tenants=(unstable, played.tenants[1])))
    assert "predicted ∞." in text
    assert error_ratio(math.inf, 0.02) is None


def test_every_request_is_a_line_of_csv(played: PlayedWorkload) -> None:
    rows = list(csv.DictReader(io.StringIO(requests_csv(played))))
    assert len(rows) == 98
    assert float(rows[96]["response_s"]) == pytest.approx(0.3)
    assert rows[97]["outcome"] == "refused"
    assert rows[0]["cpu_s"] == ""
    assert rows[0]["missed"] == "True"
