"""Draw the SVG figures of these pages from simulated runs.

    blendserve simulate trace1 --setting smooth --policy dfs,dual-scan,blend -o DIR    (and trace2 … into the same DIR)
    python docs/make_figures.py DIR/rows.jsonl

`blend.svg`: compute and memory time per step over the runs of trace1; `memory.svg`: KV memory in use and tokens per
step of the same runs; `losses.svg`: where the time of every run went.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

POLICIES = ("dfs", "dual-scan", "blend")
WIDTH, HEIGHT, LEFT, TOP, GAP = 1160, 320, 56, 62, 34
PANEL = (WIDTH - LEFT - GAP * (len(POLICIES) - 1) - 16) / len(POLICIES)
COMPUTE, MEMORY, INK, GRID = "#0072b2", "#d55e00", "#1d2430", "#d5dae1"
LOSSES = {
    "loss_ramp_ratio": ("imbalance at the start", "#56b4e9"),
    "loss_steady_ratio": ("imbalance", "#d55e00"),
    "loss_tail_ratio": ("imbalance at the end", "#e69f00"),
    "loss_steps_ratio": ("steps beyond the least number (memory not full)", "#0072b2"),
    "loss_sharing_ratio": ("sharing lost", "#009e73"),
    "loss_recompute_ratio": ("recomputation", "#cc79a7"),
    "loss_other_ratio": ("padding, reads of what is recomputed", "#8a93a0"),
}

Row = dict[str, Any]


def text(x: float, y: float, words: str, **attributes: str | int) -> str:
    more = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def panel(row: Row, left: float, lines: list[tuple[list[float], str, float]], max_time_s: float) -> list[str]:
    """One run over time: lines of (values, colour, value at the top)."""
    bottom = HEIGHT - 48
    label = f"{row['policy']}: {row['makespan_s'] / 3600:.2f} h, {row['optimum_ratio']:.0%} of the optimum"
    parts = [text(left, TOP - 16, label, font_weight=600)]
    for hour in range(int(max_time_s // 3600) + 1):
        x = left + PANEL * hour * 3600 / max_time_s
        parts.append(text(x, bottom + 18, f"{hour} h", text_anchor="middle", font_size=11))
    for values, colour, top in lines:
        points = " ".join(
            f"{left + PANEL * t / max_time_s:.1f},{bottom - (bottom - TOP) * v / top:.1f}"
            for t, v in zip(row["series"]["time_s"], values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return parts


def grid(ticks: dict[float, str]) -> Iterator[str]:
    """Horizontal lines at shares of the height, through all panels."""
    bottom = HEIGHT - 48
    for share, label in ticks.items():
        y = bottom - (bottom - TOP) * share
        for number in range(len(POLICIES)):
            left = LEFT + number * (PANEL + GAP)
            yield f'<line x1="{left:.1f}" x2="{left + PANEL:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield text(LEFT - 6, y + 4, label, text_anchor="end", font_size=11)


def svg(parts: list[str], height: int, caption: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, text(LEFT, 20, caption, font_size=12), *parts, "</svg>", ""])


def where(rows: list[Row]) -> str:
    return f"{rows[0]['num_requests']:,} requests, Llama-3-8B on a modelled A100, overlapped operators"


def blend(rows: list[Row]) -> str:
    """Compute and memory time per step."""
    most = max(max(row["series"][name]) for row in rows for name in ("compute_s", "memory_s"))
    max_time_s = max(row["makespan_s"] for row in rows)
    parts = list(grid({tick / 1e3 / most: str(tick) for tick in range(0, int(most * 1e3) + 1, 20)}))
    for number, row in enumerate(rows):
        lines = [(row["series"]["memory_s"], MEMORY, most), (row["series"]["compute_s"], COMPUTE, most)]
        parts += panel(row, LEFT + number * (PANEL + GAP), lines, max_time_s)
    parts.append(text(WIDTH - 200, HEIGHT - 10, "compute", fill=COMPUTE))
    parts.append(text(WIDTH - 120, HEIGHT - 10, "memory", fill=MEMORY))
    return svg(parts, HEIGHT, f"Milliseconds per step (simulated: Trace#1, {where(rows)})")


def memory(rows: list[Row]) -> str:
    """KV memory in use, and tokens per step."""
    max_time_s = max(row["makespan_s"] for row in rows)
    most = max(max(row["series"]["num_tokens"]) for row in rows)
    parts = list(grid({share: f"{share:.0%}" for share in (0.0, 0.25, 0.5, 0.75, 1.0)}))
    for number, row in enumerate(rows):
        series = row["series"]
        lines = [(series["num_tokens"], COMPUTE, most), (series["kv_usage_ratio"], MEMORY, 1.0)]
        parts += panel(row, LEFT + number * (PANEL + GAP), lines, max_time_s)
    parts.append(text(WIDTH - 360, HEIGHT - 10, f"tokens per step, of {most:,.0f}", fill=COMPUTE))
    parts.append(text(WIDTH - 150, HEIGHT - 10, "KV memory in use", fill=MEMORY))
    return svg(parts, HEIGHT, f"Memory and tokens (simulated: Trace#1, {where(rows)})")


def losses(rows: list[Row]) -> str:
    """What each run lost to the practical optimum, as shares of its time."""
    bar, left = 22, 150
    most = max(1.0 - row["optimum_ratio"] for row in rows)
    width = WIDTH - left - 70
    parts = []
    y = 40.0
    for row in rows:
        parts.append(text(left - 8, y + 15, f"{row['workload']} {row['policy']}", text_anchor="end"))
        x = float(left)
        for field, (_, colour) in LOSSES.items():
            size = max(row[field], 0.0) / most * width
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{bar - 4}" fill="{colour}"/>')
            x += size
        parts.append(text(x + 6, y + 14, f"{1.0 - row['optimum_ratio']:.1%}"))
        y += bar
    for place, (name, colour) in enumerate(LOSSES.values()):
        x, line = LEFT + (place % 3) * 370, y + 20 + 20 * (place // 3)
        parts.append(f'<rect x="{x}" y="{line - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, line, name, font_size=12))
    return svg(
        parts, int(y) + 72, f"Share of the time lost to the practical optimum (simulated: {where(rows)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+", help="rows.jsonl of simulated runs")
    lines = itertools.chain.from_iterable(file.read_bytes().splitlines() for file in parser.parse_args().rows)
    found = [orjson.loads(line) for line in lines if line]
    chosen = [
        r for r in found if r["setting"] == "smooth" and r["lengths"] == "sampled" and r["policy"] in POLICIES
    ]
    chosen.sort(key=lambda row: (row["workload"], POLICIES.index(row["policy"])))
    of_trace1 = [row for row in chosen if row["workload"] == "trace1"]
    for name, drawing in (
        ("blend", blend(of_trace1)),
        ("memory", memory(of_trace1)),
        ("losses", losses(chosen)),
    ):
        target = Path(__file__).with_name(f"{name}.svg")
        target.write_text(drawing)
        print(f"{target} written")


if __name__ == "__main__":
    main()
