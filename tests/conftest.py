"""Cost models of shipped profiles, fitted once for all test workers and kept in the program's cache."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable
from functools import cache

import hypothesis
import pytest

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from profiler.profile.profiles import PROF_DATA, find_profile

# each test worker keeps to one core: threads of several that wait for one another took up to eight times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes says nothing on a busy machine
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collections: to look through it again and again took a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session")
def fitted() -> Callable[[str], CostModel]:
    """Return a function from the name of a shipped or derived profile to its cost model.

    A fit takes ten seconds: parallel workers wait until the first one has done it, and fit other profiles meanwhile.
    """

    @cache
    def get(name: str) -> CostModel:
        folder = PROF_DATA / ".cache"
        folder.mkdir(exist_ok=True)
        profile = find_profile(name)[0]
        fitted_to = profile.derivation.kernels if profile.derivation else profile
        with (folder / f"fit-{fitted_to.digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return cost_model(profile, cache_dir=folder)

    return get


@pytest.fixture(scope="session")
def h100_model(fitted: Callable[[str], CostModel]) -> CostModel:
    return fitted("h100_sxm")


@pytest.fixture(scope="session")
def a100_model(fitted: Callable[[str], CostModel]) -> CostModel:
    return fitted("a100_sxm_80gb")
