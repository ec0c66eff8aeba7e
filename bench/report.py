"""The charts and the README's table of what the benchmarks measured.

    python bench/report.py                      # charts beside the JSONs of every GPU, and the table on stdout
    python bench/report.py bench/results/h200   # of one

For each operation: `<op>_speedup.svg`, each case's speed against its anchor, and `<op>_roofline.svg`, the bandwidth
each case reaches over the bytes it moves, under the card's measured read ceiling.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "tridraft"
FLOOR = "read floor"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of one GPU by operation; those of a whole propose have columns of their own."""
    paths = sorted(path for path in folder.glob("*.json") if path.stem != "propose")
    return {path.stem: json.loads(path.read_text()) for path in paths}


def _measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if not row["error"]]


def markdown_table(results: dict[str, dict[str, Any]]) -> str:
    """The headline cases: this library, the best of the others, and the factor between them."""
    lines = ["| case | tridraft, µs | % of read ceiling | best other, µs | × |", "|---|---|---|---|---|"]
    for result in results.values():
        rows = [row for row in _measured(result) if row["headline"]]
        for ours in (row for row in rows if row["provider"] == OURS):
            others = [
                r
                for r in rows
                if r["case"] == ours["case"] and r["provider"] != FLOOR and not r["provider"].startswith(OURS)
            ]
            best = min(others, key=lambda row: row["us"], default=None)
            other = f"{best['us']:.1f} ({best['provider']}) | {best['us'] / ours['us']:.1f}" if best else "– | –"
            lines.append(f"| {ours['case']} | {ours['us']:.1f} | {ours['percent']:.0f}% | {other} |")
    return "\n".join(lines)


def caption(result: dict[str, Any]) -> str:
    """GPU, versions and date of a result."""
    return (
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}, "
        f"{result['date'][:10]}"
    )


def draw_speedup(op: str, result: dict[str, Any], path: Path) -> None:
    """Bars of each provider's speed against the anchor, one group a case."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  the table needs no plotting library

    rows = [row for row in _measured(result) if row["speedup"]]
    names, providers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("case", "provider"))
    values = {(row["case"], row["provider"]): row["speedup"] for row in rows}
    height = 0.8 / max(len(providers), 1)
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.16 * len(names) * max(len(providers), 1)), layout="constrained")
    for index, provider in enumerate(providers):
        present = [i for i, name in enumerate(names) if (name, provider) in values]
        heights = [values[names[i], provider] for i in present]
        axes.barh([i + (index + 0.5) * height - 0.4 for i in present], heights, height, label=provider)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("× anchor")
    axes.set_title(f"{op}: {caption(result)}", fontsize=8)
    axes.legend(fontsize=7)
    figure.savefig(path)
    plt.close(figure)


def draw_roofline(op: str, result: dict[str, Any], path: Path) -> None:
    """Achieved bandwidth over bytes a call, each provider a colour, under the read ceiling."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    rows = _measured(result)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for provider in dict.fromkeys(row["provider"] for row in rows):
        points = sorted((row["bytes"], row["gbs"]) for row in rows if row["provider"] == provider)
        axes.plot([x for x, _ in points], [y for _, y in points], "o", markersize=4, label=provider)
    axes.axhline(result["read_gbs"], color="black", linewidth=0.8)
    axes.annotate("measured read ceiling", (0.01, result["read_gbs"]), xycoords=("axes fraction", "data"), fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes a call must move")
    axes.set_ylabel("GB/s")
    axes.set_title(f"{op}: {caption(result)}", fontsize=8)
    axes.legend(fontsize=7)
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw and print for the folders named, or for all."""
    parser = argparse.ArgumentParser(description="Charts and table of the benchmark results.")
    parser.add_argument("folders", nargs="*", type=Path, help="folders of JSON (default: every bench/results/<gpu>)")
    parser.add_argument("--table", action="store_true", help="print the table only")
    args = parser.parse_args(argv)
    for folder in args.folders or sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        results = load(folder)
        if not results:
            continue
        if not args.table:
            for op, result in results.items():
                draw_speedup(op, result, folder / f"{op}_speedup.svg")
                draw_roofline(op, result, folder / f"{op}_roofline.svg")
        print(f"{caption(next(iter(results.values())))}\n\n{markdown_table(results)}\n")


if __name__ == "__main__":
    main()
