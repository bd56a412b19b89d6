"""Notes on a profile that lacks measurements, and on a cluster whose figures look like those of a whole node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.fitted import fit_all
from profiler.profile.devices import DEVICES
from profiler.profile.profile import QUICK, Profile
from profiler.profile.profiles import find_profile
from profiler.units import GBIT, GIB
from solver.options.notes import cluster_notes, profile_notes
from solver.spec.cluster import cluster_of

H100 = DEVICES["h100_sxm"]


@pytest.fixture(scope="module")
def whole() -> Profile:
    return find_profile("h100_sxm")[0]


def few(profile: Profile, rows: int) -> Profile:
    """Return the profile with its first GEMMs only."""
    gemms = profile.table("linear")
    return replace(profile, tables={**profile.tables, "linear": gemms.where(np.arange(len(gemms)) < rows)})


def test_a_profile_says_what_it_lacks(whole: Profile) -> None:
    assert not list(profile_notes(whole)) and not list(profile_notes(find_profile("b300")[0])), "measured, and derived"
    (said,) = profile_notes(few(whole, 29))
    assert said.startswith("the profile holds 29 GEMMs: their times rest on the device's peak rates and usual constants")
    assert not list(profile_notes(few(whole, 30)))
    (said,) = profile_notes(replace(whole, meta={**whole.meta, QUICK: True}))
    assert "the few sizes of a run with --quick" in said


def test_few_gemms_are_never_predicted_above_the_peak(whole: Profile) -> None:
    tiny = whole.table("linear")
    small = tiny.where((tiny["dtype"] == "bf16") & (tiny["m"] <= 128))
    model = fit_all(replace(whole, tables={"linear": small}))["linears"]
    sizes = np.array([1024.0, 8192.0, 65536.0])
    for dtype in ("bf16", "fp8"):
        found = model.predict(sizes, sizes, sizes, dtype=dtype)
        assert (2 * sizes**3 / found.seconds <= H100.peak_flops[dtype] * (1 + 1e-9)).all()


def test_figures_of_a_whole_node_are_named() -> None:
    usual = cluster_of(H100, {})
    assert not list(cluster_notes(usual, H100)) and not list(cluster_notes(replace(usual, network_bandwidth=1600 * GBIT), H100))
    node = replace(usual, network_bandwidth=3200 * GBIT, memory_bytes=640 * GIB)
    network, memory = cluster_notes(node, H100)
    assert network == "inter_node_gbit_per_gpu 3,200 is taken as each GPU's; if a node has as much, state 400"
    assert memory.startswith("memory of 640.0 GiB is taken as each GPU's, of which a NVIDIA H100 SXM 80GB has 79.")
