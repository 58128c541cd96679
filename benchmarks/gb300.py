"""What the published GB300 medians say, set by set, and what they do not: `python benchmarks/gb300.py`."""

from __future__ import annotations

from mhctune.autotuner.cutover import Route, cutover, sets_of, spread
from mhctune.configs.recorded import load_recorded

FUSED, INHERITED = ("fused", "tuned"), ("fused", "inherited")
CONFIGURED, TUNED_SPLIT, MEGA = ("unfused", "splits16"), ("unfused", "splits64"), ("mega", "mega")
COMPARED: tuple[tuple[str, Route, Route], ...] = (
    ("A", FUSED, INHERITED),
    ("A", FUSED, CONFIGURED),
    ("B", FUSED, CONFIGURED),
    ("B", FUSED, TUNED_SPLIT),
    ("C", FUSED, CONFIGURED),
    ("C", FUSED, MEGA),
)


def report() -> list[str]:
    """Return the report's lines."""
    sets = sets_of(load_recorded("gb300_published"))
    common = spread(sets, CONFIGURED)
    floor = max(common.values())
    own = max(spread(sets, FUSED).values())
    lines = [
        f"floor: {floor:.1%}, the most that {' '.join(CONFIGURED)}, common to all sets, differs between them "
        f"(fused tuned: {own:.1%}); less decides nothing across runs"
    ]
    for name, first, second in COMPARED:
        found = cutover(sets[name][first], sets[name][second], floor)
        lags = ", ".join(f"{count} ({loss:.1%})" for count, loss in found.lags.items()) or "nowhere"
        lines.append(
            f"set {name}: {' '.join(first)} against {' '.join(second)}: leads to {found.last}, ties at "
            f"{' '.join(map(str, found.ties)) or 'none'}, lags at {lags}; below the floor at "
            f"{' '.join(map(str, found.weak)) or 'none'}"
        )
    loss = cutover(sets["B"][FUSED], sets["B"][TUNED_SPLIT], floor).lags[48]
    share = 1 - sets["B"][TUNED_SPLIT][48] / sets["B"][FUSED][48]
    naive = cutover(sets["C"][FUSED], sets["C"][CONFIGURED], floor).last
    honest = cutover(sets["B"][FUSED], sets["B"][TUNED_SPLIT], floor).last
    lines.append(
        f"cut-over: {honest} against the tuned split; {naive} against the configured one, which costs "
        f"{loss:.1%} there (the same pair as a share of the slower time: {share:.1%})"
    )
    return lines


if __name__ == "__main__":
    print("\n".join(report()))
