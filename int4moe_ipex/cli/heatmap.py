"""The use of experts as a heat map in a terminal: a row for each MoE layer, a cell for each expert."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from int4moe_ipex.models.expert_use import ExpertUse, share

# From never used to four times even use and more; readable without colours too.
CELLS = ((0.0, "·", "grey37"), (0.5, "░", "blue"), (1.0, "▒", "cyan"), (2.0, "▓", "green"), (4.0, "█", "yellow"))
MOST = ("◆", "bold red")
NAME_WIDTH = 12
FACTS_WIDTH = 34


def cell(value: float) -> tuple[str, str]:
    """Character and style for a multiple of even use."""
    for most, character, style in CELLS:
        if value <= most:
            return character, style
    return MOST


def show(console: Console, use: list[ExpertUse], tokens: int) -> None:
    """Prints the map; where the terminal is too narrow for a cell each, neighbours share one, by their busiest."""
    experts = max(len(layer.counts) for layer in use)
    room = max(8, console.width - NAME_WIDTH - FACTS_WIDTH)
    together = -(-experts // room)
    console.print(f"{tokens} tokens, {experts} experts" + (f", {together} in a cell" if together > 1 else ""))
    for layer in use:
        line = Text(f"{short(layer.module):{NAME_WIDTH}}")
        values = [share(layer, expert) for expert in range(len(layer.counts))]
        for start in range(0, len(values), together):
            line.append(*cell(max(values[start : start + together])))
        busiest = max(range(len(values)), key=values.__getitem__)
        facts = f" {layer.used}/{len(values)} used, expert {busiest} x{values[busiest]:.1f}"
        line.append(facts)
        console.print(line, no_wrap=True, overflow="ellipsis")
    legend = Text("use against even use: ")
    for most, character, style in CELLS:
        legend.append(character, style)
        legend.append(" none  " if most == 0 else f" to {most:g}  ")
    legend.append(*MOST)
    legend.append(" more")
    console.print(legend)


def short(module: str) -> str:
    """`layer 7` for model.layers.7.mlp.experts, else the name's end."""
    parts = module.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return f"layer {numbers[0]}" if numbers else module[-NAME_WIDTH:]
