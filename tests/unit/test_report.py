from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from html import escape

import pytest

from blendserve.report import (
    POLICY_COLOURS,
    SHARES,
    Section,
    Table,
    heat_map,
    loss_bars,
    over_time,
    page,
    scaling_lines,
    sharing_bars,
    throughput_bars,
)
from blendserve.scheduling.policies import POLICIES
from blendserve.simulator import Calibration, Series, SimulationReport

pytest.importorskip("plotly")

REPORT = SimulationReport(
    workload="trace-1",
    policy="dual-scan",
    lengths="known",
    overlap="sequential",
    num_requests=100,
    num_tokens=50_000,
    makespan_s=10.0,
    tokens_per_s=5_000.0,
    optimum_s=8.5,
    optimum_ratio=0.85,
    sharing_ratio=0.4,
    sharing_kept_ratio=0.97,
    compute_s=6.0,
    memory_s=5.0,
    num_steps=300,
    min_steps=250,
    num_retracted=1,
    recomputed_ratio=0.01,
    mean_kv_usage_ratio=0.8,
    loss_ramp_ratio=0.01,
    loss_steady_ratio=0.02,
    loss_tail_ratio=0.03,
    loss_steps_ratio=0.04,
    loss_sharing_ratio=0.015,
    loss_recompute_ratio=0.025,
    loss_other_ratio=0.01,
    calibration=Calibration(
        [90, 10], [20.0, 900.0], [22.0, 1000.0], [5.0, 300.0], [20.0, 900.0], [40.0, 2000.0]
    ),
)
REPORTS = [
    REPORT,
    replace(REPORT, policy="dfs", optimum_ratio=0.70, sharing_kept_ratio=1.0),
    replace(REPORT, workload="trace-2", optimum_ratio=0.90, sharing_kept_ratio=0.95),
]
SERIES = Series(
    [2.5, 5.0, 10.0],
    [0.02, 0.03, 0.01],
    [0.01, 0.03, 0.04],
    [500.0, 400.0, 300.0],
    [10.0, 20.0, 5.0],
    [0.4, 1.0, 0.2],
)


def parts_of(text: str) -> tuple[str, int]:
    """The page without the drawing library, and how often the library was in it."""
    from plotly.offline import get_plotlyjs

    return text.replace(get_plotlyjs(), ""), text.count(get_plotlyjs())


def test_page_is_one_file_that_fetches_nothing() -> None:
    figures = [throughput_bars(REPORTS, "Throughput"), loss_bars(REPORTS, "Losses")]
    own, num_libraries = parts_of(page("Report", ["commit abc"], [Section("One", "Text", figures)]))
    assert num_libraries == 1
    assert not re.search(r"https?://|<link|@import|url\(|\bsrc\s*=", own)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', own))
    assert own.count("Plotly.newPlot(") == 2
    assert own.count("<style>") == 1


def test_header_says_simulated_and_where_the_numbers_come_from() -> None:
    own, _ = parts_of(page("Report", ["commit abc", "H200 <profile>"], []))
    header = own[own.index("<header>") : own.index("</header>")]
    assert "simulated" in header
    assert "commit abc" in header
    assert "H200 &lt;profile&gt;" in header


def test_page_holds_every_section_and_cell() -> None:
    table = Table(["policy", "tokens/s"], [["dual-scan", "5,000"], ["dfs", "4,100"]])
    sections = [Section("First", "one\n\ntwo", [], table), Section("Second", "", [over_time_figure()])]
    own, _ = parts_of(page("Report", [], sections))
    for title in ("First", "Second"):
        assert f"<h2>{title}</h2>" in own
    for heading in table.headings:
        assert f'<th scope="col">{heading}</th>' in own
    for row in table.rows:
        assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" in own
    assert "<p>one</p>\n<p>two</p>" in own


def over_time_figure():
    return over_time(replace(REPORT, series=SERIES))


def test_page_escapes_every_text() -> None:
    evil = "</script><script>alert('&')</script>"
    figure = throughput_bars([replace(REPORT, workload=evil)], evil)
    table = Table([evil], [[evil]])
    own, _ = parts_of(page(evil, [evil], [Section(evil, evil, [figure], table)]))
    assert evil not in own
    assert "<script>alert" not in own
    assert own.count(escape(evil)) == 9  # title, h1, provenance, link, h2, text, figure, heading, cell


def test_same_input_makes_the_same_page() -> None:
    sections = [Section("One", "", [loss_bars(REPORTS, "Losses")])]
    assert page("Report", [], sections) == page("Report", [], sections)


