"""Power and clocks of a GPU while something runs, as nvidia-smi states them."""

from __future__ import annotations

import subprocess
from types import TracebackType

import numpy as np

_FIELDS = "power.draw.instant,clocks.sm,temperature.gpu"
_COMMAND = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", "-lms", "50")


class Sensors:
    """Reads while the block runs; then power [W], clock [MHz] and temperature [C] are the means of the last third."""

    power = clock = temperature = float("nan")

    def __enter__(self) -> Sensors:
        self._process = subprocess.Popen(_COMMAND, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        said, _ = self._process.communicate()
        rows = [line.split(",") for line in said.splitlines() if line.count(",") == 2]
        if rows:
            last = np.array(rows[len(rows) * 2 // 3 :], dtype=float)
            self.power, self.clock, self.temperature = (float(value) for value in last.mean(axis=0))
