from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from edgewise.report.page import best_of, render_demo_page
from edgewise.report.records import DemoReport, PolicySummary, RequestPoint, summarise
from edgewise.report.wording import format_share
from edgewise.units import format_duration

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jinja2") is None, reason="jinja2 is not installed"
)

_VOID = {"meta", "br", "link", "img", "hr", "input"}


class Outline(HTMLParser):
    """Checks that tags are nested well and collects what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def with_points(report: DemoReport, *points: RequestPoint) -> DemoReport:
    scene = replace(report.scenes[1], points=points)
    return replace(report, scenes=(scene,), summaries=tuple(summarise(points)))


def test_the_page_is_well_formed_and_shows_each_policy_and_scene(report: DemoReport) -> None:
    found = outline(render_demo_page(report))

    for word in ("full depth", "static table", "branchynet", "edgewise"):
        assert word in found.text
    for scene in report.scenes:
        assert scene.title in found.text
        assert scene.description in found.text
    for word in ("One", "1 thread", "edgewise demo", "The machine was noisy.", "measured"):
        assert word in found.text


def test_every_request_has_a_mark_with_words(report: DemoReport) -> None:
    page = render_demo_page(report)

    assert page.count("deepest that fits") == 80
    assert page.count(", too late") == 15
    assert page.count('href="#late"') == 15 + len(report.scenes)  # and one in each legend


def test_the_page_asks_nothing_of_the_network(report: DemoReport) -> None:
    page = render_demo_page(report)
    found = outline(page)

    assert "//" not in page
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(found.tags)
    references = [v for _, n, v in found.attributes if n in {"href", "src", "xlink:href"}]
    assert all(reference.startswith("#") for reference in references)
    assert "url(" not in page
    assert "@import" not in page


def test_what_others_named_is_escaped_everywhere(report: DemoReport) -> None:
    evil = '<script>alert("1")</script>'
    points = [replace(p, policy=evil, reason=evil) for p in report.scenes[1].points[:4]]
    evil_report = with_points(report, *points)
    scene = replace(
        evil_report.scenes[0],
        title=evil,
        description=evil,
        load_spans=tuple(replace(s, label=evil) for s in report.scenes[1].load_spans),
    )
    evil_report = replace(
        evil_report,
        scenes=(scene,),
        title=evil,
        backend=evil,
        thread_policy=evil,
        command=evil,
        created=evil,
        device={evil: evil},
        model={evil: evil},
        notes=(evil,),
        exit_table=tuple(replace(row, name=evil) for row in report.exit_table),
    )
    page = render_demo_page(evil_report, hero=evil)

    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "script" not in outline(page).tags


def test_ids_are_unique_and_every_plot_has_a_name(report: DemoReport) -> None:
    page = render_demo_page(report)
    found = outline(page)

    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    labels = [value for _, name, value in found.attributes if name == "aria-labelledby"]
    assert set(labels) <= set(ids)
    pictures = re.findall(r'<(?:svg|span)[^>]*role="img"[^>]*>', page)
    assert pictures
    assert all("aria-label=" in picture for picture in pictures)
    assert found.tags.count("table") == found.tags.count("caption") == 2
    assert ("th", "scope", "row") in found.attributes


def test_light_dark_and_narrow_screens_are_provided_for(report: DemoReport) -> None:
    page = render_demo_page(report)

    assert "prefers-color-scheme: dark" in page
    assert "max-width: 700px" in page
    assert 'name="viewport"' in page


def test_unknown_accuracy_is_an_empty_cell_with_the_reason(report: DemoReport) -> None:
    points = [replace(p, correct=None) for p in report.scenes[1].points]
    page = render_demo_page(with_points(report, *points))

    assert page.count('<td class="none">no labels</td>') == 8 + 1  # 4 policies × 2, and one exit
    assert page.count('<td class="none">not measured</td>') == 2
    assert "None" not in page
    assert "nan" not in outline(page).text.split()


def test_a_scene_without_requests_says_so(report: DemoReport) -> None:
    scene = replace(report.scenes[0], points=(), load_spans=(), budget_line=())
    page = render_demo_page(replace(report, scenes=(scene,), summaries=()))
    found = outline(page)

    assert "No request was made in this scene" in found.text
    assert "No request was answered by edgewise." in found.text


def test_a_report_without_scenes_and_exits_is_still_a_page(report: DemoReport) -> None:
    bare = replace(report, scenes=(), summaries=(), exit_table=(), notes=(), device={}, model={})

    assert "No request was answered" in outline(render_demo_page(bare)).text


def test_refused_requests_have_a_shape_and_a_word_of_their_own(report: DemoReport) -> None:
    first, second = report.scenes[1].points[:2]
    refused = replace(
        second, policy=first.policy, exit_index=None, depth_ratio=None, correct=None, met=False
    )
    page = render_demo_page(with_points(report, first, refused))

    assert page.count('href="#refused"') == 2  # the mark and its legend
    assert ", refused" in page
    assert 'href="#refused"' not in render_demo_page(report)


def test_thinning_is_stated(report: DemoReport) -> None:
    points = [
        replace(p, start_s=p.start_s + 0.001 * i)
        for i in range(80)
        for p in report.scenes[1].points
    ]
    found = outline(render_demo_page(with_points(report, *points)))

    assert "Drawn: 1600 of 3200 requests, one in 2 of each policy" in found.text


def row(policy: str, dsr: float | None, p99_s: float | None) -> PolicySummary:
    return PolicySummary(
        scene="s",
        policy=policy,
        requests=10,
        dsr=dsr,
        accuracy=None,
        accuracy_in_time=None,
        mean_exit_depth_ratio=None,
        p50_s=None,
        p99_s=p99_s,
    )


def test_the_best_is_the_largest_share_and_the_smallest_time() -> None:
    rows = [row("a", 0.9, 0.010), row("b", 0.8, 0.005), row("c", None, None)]

    assert best_of(rows, "dsr", write=format_share) == "90.0 %"
    assert best_of(rows, "p99_s", write=format_duration) == "5 ms"
    assert best_of(rows, "accuracy", write=format_share) is None
    assert best_of(rows[:1], "dsr", write=format_share) is None


def test_equal_ones_are_all_best(report: DemoReport) -> None:
    page = render_demo_page(report)

    assert page.count('class="best"') >= 2 * 4  # accuracy is the same for all, in both scenes
