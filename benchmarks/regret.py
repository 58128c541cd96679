"""What a sweep's choices lose by a longer one: `python benchmarks/regret.py QUICK.db LONG.db [--measure]`.

With `--measure`, on the device of the newest sweep in QUICK.db: whoever came within 15 % of a cell's best
there (`--within`) is raced anew with other inputs, in another order; whoever is then within 3 % of the best
gets 60 more rounds in 20 placements, and so do, whatever their first rounds say, the winner of the quick
sweep and the choice that its bands serve: a rival that moved against a choice that lay still would be no
comparison, since where buffers lie makes 2 %. That race is kept in LONG.db; run again it goes on. Then, and
without `--measure`, for each token count: what those two lose against the best of the long race (median of
paired rounds, by placement), with 95 % limits, and who the three are. Cells that the long race did not finish
are left out, and it says so. `--tokens 8 32` measures and shows these token counts alone.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.conditions import Reader, not_applicable
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.nvidia import conditions_reader
from mhctune.autotuner.probe import detect, fingerprint
from mhctune.autotuner.protocol import PROTOCOL_VERSION, Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.records import Cell, Measurement, SweepState, Trial
from mhctune.autotuner.standings import Standing, standings
from mhctune.autotuner.stats import noise_floor
from mhctune.autotuner.store import Store, SweepRecord
from mhctune.autotuner.worker import RemoteBench
from mhctune.db.derivation import chosen_sweep, derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

WITHIN, ROUNDS, PLACEMENTS = 0.15, 60, 20


def near(
    trials: Sequence[Trial], within: float, chosen: Mapping[int, Sequence[Candidate]]
) -> dict[int, tuple[Candidate, ...]]:
    """Return, by token count of `chosen`, those and whoever's median is at most `within` above the best."""
    medians: dict[int, dict[Candidate, float]] = {count: {} for count in chosen}
    for trial in trials:
        if isinstance(trial.outcome, Measurement) and trial.cell.num_tokens in medians:
            medians[trial.cell.num_tokens][trial.candidate] = trial.outcome.latency_us
    return {
        count: tuple(
            sorted(
                c for c, us in found.items() if us <= (1 + within) * min(found.values()) or c in chosen[count]
            )
        )
        for count, found in sorted(medians.items())
    }


def choices(derived: Derived, token_counts: Sequence[int]) -> dict[int, tuple[Candidate, Candidate]]:
    """Return, by token count, the winner of the quick sweep and the choice that its bands serve."""
    found = {}
    for count in token_counts:
        served = derived.table.lookup(count).choice
        found[count] = derived.cells[count][0].candidate, Candidate.of(served.arm, dict(served.config))
    return found


def long_record(
    quick: SweepRecord,
    raced: Mapping[int, Sequence[Candidate]],
    chosen: Mapping[int, Sequence[Candidate]],
    here: Fingerprint,
) -> tuple[SweepRecord, Protocol]:
    """Return what the long race sets out to measure, and by which protocol."""
    protocol = replace(
        Protocol(**quick.protocol), confirmation=ROUNDS, placements=PLACEMENTS, further=0,
        discarded=Protocol.of(quick.target, ROUNDS).discarded, seed=quick.protocol["seed"] + 1,
        version=PROTOCOL_VERSION,
    )  # fmt: skip
    wanted = {c for found in raced.values() for c in found}
    asked = [[(n, list(map(str, cs))) for n, cs in each.items()] for each in (raced, chosen)]
    text = f"{quick.digest} {here.digest} {protocol} {asked}"
    record = replace(
        quick,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        token_counts=tuple(raced),
        grid=sum(map(len, raced.values())),
        variants={c: names for c, names in quick.variants.items() if c in wanted},
        protocol=protocol.to_dict(),
        fingerprint=here,
        search=None,
    )
    return record, protocol


def measure(
    record: SweepRecord,
    protocol: Protocol,
    raced: Mapping[int, Sequence[Candidate]],
    chosen: Mapping[int, Sequence[Candidate]],
    store: Store,
    bench: RemoteBench,
    budget: VramBudget,
    within: float,
    read: Reader = not_applicable,
    tell: Callable[[int], None] = lambda count: None,
) -> None:
    """Race what is not raced yet; nobody leaves before the confirmation who is within `within`.

    `chosen` are confirmed, whatever their rounds before say.
    """
    sweep_id = store.begin(record)
    arms = find_seam(record.seam)
    variants: dict[Variant, None] = {}
    for candidate in record.variants:
        arm = arms.arm(record.target, candidate.arm)
        variants |= dict.fromkeys(arm.variants(record.problem, candidate.config))
    bench.compile_all(tuple(variants), lambda done, total: None)
    for count, candidates in raced.items():
        cell = Cell(record.seam, record.problem, count)
        known = [t for t in store.trials(sweep_id) if t.cell.num_tokens == count]
        race = Race(
            sweep_id, cell, store, bench, budget, protocol, max_regret=within, keep=chosen[count], read=read
        )
        order = sorted(candidates, key=lambda c: hashlib.sha256(f"{protocol.seed} {c}".encode()).digest())
        race.run(order, known)
        tell(count)
    store.end(sweep_id, SweepState.COMPLETE)


def lines(
    quick: Sequence[Trial],
    trials: Sequence[Trial],
    chosen: Mapping[int, tuple[Candidate, Candidate]],
) -> Iterator[str]:
    """Yield, by token count, what is lost and who is compared; then the worst, and what is missing.

    `quick` are the trials of the quick sweep, `trials` those of the long race.
    """
    floor = noise_floor(trials)
    yield f"{'tokens':>6} {'raced':>5} {'moved':>5} {'best us':>8}   {'winner loses':23}   served loses"
    yield f"{'':10}who {'':10} quick us  long us  rounds  candidate"
    worst: list[Standing | None] = [None, None]
    missing: list[int] = []
    for count, pair in chosen.items():
        here = [t for t in trials if t.cell.num_tokens == count]
        if not here or any(not t.settled for t in here):
            missing.append(count)
            continue
        ordered = standings(here, floor.width if floor else 0.0)
        rows = {s.candidate: s for s in ordered}
        found = [rows.get(candidate) for candidate in pair]
        for place, standing in enumerate(found):
            before = worst[place]
            if standing and (before is None or standing.regret.point > before.regret.point):
                worst[place] = standing
        moved = sum(_moved(t) for t in here)
        texts = "   ".join(f"{_loss(each):23}" for each in found)
        yield f"{count:6} {len(rows):5} {moved:5} {ordered[0].latency_us:8.2f}   {texts}".rstrip()
        then = {t.candidate: t for t in quick if t.cell.num_tokens == count}
        now = {t.candidate: t for t in here}
        names = _names(ordered[0].candidate, *pair)
        yield from (_compared(name, c, then.get(c), now.get(c), rows.get(c)) for c, name in names.items())
    yield f"worst{'':24}{_loss(worst[0]):23}   {_loss(worst[1]):23}".rstrip()
    width = f"{floor.width:.2%}, from {floor.n} rounds of twins" if floor else "unknown"
    yield f"point, then its one-sided 95 % limits; noise floor {width}"
    if missing:
        yield f"not finished, left out: {', '.join(map(str, missing))} tokens; run again with --measure"


def _names(best: Candidate, winner: Candidate, served: Candidate) -> dict[Candidate, str]:
    names: dict[Candidate, list[str]] = {}
    for name, candidate in (("best", best), ("winner", winner), ("served", served)):
        names.setdefault(candidate, []).append(name)
    return {candidate: ", ".join(who) for candidate, who in names.items()}


def _compared(
    name: str, candidate: Candidate, then: Trial | None, now: Trial | None, standing: Standing | None
) -> str:
    """Return a candidate's latencies in both databases, and its rounds in the long race: at first + moved."""
    quick = (
        f"{then.outcome.latency_us:8.2f}" if then and isinstance(then.outcome, Measurement) else f"{'-':>8}"
    )
    if now is None or standing is None:
        return f"{'':10}{name:13} {quick}        -       -  {candidate}"
    moved = sum(s.placement > 0 for s in now.samples)
    rounds = f"{len(now.samples) - moved}+{moved}"
    return f"{'':10}{name:13} {quick} {standing.latency_us:8.2f}  {rounds:>6}  {candidate}"


def _moved(trial: Trial) -> bool:
    return any(s.placement for s in trial.samples)


def _loss(standing: Standing | None) -> str:
    if standing is None:
        return "not measured"
    found = standing.regret
    return f"{found.point:6.2%} ({found.lower:+.2%}..{found.upper:+.2%})"


def main() -> None:
    """Measure if asked, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quick")
    parser.add_argument("long")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--within", type=float, default=WITHIN)
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="token counts (default: all)")
    given = parser.parse_args()
    with Repository.open(given.quick, readonly=True) as store:
        quick = chosen_sweep(store)
        derived = derive_stored(store, quick)
        found = quick.record.without_probes(store.trials(quick.id))
    counts = given.tokens or quick.record.token_counts
    if unknown := sorted(set(counts) - set(quick.record.token_counts)):
        known = ", ".join(map(str, quick.record.token_counts))
        parser.error(f"--tokens {' '.join(map(str, unknown))}: the quick sweep has {known}")
    chosen = choices(derived, sorted(set(counts)))
    raced = near(found, given.within, chosen)
    if given.measure:
        seam, target = find_seam(quick.record.seam), quick.record.target
        here = fingerprint(seam, target)
        for name, (then, now) in quick.record.fingerprint.differences(here).items():
            print(f"the quick sweep had {name} {then!r}, here it is {now!r}")
        record, protocol = long_record(quick.record, raced, chosen, here)
        budget = VramBudget.parse("60%", detect().free_bytes)
        with (
            open_bench(seam.name, target, protocol.l2, until=protocol.until) as bench,
            Repository.open(given.long) as store,
            conditions_reader(target) as read,
        ):
            measure(record, protocol, raced, chosen, store, bench, budget, given.within, read, _tell)
            print("seconds: " + ", ".join(f"{name} {taken:.1f}" for name, taken in bench.seconds.items()))
    with Repository.open(given.long, readonly=True) as store:
        trials = store.trials(store.sweeps()[0].id)
    print("\n".join(lines(found, trials, chosen)))


def _tell(count: int) -> None:
    print(f"{count} tokens raced", flush=True)


if __name__ == "__main__":
    main()
