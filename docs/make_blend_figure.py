"""Draw `blend.svg`: compute and memory time per step over a simulated run under `dfs`, `dual-scan` and `blend`.

python docs/make_blend_figure.py [--num-requests 400000]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from blendserve.experiments import Case, run_cases
from blendserve.scheduling.policies import PolicyName

POLICIES: tuple[PolicyName, ...] = ("dfs", "dual-scan", "blend")
WIDTH, HEIGHT, LEFT, TOP, GAP = 1160, 320, 56, 62, 34
PANEL = (WIDTH - LEFT - GAP * (len(POLICIES) - 1) - 16) / len(POLICIES)
COMPUTE, MEMORY, INK, GRID = "#0072b2", "#d55e00", "#1d2430", "#d5dae1"


def panel(row: dict[str, Any], left: float, title: str, max_s: float, max_time_s: float) -> list[str]:
    """One run: two lines over time, as SVG elements."""
    series = row["series"]
    bottom = HEIGHT - 48

    def x(time_s: float) -> float:
        return left + PANEL * time_s / max_time_s

    def y(seconds: float) -> float:
        return bottom - (bottom - TOP) * seconds / max_s

    parts = [f'<text x="{left}" y="{TOP - 16}" font-weight="600">{title}</text>']
    for tick in range(0, int(max_s * 1e3) + 1, 20):
        parts.append(
            f'<line x1="{left}" x2="{left + PANEL}" y1="{y(tick / 1e3):.1f}" y2="{y(tick / 1e3):.1f}" stroke="{GRID}"/>'
        )
        parts.append(
            f'<text x="{left - 6}" y="{y(tick / 1e3) + 4:.1f}" text-anchor="end" font-size="11">{tick}</text>'
        )
    hours = int(max_time_s // 3600) + 1
    for hour in range(hours):
        parts.append(
            f'<text x="{x(hour * 3600):.1f}" y="{bottom + 18}" text-anchor="middle" font-size="11">{hour} h</text>'
        )
    for name, colour in (("memory_s", MEMORY), ("compute_s", COMPUTE)):
        points = " ".join(
            f"{x(t):.1f},{y(v):.1f}" for t, v in zip(series["time_s"], series[name], strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=400_000)
    num_requests = parser.parse_args().num_requests
    rows = run_cases([Case("trace1", policy, with_series=True) for policy in POLICIES], num_requests)
    max_s = max(max(row["series"][name]) for row in rows for name in ("compute_s", "memory_s"))
    max_time_s = max(row["makespan_s"] for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="12">Milliseconds per step (simulated: Trace#1, {num_requests:,} requests, '
        "Llama-3-8B on a modelled A100, overlapped operators)</text>",
        f'<text x="{WIDTH - 200}" y="{HEIGHT - 10}" fill="{COMPUTE}">compute</text>',
        f'<text x="{WIDTH - 120}" y="{HEIGHT - 10}" fill="{MEMORY}">memory</text>',
    ]
    for number, row in enumerate(rows):
        label = (
            f"{row['system']}: {row['makespan_s'] / 3600:.2f} h, {row['optimum_ratio']:.0%} of the optimum"
        )
        parts += panel(row, LEFT + number * (PANEL + GAP), label, max_s, max_time_s)
    target = Path(__file__).with_name("blend.svg")
    target.write_text("\n".join([*parts, "</svg>", ""]))
    print(f"{target} written")


if __name__ == "__main__":
    main()
