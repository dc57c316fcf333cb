"""What the doctor found: facts by section, and findings with their cures."""

from __future__ import annotations

from typing import Any

from plancache.cli.tables import count, pairs


class Report:
    """Facts for people and, with the same names, for programs; problems, warnings and notes, one line each."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, list[tuple[str, str]]] = {}
        self._section = ""
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def section(self, title: str) -> None:
        """What follows belongs there."""
        self._section = title
        self._facts[title], self._rows[title] = {}, []

    def fact(self, name: str, value: Any, text: str | None = None) -> None:
        """One fact; `text` is how people read it."""
        self._facts[self._section][name] = value
        self._rows[self._section].append((name, str(value) if text is None else text))

    def problem(self, text: str) -> None:
        self.problems.append(_one_line(text))

    def warning(self, text: str) -> None:
        self.warnings.append(_one_line(text))

    def note(self, text: str) -> None:
        self.notes.append(_one_line(text))

    def to_dict(self) -> dict[str, Any]:
        facts = {title.lower().replace(" ", "_"): facts for title, facts in self._facts.items()}
        return {**facts, "problems": self.problems, "warnings": self.warnings, "notes": self.notes}

    def text(self) -> str:
        parts = [f"{title}\n{pairs(rows) if rows else '  none'}" for title, rows in self._rows.items()]
        findings = [f"{kind}: {text}" for kind in ("note", "warning", "problem") for text in getattr(self, f"{kind}s")]
        verdict = count(len(self.problems), "problem") + " found" if self.problems else "no problems found"
        return "\n\n".join([*parts, *(["\n".join(findings)] if findings else []), verdict])


def _one_line(text: str) -> str:
    return " ".join(text.split())
