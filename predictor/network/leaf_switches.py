"""Leaf switches whose uplinks carry less than the nodes below them send: what is left to a group that leaves its leaf.

Nodes fill leaves in order, and each leaf has uplinks for 1 / oversubscription of what its nodes can send. All groups of one
kind communicate at once, one from each rank of a node, as the collectives of a training step do. Derived, not measured:

* Rings, and messages to a neighbour, between nodes that are ``apart`` nodes apart. Of the nodes below one leaf as many send
  across its uplinks as groups are interleaved, ``min(apart, nodes)``; so each gets ``nodes / min(apart, nodes) /
  oversubscription`` of its bandwidth. A ring over neighbouring nodes leaves a leaf once, and shares its uplinks with nobody.
* All-to-alls. Of what a rank sends to other nodes, ``1 - 1 / all``, the part to nodes below other leaves passes the uplinks,
  ``1 - nodes below its own / all``.

No rate exceeds that of the node's own adapters. NCCL's trees are taken to cross as rarely as its rings; adaptive routing and
collisions of flows are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LeafSwitches:
    """Leaf switches whose uplinks carry less than their nodes may send.

    nodes: nodes (or NVLink domains, as ``of`` says) below one leaf switch. oversubscription: what they send over what its
    uplinks carry.
    """

    nodes: float
    oversubscription: float
    of: str = "nodes"

    def share(self, op: str, inter: Any, apart: Any = 1) -> np.ndarray:
        """Return the share of the bandwidth between nodes that groups over ``inter`` nodes keep; arrays broadcast.

        apart: nodes from one of a group's nodes to the next.
        """
        inter, apart = np.maximum(np.asarray(inter, dtype=float), 1.0), np.maximum(np.asarray(apart, dtype=float), 1.0)
        below = np.maximum(self.nodes / apart, 1.0)  # of a group's nodes, those below one leaf
        if op == "all2all":
            sent, across = 1.0 - 1.0 / inter, np.maximum(1.0 - below / inter, 0.0)
            kept = np.minimum(sent / np.maximum(across * self.oversubscription, 1e-9), 1.0)
        else:
            kept = np.minimum(below / self.oversubscription, 1.0)
        inside = (inter <= below) & (op != "p2p")  # of the pairs of a pipeline's stages some are below two leaves
        return np.where(inside, 1.0, kept)

    def text(self) -> str:
        """Return in words what the leaf switches do."""
        return (
            f"leaf switches of {self.nodes:g} {self.of} with uplinks for 1/{self.oversubscription:g} of what these send: "
            "groups that leave a leaf, and whose nodes are far apart or exchange all to all, get less of the network (derived)"
        )
