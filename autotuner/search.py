"""The search: which points of a large space are raced, proposed by Optuna's TPE."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from mhctune.kernels.space import Candidate, Tunable


class Search:
    """Proposes legal points of one arm, by ask and tell.

    Keeps no trials: each proposal builds its study anew from what is known, so that the trials in the store
    are all there is to resume from. TPE (tree-structured Parzen estimator: Bergstra et al., Algorithms for
    Hyper-Parameter Optimization, 2011) proposes in the box of the tunables' values, each counted in the order
    of its declaration. What is taken is the nearest legal point that was not proposed before: fewest steps
    along the values, with the range of each tunable as 1. So TPE is told of legal points alone.
    """

    def __init__(self, legal: Sequence[Candidate], tunables: Sequence[Tunable]) -> None:
        """Search the `legal` points over `tunables`, which may hold values that no legal point has."""
        self._tunables = tuple(tunable for tunable in tunables if len(tunable.values) > 1)
        places = [{value: at for at, value in enumerate(t.values)} for t in self._tunables]
        self._legal = tuple(legal)
        steps = [
            [place[config[t.name]] for t, place in zip(self._tunables, places, strict=True)]
            for config in (candidate.config for candidate in self._legal)
        ]
        self._steps = np.array(steps, dtype=np.float64).reshape(len(self._legal), len(self._tunables))
        self._spans = np.array([len(t.values) - 1 for t in self._tunables], dtype=np.float64)
        self._index = {candidate: at for at, candidate in enumerate(self._legal)}

    def propose(
        self,
        known: Mapping[Candidate, float | None],
        number: int,
        seed: int,
        first: Sequence[Candidate] = (),
    ) -> tuple[Candidate, ...]:
        """Return `number` legal points that are not known, fewer where so many are not left.

        Those of `first` come ahead, as far as they are legal and not known. `known` holds the points that
        were proposed before, in that order: microseconds per launch or, for a failure, None, which TPE is
        told as failed. Until `number` are measured the rest is drawn at random. Equal arguments give equal
        proposals.
        """
        told = {candidate: value for candidate, value in known.items() if candidate in self._index}
        study = self._study(told, number, seed)
        free = np.ones(len(self._legal), dtype=bool)
        free[[self._index[candidate] for candidate in told]] = False
        order = np.random.default_rng(seed).permutation(len(self._legal))  # decides among the nearest
        ahead = [self._index[c] for c in dict.fromkeys(first) if c in self._index and c not in told]
        chosen: list[int] = []
        while len(chosen) < number and free.any():
            at = ahead.pop(0) if ahead else self._asked(study, free, order)
            free[at] = False
            chosen.append(at)
            # Running, so that the rest of the generation keeps away from it ("constant liar").
            study.add_trial(self._trial(at, TrialState.RUNNING))
        return tuple(self._legal[at] for at in chosen)

    def _asked(self, study: optuna.Study, free: np.ndarray, order: np.ndarray) -> int:
        """Ask for a point and return the free legal one that is nearest to it."""
        asked = study.ask(self._box())
        point = np.array([asked.params[t.name] for t in self._tunables])
        study.tell(asked, state=TrialState.FAIL)  # what was proposed is not what will be measured
        away = (np.abs(self._steps - point) / self._spans).sum(axis=1)
        away[~free] = np.inf
        return int(order[np.argmin(away[order])])

    def _study(self, told: Mapping[Candidate, float | None], startup: int, seed: int) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            # Both arguments are marked as experimental in Optuna 4 and 5.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=startup
            )
        study = optuna.create_study(sampler=sampler)
        for candidate, value in told.items():
            state = TrialState.FAIL if value is None else TrialState.COMPLETE
            study.add_trial(self._trial(self._index[candidate], state, value))
        return study

    def _box(self) -> dict[str, BaseDistribution]:
        return {t.name: IntDistribution(0, len(t.values) - 1) for t in self._tunables}

    def _trial(self, at: int, state: TrialState, value: float | None = None) -> optuna.trial.FrozenTrial:
        params = {t.name: int(step) for t, step in zip(self._tunables, self._steps[at], strict=True)}
        return create_trial(state=state, params=params, distributions=self._box(), value=value)