def test_page_leaves_the_figure_its_title() -> None:
    figure = loss_bars(REPORTS, "Losses")
    own, _ = parts_of(page("Report", [], [Section("One", "", [figure])]))
    assert "<h3>Losses</h3>" in own
    assert figure.layout.title.text == "Losses"


def test_throughput_bars_hold_the_ratios() -> None:
    figure = throughput_bars(REPORTS, "Throughput")
    bars = {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data}
    assert bars == {"dual-scan": {"trace-1": 0.85, "trace-2": 0.90}, "dfs": {"trace-1": 0.70}}
    assert [shape.y0 for shape in figure.layout.shapes] == [1.0]
    for words in ("5,000 tokens/s", "makespan 10.0 s", "sharing kept 97.0%", "extra steps 4.0%"):
        assert words in figure.data[0].hovertext[0]
    assert figure.layout.xaxis.title.text == "Workload (overlap sequential, lengths known)"


def test_every_combination_has_its_own_bar() -> None:
    reports = [REPORT, replace(REPORT, lengths="sampled"), replace(REPORT, overlap="pnorm 3")]
    figure = throughput_bars(reports, "Throughput")
    assert [bar.name for bar in figure.data] == [
        "dual-scan, sequential, lengths known",
        "dual-scan, sequential, lengths sampled",
        "dual-scan, pnorm 3, lengths known",
    ]
    assert {bar.marker.color for bar in figure.data} == {POLICY_COLOURS["dual-scan"]}
    assert len({bar.marker.pattern.shape for bar in figure.data}) == 3


@pytest.mark.parametrize("bars", [throughput_bars, sharing_bars, loss_bars])
def test_a_run_that_is_there_twice_is_refused(bars) -> None:
    with pytest.raises(ValueError, match="two reports of workload trace-1"):
        bars([REPORT, replace(REPORT, optimum_ratio=0.5)], "Bars")


def test_sharing_bars_hold_the_ratios() -> None:
    figure = sharing_bars(REPORTS, "Sharing")
    assert [list(bar.y) for bar in figure.data] == [[0.97, 0.95], [1.0]]


def test_loss_bars_add_up_to_the_makespan() -> None:
    figure = loss_bars([REPORT], "Losses")
    assert sum(bar.x[0] for bar in figure.data) == pytest.approx(1.0)
    assert [[*names] for names in figure.data[0].y] == [["trace-1"], ["dual-scan"]]


def test_every_loss_is_drawn() -> None:
    losses = {field.name for field in fields(SimulationReport) if field.name.startswith("loss_")}
    assert {share.field for share in SHARES} == losses | {"optimum_ratio"}
    assert len({share.colour for share in SHARES}) == len(SHARES)


def test_every_policy_has_its_own_colour() -> None:
    assert set(POLICY_COLOURS) == set(POLICIES)
    assert len(set(POLICY_COLOURS.values())) == len(POLICIES)


def test_over_time_holds_the_series() -> None:
    compute, memory, kv = over_time_figure().data
    assert (list(compute.x), list(compute.y)) == (SERIES.time_s, SERIES.compute_s)
    assert list(memory.y) == SERIES.memory_s
    assert (list(kv.y), kv.yaxis) == (SERIES.kv_usage_ratio, "y2")


def test_over_time_without_series_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"trace-1 under dual-scan has no series; .*with_series=True"):
        over_time(REPORT)


def test_heat_map_holds_and_prints_the_values() -> None:
    values = [[1.2, 1.3, 1.1], [1.25, 1.31, 1.14]]
    figure = heat_map(values, [0.8, 0.1 * 9, 1.0], [0.05, 0.15], title="Grid", x_title="ρ", y_title="s")
    (cells,) = figure.data
    assert [list(row) for row in cells.z] == values
    assert (list(cells.x), list(cells.y)) == (["0.8", "0.9", "1"], ["0.05", "0.15"])
    assert "%{z" in cells.texttemplate


def test_heat_map_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows, as y has, of 1 numbers"):
        heat_map([[1.0, 2.0]], [1.0], [1.0, 2.0], title="Grid", x_title="x", y_title="y")


def test_scaling_lines_compare_with_linear_growth() -> None:
    figure = scaling_lines(
        {"dual-scan": [(4, 390.0), (1, 100.0), (2, 198.0)]}, "Scaling", "Replicas", "Tokens/s"
    )
    linear, rates = figure.data
    assert (list(rates.x), list(rates.y)) == ([1, 2, 4], [100.0, 198.0, 390.0])
    assert list(linear.y) == [100.0, 200.0, 400.0]
    assert linear.line.dash == "dash"
    assert rates.line.color == POLICY_COLOURS["dual-scan"]


def test_importing_loads_no_plotly() -> None:
    code = "import sys, blendserve.report; print(sorted({'plotly', 'numba'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
