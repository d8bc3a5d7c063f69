"""`int4moe doctor`: will it run here, how, and what blocks the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table


def command(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    path: Annotated[Path | None, typer.Argument(help="Checkpoint to ask about; else a typical MoE layer.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file or a shipped name; default: INT4MOE_CONFIG.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for this backend.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show this machine, its instruction sets, every row of the table with its verdict, and a recommended config.

    Exit status: 0 the configuration can run, 1 it cannot, 2 the question itself is wrong.

    Example: int4moe doctor ./checkpoint --config avx512
    """
    from int4moe_ipex.config import Config
    from int4moe_ipex.folders import model_folder

    if path is not None:
        model_folder(path)
    settings = Config.load(config, backend=backend)
    from int4moe_ipex.diagnosis import diagnose

    found = diagnose(settings, path)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _print(found)
    raise typer.Exit(0 if found["can_run"] else 1)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for key, value in _facts(found):
        facts.add_row(key, value)
    console.print(facts)
    console.print()

    isas = Table("instruction set", "usable", "what blocks it", title="CPU", title_justify="left")
    for isa in found["isas"]:
        blocked = f"{isa['blocked_by']}: {isa['reason']}" if isa["blocked_by"] else ""
        isas.add_row(isa["isa"], _mark(isa["usable"]), blocked)
    console.print(isas)
    console.print()

    for index, module in enumerate(found["modules"]):
        # One full table says it all, unless another module cannot run.
        if index == 0 or module["error"]:
            console.print(_rows(module))
        else:
            console.print(Text(f"{_title(module)}"))
        console.print(f"runs on {module['path']}" if module["path"] else Text(module["error"], style="red"))
        console.print()

    recommended = found["recommended"]
    console.print(f"Recommended ({recommended['why']}):")
    console.print(Text(recommended["yaml"].rstrip(), style="cyan"))
    console.print()
    said = [module["error"] for module in found["modules"]]
    for problem in found["problems"]:
        if problem not in said:
            console.print(Text(problem, style="red"))
    verdict = "can run" if found["can_run"] else "cannot run"
    console.print(Text(f"The configuration at hand {verdict}.", style="green" if found["can_run"] else "red"))


def _title(module: dict[str, Any]) -> str:
    alike = f" and {module['alike'] - 1} more like it" if module["alike"] > 1 else ""
    return f"{module['module']}{alike}: {module['what']}"


def _rows(module: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = Table("row", "runs", "path, or reason", title=_title(module), title_justify="left")
    for row in module["rows"]:
        chosen = row["supported"] and row["path"] == module["path"]
        note = f" ({row['reason']})" if row["supported"] and row["reason"] else ""
        detail = f"{row['path']}{note}" if row["supported"] else row["reason"]
        rows.add_row(Text(row["row"], style="bold" if chosen else ""), _mark(row["supported"]), Text(detail))
    return rows


def _mark(good: bool) -> str:
    return "[green]yes[/]" if good else "[red]no[/]"


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    machine = found["machine"]
    caches = ", ".join(_cache(cache) for cache in machine["caches"])
    nodes = ", ".join(f"node {node}: {cpus} CPUs" for node, cpus in machine["numa_nodes"].items())
    memory = machine["memory_bytes"]
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    lines = [
        ("int4moe_ipex", found["version"]),
        ("CPU", f"{machine['model_name']} (family {machine['family']}, model {machine['model']})"),
        ("hypervisor", _hypervisor(machine["hypervisor"])),
        ("CPUs", f"{machine['cpus_allowed']} of {machine['cpus']} for this process; {nodes}"),
        ("caches", caches),
        ("memory", f"{memory['total'] / 2**30:.1f} GiB, {memory['available'] / 2**30:.1f} GiB available"),
        ("huge pages", machine["huge_pages"]),
        ("kernel", machine["kernel"]),
        ("packages", packages),
    ]
    lines += [(name, library["detail"]) for name, library in found["libraries"].items()]
    lines.append(("tuned values", _tuning(found["tuning"])))
    lines += [("configuration", f"{key} from {origin}") for key, origin in found["config"].items()]
    return lines


def _hypervisor(name: str | None) -> str:
    return "none" if name is None else "one that does not tell its name" if name == "unknown" else name


def _tuning(tuned: dict[str, Any]) -> str:
    if tuned["in_use"]:
        return "; ".join(f"{kind}: {words}" for kind, words in tuned["in_use"].items()) + f" ({tuned['file']})"
    if tuned["file"] is None:
        return "off (INT4MOE_TUNE_FILE)"
    if tuned["entries"]:
        return f"none in use: {tuned['file']} has none for this machine, number of threads and configuration"
    return "none (int4moe tune measures them)"


def _cache(cache: dict[str, Any]) -> str:
    shared = f" per {cache['shared_by_cpus']} CPUs" if cache["shared_by_cpus"] > 1 else ""
    return f"L{cache['level']} {cache['bytes'] // 1024} KiB{shared}"
