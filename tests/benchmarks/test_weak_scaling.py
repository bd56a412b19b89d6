"""Weak-scaling series: found among runs, their constant by hand, and each predicted with the others'."""

from __future__ import annotations

import numpy as np
import pytest
from weak_scaling import Series, document, left_out


def series(std: float, gpus: tuple[int, ...] = (8, 64, 512), noise: float = 0.0) -> Series:
    """A series whose measured times are those of a constant; communication takes a tenth more on each further size."""
    waits = np.array([0.0, 0.84, 1.49, 2.0])[: len(gpus)]
    alone = 1.0 + 0.1 * np.arange(len(gpus))
    measured = alone * np.exp(std * waits) * np.exp(noise * np.arange(len(gpus)))
    return Series("x", "a", "m", "all", np.array(gpus), measured, alone, waits)


def test_the_constant_of_a_series_is_what_was_put_in() -> None:
    assert series(0.03).std == pytest.approx(0.03, rel=1e-12)
    # log growth of 0.01 and 0.02 over waits of 0.84 and 1.49: (0.0084 + 0.0298) / (0.84^2 + 1.49^2)
    assert series(0.0, noise=0.01).std == pytest.approx(0.0382 / 2.9257, rel=1e-4)
    assert series(0.03).growth(0.0).tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert series(0.03).growth(0.1)[2] == pytest.approx(1.2 * 1.149 - 1)


def test_a_series_is_predicted_with_the_others() -> None:
    found = [series(0.01), series(0.02), series(0.05), series(9.9, gpus=(8, 64))]  # the last has too few sizes to be fitted
    assert left_out(found) == pytest.approx([0.035, 0.03, 0.015, 0.02])
    page = document(found)
    assert "0.0200 is the median of what each of these 3" in page and "(0.0150 to 0.0350)" in page
    assert "| x | a | m | all | 8, 64, 512 | +10.9%, +21.8% | +13.2%, +26.3% | 4.5 |" in page
    assert page.count("x m (8 to 512 GPUs)") == 2 and page.count("x m (8 to 64 GPUs)") == 1
