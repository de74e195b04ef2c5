"""What is wrong with a trace: where, which kind, and what was done about it.

A record may be *excluded*; where records are missing, the rows on both sides are *not joined*. A trace that cannot
be used at all is refused with a ``TraceError`` instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LISTED_PER_KIND = 20
"""Findings of a kind that are listed one by one, per segment and in the end; all are counted."""

EXCLUDED, NOT_JOINED = "excluded", "not joined"
"""What was done about a finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a trace, where, and what was done about it."""

    path: str
    kind: str
    action: str
    text: str
    row: int | None = None
    """Position of the row in its segment, from 0."""
    record_seq: int | None = None
    """Record number that the row has, right or wrong."""
    records: int = 0
    """Records concerned: excluded, or missing."""

    def __str__(self) -> str:
        """Return one line for an operator.

        >>> str(Finding("t/000001.arrows", "probability", EXCLUDED, "probability is 0", row=7, record_seq=9))
        't/000001.arrows, row 7 (record 9): probability is 0: excluded'
        """
        place = "" if self.row is None else f", row {self.row:,}"
        number = "" if self.record_seq is None else f" (record {self.record_seq:,})"
        return f"{self.path}{place}{number}: {self.text}: {self.action}"


@dataclass
class Findings:
    """All findings of a reading: all of them counted, the first of each kind listed."""

    listed: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Findings by kind."""
    records: Counter[str] = field(default_factory=Counter)
    """Records concerned, by kind."""
    rows: int = 0
    """Rows read, whether they passed or not."""
    excluded: int = 0
    """Rows left out; one may be wrong in several ways."""
    _listed_by: Counter[str] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        """Count a finding, and list it while there is room."""
        self.note(finding.kind, 1, finding.records)
        self.show(finding)

    def note(self, kind: str, findings: int, records: int) -> None:
        """Count findings without listing them."""
        self.counts[kind] += findings
        self.records[kind] += records

    def show(self, finding: Finding) -> None:
        """List a finding that was counted, while there is room."""
        if self._listed_by[finding.kind] < LISTED_PER_KIND:
            self._listed_by[finding.kind] += 1
            self.listed.append(finding)

    def merge(self, other: Findings) -> None:
        """Take in what was found in a later part."""
        self.counts.update(other.counts)
        self.records.update(other.records)
        self.rows += other.rows
        self.excluded += other.excluded
        for finding in other.listed:
            self.show(finding)

    def lines(self) -> list[str]:
        """Return a line per finding listed, and one for those that are not."""
        lines = [str(finding) for finding in self.listed]
        more = {kind: count - self._listed_by[kind] for kind, count in sorted(self.counts.items())}
        unlisted = ", ".join(f"{count:,} of {kind}" for kind, count in more.items() if count > 0)
        return [*lines, f"and {unlisted} more"] if unlisted else lines
