"""HTML pages of figures, simulated ones and those of a real run: single files that need no network, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from blendserve.simulator import Calibration, SimulationReport

# Okabe and Ito's colours, told apart with any colour vision.
POLICY_COLOURS = {
    "blend": "#000000",
    "dual-scan": "#0072b2",
    "dfs": "#e69f00",
    "fcfs": "#56b4e9",
    "random": "#d55e00",
    "longest-first": "#009e73",
    "longest-first-dfs": "#cc79a7",
}
UNKNOWN_POLICY_COLOUR = "#8c8c8c"

# Tol's "bright" and "light" colours: what is no policy never looks like one.
OTHER_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
NEUTRAL_COLOUR = "#999999"

HEAT_COLOURS = ("#f2f6fb", "#4fa3d9")
"""least and greatest; light enough for dark numbers in every cell"""

PATTERNS = ("", "/", ".", "x", "-", "+", "\\", "|")
"""tell apart the overlaps and lengths of one policy"""


class Share(NamedTuple):
    """A part of the makespan."""

    field: str
    name: str
    colour: str


SHARES = (
    Share("optimum_ratio", "practical optimum", "#bbbbbb"),
    Share("loss_ramp_ratio", "imbalance, memory filling", "#77aadd"),
    Share("loss_steady_ratio", "imbalance, steady", "#99ddff"),
    Share("loss_tail_ratio", "imbalance, tail", "#44bb99"),
    Share("loss_steps_ratio", "extra steps", "#bbcc33"),
    Share("loss_sharing_ratio", "sharing lost", "#ee8866"),
    Share("loss_recompute_ratio", "recomputation", "#eedd88"),
    Share("loss_other_ratio", "other", "#ffaabb"),
)

SIMULATED_NOTICE = "All figures are simulated on a virtual clock, not measured on hardware."

CSS = """
:root { color-scheme: light dark; --text: #1d2430; --muted: #5a6472; --ground: #ffffff; --panel: #f5f6f8;
  --line: #d5dae1; --mark: #8a4b00; --ground-mark: #fff1dc; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ee; --muted: #a3adba; --ground: #14181e; --panel: #1c222a; --line: #39424e;
    --mark: #ffc779; --ground-mark: #3a2a12; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; color: var(--text);
  background: var(--ground); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { margin: 0 0 .75rem; font-size: 1.9rem; line-height: 1.2; }
h2 { margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: 1.4rem; }
h3 { margin: 0 0 .25rem; font-size: 1.05rem; }
p { max-width: 48rem; }
a { color: inherit; }
.notice { display: inline-block; margin: 0; padding: .25rem .75rem; border-radius: .4rem; font-weight: 600;
  color: var(--mark); background: var(--ground-mark); }
.provenance { padding-left: 1.2rem; color: var(--muted); font-size: .9rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
figure { margin: 1.5rem 0; padding: 1rem; border-radius: .6rem; background: var(--panel); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
.js-plotly-plot :is(.xtitle, .ytitle, .y2title, .legendtext, .annotation-text,
  :is(.xtick, .ytick, .ytick2, .y2tick, .cbaxis) text) { fill: var(--text) !important; }
.js-plotly-plot :is(.gridlayer path, .zerolinelayer path, .ydivider) {
  stroke: var(--line) !important; }
.js-plotly-plot .shapelayer path { stroke: var(--text) !important; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings."""

    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: text, whose paragraphs are separated by blank lines, then figures, then a table."""

    title: str
    text: str
    figures: list[Figure]
    table: Table | None = None


def page(
    title: str, provenance: list[str], sections: list[Section], *, notice: str | None = SIMULATED_NOTICE
) -> str:
    """The HTML page, about 5 MB because the drawing library is in it; all text is escaped.

    `provenance` says where the numbers come from: version, cost model, date, command. `notice` stands out above it.
    """
    from plotly.offline import get_plotlyjs

    anchors = [f"section-{number}" for number, _ in enumerate(sections, 1)]
    links = [
        f'<li><a href="#{anchor}">{escape(section.title)}</a></li>'
        for anchor, section in zip(anchors, sections, strict=True)
    ]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{CSS}</style>",
        f"<script>{get_plotlyjs()}</script>",
        "</head>",
        "<body>",
        "<header>",
        f"<h1>{escape(title)}</h1>",
        *([f'<p class="notice">{escape(notice)}</p>'] if notice else []),
        '<ul class="provenance">',
        *(f"<li>{escape(line)}</li>" for line in provenance),
        "</ul>",
        '<nav aria-label="Sections"><ul>',
        *links,
        "</ul></nav>",
        "</header>",
        "<main>",
        *(_section_html(anchor, section) for anchor, section in zip(anchors, sections, strict=True)),
        "</main>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def throughput_bars(reports: Sequence[SimulationReport], title: str) -> Figure:
    """How near each run came to the practical optimum, grouped by workload."""
    figure = _grouped_bars(
        reports,
        title,
        "optimum_ratio",
        "Share of the practical optimum (%)",
        lambda report: [
            f"{report.tokens_per_s:,.0f} tokens/s",
            f"makespan {report.makespan_s:,.1f} s, optimum {report.optimum_s:,.1f} s",
            f"sharing kept {report.sharing_kept_ratio:.1%}",
            *(f"{share.name} {getattr(report, share.field):.1%}" for share in SHARES[1:]),
        ],
    )
    figure.add_hline(y=1.0, line_dash="dash", line_width=1.5)
    return figure


def sharing_bars(reports: Sequence[SimulationReport], title: str) -> Figure:
    """How much of the perfect reuse of prefixes each run kept, grouped by workload."""
    return _grouped_bars(
        reports,
        title,
        "sharing_kept_ratio",
        "Sharing kept, of perfect reuse (%)",
        lambda report: [
            f"sharing ratio of the workload {report.sharing_ratio:.1%}",
            f"computed again after a retraction {report.recomputed_ratio:.2%}",
        ],
    )


def loss_bars(reports: Sequence[SimulationReport], title: str) -> Figure:
    """Where the time of each run went: the practical optimum and every loss add up to the makespan."""
    from plotly.graph_objects import Bar

    names, shared = _run_names(reports)
    where = [[report.workload for report in reports], [names[_run(report)] for report in reports]]
    figure = _figure(title, "Share of the makespan (%)", f"Workload and policy{shared}")
    for share in SHARES:
        figure.add_trace(
            Bar(
                name=share.name,
                orientation="h",
                x=[getattr(report, share.field) for report in reports],
                y=where,
                marker_color=share.colour,
                hovertemplate=f"%{{y}}<br>{share.name} %{{x:.2%}}<extra></extra>",
            )
        )
    figure.update_layout(barmode="relative", height=260 + 28 * len(reports))
    figure.update_xaxes(tickformat=".0%")
    figure.update_yaxes(autorange="reversed")
    return figure


def calibration(reports: Sequence[SimulationReport], title: str) -> Figure:
    """Output tokens over those expected at admission, by groups of equal expectation; bars from P10 to P90."""
    names, shared = _run_names(reports)
    groups = [(f"{report.workload}, {names[_run(report)]}", report.calibration) for report in reports]
    return _calibration_figure(groups, title, f"Output tokens expected{shared}")


def over_time(report: SimulationReport) -> Figure:
    """Compute and memory time of a run's steps over simulated time, and how full the KV memory was.

    Raises:
        ValueError: the run was simulated without its series.
    """
    from plotly.graph_objects import Scatter

    series = report.series
    if series is None:
        raise ValueError(
            f"the run of {report.workload} under {report.policy} has no series; simulate it with_series=True"
        )
    figure = _figure(
        f"{report.workload}, {report.policy}, {report.overlap}, lengths {report.lengths}: a run over time",
        "Simulated time (s)",
        "Mean time per step (s)",
    )
    lines = [
        ("compute", series.compute_s, "y", OTHER_COLOURS[0], "solid", ".3~s"),
        ("memory", series.memory_s, "y", OTHER_COLOURS[1], "solid", ".3~s"),
        ("KV memory used", series.kv_usage_ratio, "y2", NEUTRAL_COLOUR, "dot", ".1%"),
    ]
    for name, values, axis, colour, dash, number in lines:
        unit = "" if axis == "y2" else "s"
        figure.add_trace(
            Scatter(
                name=name,
                x=series.time_s,
                y=values,
                yaxis=axis,
                mode="lines",
                # A value is the mean of the span that ends at its time.
                line={"color": colour, "dash": dash, "shape": "vh", "width": 1.5},
                hovertemplate=f"{name} %{{y:{number}}}{unit} at %{{x:,.1f}} s<extra></extra>",
            )
        )
    figure.update_layout(
        yaxis_rangemode="tozero",
        yaxis2={
            "title": {"text": "KV memory used (%)"},
            "overlaying": "y",
            "side": "right",
            "range": [0.0, 1.05],
            "dtick": 0.25,
            "tickformat": ".0%",
            "showgrid": False,
            "automargin": True,
        },
    )
    return figure


def heat_map(
    values: list[list[float]],
    x: list[float],
    y: list[float],
    *,
    title: str,
    x_title: str,
    y_title: str,
) -> Figure:
    """A number for every pair of an x and a y, printed in its cell; `values[row][column]` belongs to y[row], x[column].

    Raises:
        ValueError: `values` has not one row per y and one column per x.
    """
    from plotly.graph_objects import Heatmap

    if len(values) != len(y) or any(len(row) != len(x) for row in values):
        raise ValueError(f"values must have {len(y)} rows, as y has, of {len(x)} numbers each, as x has")
    figure = _figure(title, x_title, y_title)
    figure.add_trace(
        Heatmap(
            z=values,
            x=[f"{value:g}" for value in x],
            y=[f"{value:g}" for value in y],
            colorscale=HEAT_COLOURS,
            textfont={"color": "#10151c"},
            colorbar={"outlinewidth": 0},
            texttemplate="%{z:.3g}",
            xgap=1,
            ygap=1,
            hovertemplate=f"{x_title} %{{x}}<br>{y_title} %{{y}}<br>%{{z:.4g}}<extra></extra>",
        )
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category")
    return figure


def scaling_lines(
    series: dict[str, list[tuple[int, float]]], title: str, x_title: str, y_title: str
) -> Figure:
    """Throughput by number of replicas, `(num_replicas, tokens_per_s)`, and dashed: linear growth from the fewest."""
    from plotly.graph_objects import Scatter

    figure = _figure(title, x_title, y_title)
    for index, (name, unsorted_points) in enumerate(series.items()):
        points = sorted(unsorted_points)
        if not points:
            raise ValueError(f"the series {name} has no points")
        replicas = [num_replicas for num_replicas, _ in points]
        rates = [rate for _, rate in points]
        linear = [rates[0] * num_replicas / replicas[0] for num_replicas in replicas]
        colour = POLICY_COLOURS.get(name, OTHER_COLOURS[index % len(OTHER_COLOURS)])
        figure.add_trace(
            Scatter(
                name="linear",
                x=replicas,
                y=linear,
                mode="lines",
                line={"color": colour, "dash": "dash", "width": 1.5},
                legendgroup="linear",
                showlegend=index == 0,
                hoverinfo="skip",
            )
        )
        figure.add_trace(
            Scatter(
                name=name,
                x=replicas,
                y=rates,
                customdata=[rate / ideal for rate, ideal in zip(rates, linear, strict=True)],
                mode="lines+markers",
                line={"color": colour, "width": 2.5},
                marker={"size": 9},
                hovertemplate=f"{name}, %{{x}} replicas<br>%{{y:,.0f}} tokens/s<br>"
                "%{customdata:.1%} of linear<extra></extra>",
            )
        )
    counts = sorted({num_replicas for points in series.values() for num_replicas, _ in points})
    figure.update_xaxes(tickvals=counts)
    figure.update_yaxes(rangemode="tozero")
    return figure


def run_page(document: dict[str, Any]) -> str:
    """The HTML page of a real run, from its JSON report (`jobs.run_report`)."""
    summary, all_runs = document["summary"], document["all_runs"]
    done = f"{summary['completed']:,} completed, {summary['failed']:,} failed"
    if summary["num_done"]:
        done += f", {summary['num_done']:,} done before"
    text = (
        f"{document['status'].capitalize()}: {done}, of {summary['total']:,} lines. "
        f"{summary['num_prompt_tokens']:,} prompt tokens ({summary['cached_ratio']:.1%} of them shared) and "
        f"{summary['num_output_tokens']:,} output tokens of finished requests, "
        f"{summary['tokens_per_s']:,.0f} tokens/s."
    )
    if all_runs["num_runs"] > 1:
        text += (
            f"\n\nThis is run {all_runs['num_runs']} of the job; all together took {all_runs['wall_s']:,.1f} s "
            f"and completed {all_runs['completed']:,} lines. The figures below are of this run."
        )
    timeline = document["timeline"]
    sections = [
        Section("Result", text, [], _run_table(document["runs"])),
        Section(
            "Over time",
            "Tokens are those computed, recomputed ones included. The blend is the modelled time of "
            "compute-bound and of memory-bound work.",
            [_rates_over_time(timeline), _shares_over_time(timeline)],
        ),
    ]
    lengths = document["output_lengths"]
    if lengths["expected"]:
        from blendserve.simulator import Calibration

        groups = Calibration(
            **{name: lengths[name] for name in Calibration.__dataclass_fields__}  # a document may hold more
        )
        figure = _calibration_figure(
            [("requests of this run", groups)],
            "Output lengths: expected at admission, and come",
            "Output tokens expected",
        )
        ratio = lengths["actual_to_expected_ratio"]
        words = (
            f"All together, outputs had {ratio:.2f} times the tokens expected. Declared lengths are left out."
        )
        sections.append(Section("Output lengths", words, [figure]))
    if failures := summary["failures_by_code"]:
        rows = [[code, f"{count:,}"] for code, count in failures.items()]
        sections.append(Section("Failures", "", [], Table(["code", "lines"], rows)))
    if document["plan"]:
        sections.append(Section("Plan", "As planned before the run.", [], _facts_table(document["plan"])))
    sections.append(Section("Configuration", "", [], _facts_table(document["configuration"])))
    provenance = [
        f"{document['model']} on engine {document['engine']} under policy {document['policy']}",
        f"from {', '.join(document['inputs'])} to {document['output']}",
        ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
    ]
    return page("BlendServe run", provenance, sections, notice=None)


def _run_table(runs: list[dict[str, Any]]) -> Table:
    """A row per run of the job, with cost and energy where they are known."""
    headings = [
        "run",
        "started",
        "status",
        "time",
        "completed",
        "failed",
        "output tokens",
        "retried",
        "restarts",
    ]
    has_cost = any("cost" in run for run in runs)
    has_energy = any("energy_j" in run for run in runs)
    headings += ["cost", "per 1M tokens"] if has_cost else []
    headings += ["energy"] if has_energy else []
    rows = []
    for number, run in enumerate(runs, 1):
        row = [
            str(number),
            run["started"],
            run["status"],
            f"{run['wall_s']:,.1f} s",
            f"{run['completed']:,}",
            f"{run['failed']:,}",
            f"{run['num_output_tokens']:,}",
            f"{run['num_retried_requests']:,}",
            f"{run['num_engine_restarts']:,}",
        ]
        if has_cost:
            price = run.get("cost") or {}
            row += [_number(price.get("total")), _number(price.get("per_million_tokens"))]
        if has_energy:
            row.append(f"{run['energy_j']:,.0f} J" if "energy_j" in run else "")
        rows.append(row)
    return Table(headings, rows)


def _facts_table(facts: dict[str, Any]) -> Table:
    """Names and values, nested ones with dotted names."""
    rows: list[list[str]] = []

    def add(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", value)
            else:
                rows.append([prefix + name, _number(value)])

    add("", facts)
    return Table(["name", "value"], rows)


def _number(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _rates_over_time(timeline: dict[str, list[float]]) -> Figure:
    """Tokens computed per second, prefill below and decode on top."""
    figure = _figure("Tokens per second", "Time since the run began (s)", "Tokens computed per second")
    fields = {"prefill": "prefill_tokens_per_s", "decode": "decode_tokens_per_s"}
    _add_lines(figure, timeline, fields, "%{y:,.0f} tokens/s", stackgroup="tokens")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _shares_over_time(timeline: dict[str, list[float]]) -> Figure:
    """Compute's share of the modelled time, and how full the KV memory was."""
    figure = _figure("Blend and KV memory", "Time since the run began (s)", "Share (%)")
    fields = {"compute in the blend": "compute_ratio", "KV memory used": "kv_usage_ratio"}
    _add_lines(figure, timeline, fields, "%{y:.1%}")
    figure.update_yaxes(tickformat=".0%", range=[0.0, 1.05])
    return figure


def _add_lines(
    figure: Figure, timeline: dict[str, list[float]], fields: dict[str, str], value: str, **options: Any
) -> None:
    """A line per column of a time line, by name; `value` is how one is shown."""
    from plotly.graph_objects import Scatter

    for (name, field), colour in zip(fields.items(), OTHER_COLOURS, strict=False):
        figure.add_trace(
            Scatter(
                name=name,
                x=timeline["elapsed_s"],
                y=timeline[field],
                mode="lines",
                # A value is the mean of the span that ends at its time.
                line={"color": colour, "shape": "vh", "width": 1.5},
                hovertemplate=f"{name} {value} at %{{x:,.1f}} s<extra></extra>",
                **options,
            )
        )


class _Run(NamedTuple):
    """What tells apart the runs of one workload."""

    policy: str
    """its name, and behind a comma what else is special about the run"""
    overlap: str
    lengths: str


def _run(report: SimulationReport) -> _Run:
    return _Run(report.policy, report.overlap, report.lengths)


def _variant(run: _Run) -> tuple[str, ...]:
    """All but the policy."""
    return (run.policy.partition(",")[2], run.overlap, run.lengths)


def _run_names(reports: Sequence[SimulationReport]) -> tuple[dict[_Run, str], str]:
    """Every kind of run and its shortest name, in order of appearance, and in words what all have in common."""
    places = [(report.workload, _run(report)) for report in reports]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(
                f"two reports of workload {place[0]} have the same {', '.join(_Run._fields)}: {place[1]}"
            )
    runs = list(dict.fromkeys(run for _, run in places))
    overlaps = {run.overlap for run in runs}
    lengths = {run.lengths for run in runs}
    names = {}
    for run in runs:
        words = [run.policy]
        if len(overlaps) > 1:
            words.append(run.overlap)
        if len(lengths) > 1:
            words.append(f"lengths {run.lengths}")
        names[run] = ", ".join(words)
    shared = [f"overlap {overlap}" for overlap in overlaps if len(overlaps) == 1]
    shared += [f"lengths {known}" for known in lengths if len(lengths) == 1]
    return names, f" ({', '.join(shared)})" if shared else ""


def _calibration_figure(groups: list[tuple[str, Calibration]], title: str, x_title: str) -> Figure:
    """Lengths that came over those expected, with bars from P10 to P90, for each named calibration."""
    from plotly.graph_objects import Scatter

    figure = _figure(title, x_title, "Output tokens, mean of the group")
    for index, (name, group) in enumerate(groups):
        figure.add_trace(
            Scatter(
                name=name,
                x=group.expected,
                y=group.actual,
                mode="markers",
                marker_color=OTHER_COLOURS[index % len(OTHER_COLOURS)],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [
                        max(high - mean, 0) for high, mean in zip(group.actual_p90, group.actual, strict=True)
                    ],
                    "arrayminus": [
                        max(mean - low, 0) for low, mean in zip(group.actual_p10, group.actual, strict=True)
                    ],
                },
                hovertemplate="expected %{x:,.0f}, came %{y:,.0f}<extra></extra>",
            )
        )
    ends = [value for _, group in groups for value in (*group.expected, *group.actual)]
    span = [max(min(ends, default=1.0), 1.0), max(ends, default=1.0)]
    figure.add_trace(
        Scatter(
            name="as expected", x=span, y=span, mode="lines", line={"color": NEUTRAL_COLOUR, "dash": "dot"}
        )
    )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def _grouped_bars(
    reports: Sequence[SimulationReport],
    title: str,
    field: str,
    y_title: str,
    details: Callable[[SimulationReport], list[str]],
) -> Figure:
    from plotly.graph_objects import Bar

    names, shared = _run_names(reports)
    figure = _figure(title, f"Workload{shared}", y_title)
    variants = list(dict.fromkeys(_variant(run) for run in names))
    for run, name in names.items():
        bars = [report for report in reports if _run(report) == run]
        figure.add_trace(
            Bar(
                name=name,
                x=[report.workload for report in bars],
                y=[getattr(report, field) for report in bars],
                marker={
                    "color": POLICY_COLOURS.get(run.policy.split(",")[0], UNKNOWN_POLICY_COLOUR),
                    "pattern": {
                        "shape": PATTERNS[variants.index(_variant(run)) % len(PATTERNS)],
                        "solidity": 0.25,
                        "fillmode": "overlay",
                    },
                },
                hovertext=["<br>".join(details(report)) for report in bars],
                hovertemplate=f"%{{x}}, {name}: %{{y:.1%}}<br>%{{hovertext}}<extra></extra>",
            )
        )
    workloads = list(dict.fromkeys(report.workload for report in reports))
    figure.update_layout(barmode="group")
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=workloads)
    figure.update_yaxes(tickformat=".0%", range=[0.0, 1.05])
    return figure


def _figure(title: str, x_title: str, y_title: str) -> Figure:
    """An empty figure; the page's CSS gives text and lines the colours of its mode."""
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        template="none",
        title={"text": title},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=True,
        legend={"orientation": "h", "x": 0.0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        hoverlabel={"align": "left", "bgcolor": "#ffffff", "font": {"color": "#1d2430"}},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": NEUTRAL_COLOUR, "activecolor": NEUTRAL_COLOUR},
        height=480,
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
    )
    figure.update_xaxes(title_text=x_title, automargin=True)
    figure.update_yaxes(title_text=y_title, automargin=True)
    return figure


def _section_html(anchor: str, section: Section) -> str:
    paragraphs = [f"<p>{escape(text)}</p>" for text in section.text.split("\n\n") if text.strip()]
    figures = [_figure_html(f"{anchor}-{number}", figure) for number, figure in enumerate(section.figures, 1)]
    parts = [
        f'<section id="{anchor}">',
        f"<h2>{escape(section.title)}</h2>",
        *paragraphs,
        *figures,
        *([_table_html(section.table)] if section.table else []),
        "</section>",
    ]
    return "\n".join(parts)


def _figure_html(name: str, figure: Figure) -> str:
    from plotly.graph_objects import Figure
    from plotly.io import to_html

    # The title goes above the drawing, where it is a heading and wraps on a narrow screen.
    drawing = Figure(figure)
    drawing.layout.title = None
    chart = to_html(
        drawing,
        config={"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage", "resetScale2d"]]},
        include_plotlyjs=False,
        full_html=False,
        div_id=f"{name}-chart",
    )
    title = escape(figure.layout.title.text)
    return f"<figure>\n<figcaption><h3>{title}</h3></figcaption>\n{chart}\n</figure>"


def _table_html(table: Table) -> str:
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return (
        '<div class="scroll"><table>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )
