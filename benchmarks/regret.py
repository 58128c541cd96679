"""What a sweep's choices lose by a longer one: `python benchmarks/regret.py QUICK.db LONG.db [--measure]`.

With `--measure`, on the device of the newest sweep in QUICK.db: whoever came within 15 % of a cell's best
there (`--within`) is raced anew with other inputs, in another order; whoever is then within 3 % of the best
gets 60 more rounds in 20 placements. That race is kept in LONG.db; run again it goes on. Then, and without
`--measure`, for each token count: what the winner of the quick sweep and the choice that its bands serve lose
against the best of the long race (median of paired rounds, by placement), with 95 % limits. Cells that the
long race did not finish are left out, and it says so.
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


def near(trials: Sequence[Trial], within: float) -> dict[int, tuple[Candidate, ...]]:
    """Return, by token count, the candidates whose median is at most `within` above the best."""
    medians: dict[int, dict[Candidate, float]] = {}
    for trial in trials:
        if isinstance(trial.outcome, Measurement):
            medians.setdefault(trial.cell.num_tokens, {})[trial.candidate] = trial.outcome.latency_us
    return {
        count: tuple(sorted(c for c, us in found.items() if us <= (1 + within) * min(found.values())))
        for count, found in sorted(medians.items())
    }


def long_record(
    quick: SweepRecord, raced: Mapping[int, Sequence[Candidate]], here: Fingerprint
) -> tuple[SweepRecord, Protocol]:
    """Return what the long race sets out to measure, and by which protocol."""
    protocol = replace(
        Protocol(**quick.protocol), confirmation=ROUNDS, placements=PLACEMENTS,
        seed=quick.protocol["seed"] + 1, version=PROTOCOL_VERSION,
    )  # fmt: skip
    wanted = {c for found in raced.values() for c in found}
    text = f"{quick.digest} {here.digest} {protocol} {[(n, list(map(str, cs))) for n, cs in raced.items()]}"
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
    store: Store,
    bench: RemoteBench,
    budget: VramBudget,
    within: float,
    read: Reader = not_applicable,
    tell: Callable[[int], None] = lambda count: None,
) -> None:
    """Race what is not raced yet; nobody leaves before the confirmation who is within `within`."""
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
        race = Race(sweep_id, cell, store, bench, budget, protocol, max_regret=within, read=read)
        order = sorted(candidates, key=lambda c: hashlib.sha256(f"{protocol.seed} {c}".encode()).digest())
        race.run(order, known)
        tell(count)
    store.end(sweep_id, SweepState.COMPLETE)


def lines(derived: Derived, trials: Sequence[Trial], token_counts: Sequence[int]) -> Iterator[str]:
    """Yield a line a token count, the worst, and what is missing."""
    floor = noise_floor(trials)
    yield f"{'tokens':>6} {'raced':>5} {'moved':>5} {'best us':>8}   {'winner loses':23}   served loses"
    worst: list[Standing | None] = [None, None]
    missing: list[int] = []
    for count in token_counts:
        here = [t for t in trials if t.cell.num_tokens == count]
        if not here or any(not t.settled for t in here):
            missing.append(count)
            continue
        ordered = standings(here, floor.width if floor else 0.0)
        rows = {s.candidate: s for s in ordered}
        served = derived.table.lookup(count).choice
        chosen = (derived.cells[count][0].candidate, Candidate.of(served.arm, dict(served.config)))
        found = [rows.get(candidate) for candidate in chosen]
        for place, standing in enumerate(found):
            before = worst[place]
            if standing and (before is None or standing.regret.point > before.regret.point):
                worst[place] = standing
        moved = sum(any(s.placement for s in t.samples) for t in here)
        texts = "   ".join(f"{_loss(each):23}" for each in found)
        yield f"{count:6} {len(rows):5} {moved:5} {ordered[0].latency_us:8.2f}   {texts}".rstrip()
    yield f"worst{'':24}{_loss(worst[0]):23}   {_loss(worst[1]):23}".rstrip()
    width = f"{floor.width:.2%}, from {floor.n} rounds of twins" if floor else "unknown"
    yield f"point, then its one-sided 95 % limits; noise floor {width}"
    if missing:
        yield f"not finished, left out: {', '.join(map(str, missing))} tokens; run again with --measure"


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
    given = parser.parse_args()
    with Repository.open(given.quick, readonly=True) as store:
        quick = chosen_sweep(store)
        derived = derive_stored(store, quick)
        raced = near(store.trials(quick.id), given.within)
    if given.measure:
        seam, target = find_seam(quick.record.seam), quick.record.target
        here = fingerprint(seam, target)
        for name, (then, now) in quick.record.fingerprint.differences(here).items():
            print(f"the quick sweep had {name} {then!r}, here it is {now!r}")
        record, protocol = long_record(quick.record, raced, here)
        budget = VramBudget.parse("60%", detect().free_bytes)
        with (
            open_bench(seam.name, target, protocol.l2) as bench,
            Repository.open(given.long) as store,
            conditions_reader(target) as read,
        ):
            measure(record, protocol, raced, store, bench, budget, given.within, read, _tell)
            print("seconds: " + ", ".join(f"{name} {taken:.1f}" for name, taken in bench.seconds.items()))
    with Repository.open(given.long, readonly=True) as store:
        trials = store.trials(store.sweeps()[0].id)
    print("\n".join(lines(derived, trials, quick.record.token_counts)))


def _tell(count: int) -> None:
    print(f"{count} tokens raced", flush=True)


if __name__ == "__main__":
    main()
