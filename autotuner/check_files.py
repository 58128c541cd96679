"""What a check found, as files for CI: JUnit XML and Markdown."""

from __future__ import annotations

from xml.etree import ElementTree

from mhctune.autotuner.check import Check, Finding, Verdict

_ERRORS = (Verdict.MISSING, Verdict.CANNOT_TELL)


def junit(check: Check) -> str:
    """Return JUnit XML: a suite a table, a case a comparison.

    Regressed and disagrees are failures, missing and cannot_tell are errors. A check that compared nothing
    is one error, so that no reader takes it for a pass.
    """
    root = ElementTree.Element("testsuites", name="mhctune check")
    for table in dict.fromkeys(finding.table for finding in check.findings):
        _suite(root, table, [finding for finding in check.findings if finding.table == table])
    if not check.findings:
        nothing = Finding("nothing compared", "check", Verdict.MISSING, check.notes[-1])
        _suite(root, nothing.table, [nothing])
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    return text + "\n"


def _suite(root: ElementTree.Element, name: str, findings: list[Finding]) -> None:
    errors = sum(finding.verdict in _ERRORS for finding in findings)
    failures = sum(not finding.ok for finding in findings) - errors
    counts = {"tests": f"{len(findings)}", "failures": f"{failures}", "errors": f"{errors}"}
    suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(name), **counts})
    for finding in findings:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(name), name=_xml(finding.what))
        if finding.ok:
            ElementTree.SubElement(case, "system-out").text = _xml(f"{finding.verdict}: {finding.sentence}")
            continue
        kind = "error" if finding.verdict in _ERRORS else "failure"
        ElementTree.SubElement(case, kind, type=finding.verdict.value, message=_xml(finding.sentence))


def _xml(text: str) -> str:
    """Leave out what XML 1.0 cannot hold: control characters and lone surrogates; a failure may print any."""
    return "".join(
        c for c in text if c in "\t\n\r" or " " <= c < "\ud800" or "\ue000" <= c < "\ufffe" or c > "\uffff"
    )


def markdown(check: Check) -> str:
    """Return Markdown: the verdict, then a table of the comparisons for each dispatch table."""
    lines = [f"## mhctune check: {check.verdict}", ""]
    for table in dict.fromkeys(finding.table for finding in check.findings):
        lines += [f"### {_cell(table)}", "", "| compared | verdict | found |", "| --- | --- | --- |"]
        lines += [
            f"| {_cell(f.what)} | {f.verdict if f.ok else f'**{f.verdict}**'} | {_cell(f.sentence)} |"
            for f in check.findings
            if f.table == table
        ]
        lines.append("")
    return "\n".join([*lines, *(f"{_cell(note)}  " for note in check.notes)]).rstrip() + "\n"


def _cell(text: str) -> str:
    """Keep a text inside its cell: no line break, no bar, no markup."""
    for sign in "\\|*_`<>[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
