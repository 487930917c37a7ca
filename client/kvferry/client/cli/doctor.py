"""Output of `kvferry doctor`: a table of findings, each with what to change."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.client.doctor import Finding, Verdict

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to change", overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.change:
            text.append(f"\n-> {finding.change}", "bold")
        table.add_row(Text(finding.verdict, _STYLES[finding.verdict]), finding.check, text)
    console.print(table)
