"""Collectives between nodes from a simulation of their flows on a topology, where no such network was measured.

What stays inside a node that the profile measured is the profile's. For everything else the groups of a training run are
simulated together (predictor.network.flows): every group of so many GPUs in each of so many consecutive servers, up to
MOST_GPUS of them, with link rates and latency as calibrated on a measured network (predictor.network.flows.calibrate). Four
sizes are simulated for each operation, group and algorithm; between them and beyond the time is linear in the size, as a sum of
latencies and of bytes over rates is. An all_reduce is the faster of the ring and the tree, as NCCL's tuning would choose; a
reduce_scatter takes as long as an all_gather.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.network.collective import CollectiveModel
from predictor.network.flows.calibrate import Calibration, as_reached
from predictor.network.flows.collective import collective
from predictor.network.flows.simulate import FlowResult, simulate
from predictor.network.topology.types import Topology
from profiler.errors import InputError
from profiler.files import write_text

#: GPUs whose groups are simulated at once: groups on other servers of a rail-optimised network do not meet them.
MOST_GPUS = 256
#: Flows of all-to-alls that are simulated at once.
_MOST_FLOWS = 40_000
#: Sizes that are simulated, from bound by latency to bound by rates; of the last one several draws of hashes, if they matter.
SIZES = (float(1 << 16), float(1 << 22), float(1 << 26), float(1 << 30))
