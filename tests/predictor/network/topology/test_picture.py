"""Pictures of topologies: readable however large the network is."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictor.network.topology.generate import generate
from predictor.network.topology.picture import draw_topology, tiers
from predictor.network.topology.templates import make_options
from profiler.errors import InputError


@pytest.mark.parametrize(
    ("stated", "boxes"),
    [
        ({"gpus": 32, "psws": 3}, [4, 1, 3]),
        ({"topology": "Spectrum-X"}, [8, 8, 1]),
        ({"topology": "AlibabaHPN", "dual_plane": True, "gpus": 2048}, [2, 4, 2]),
        ({"topology": "NVL"}, [8, 8, 1]),
        ({"gpus": 8192, "gpus_per_asw": 8, "asws_per_pod": 2000}, [16, 16, 1]),
    ],
)
def test_tiers_have_few_boxes_that_hold_every_node_once(stated: dict[str, object], boxes: list[int]) -> None:
    topology = generate(make_options(stated)[0])
    found = tiers(topology)
    assert [len(tier.boxes) for tier in found] == boxes
    assert sum(len(box.nodes) for box in found[0].boxes) == topology.servers
    assert sum(len(box.nodes) for tier in found[1:] for box in tier.boxes) == len(topology.switches)
    for tier in found[1:]:
        for index, box in enumerate(tier.boxes):
            assert (tier.box[box.nodes] == index).all()


def test_a_picture_is_written(tmp_path: Path) -> None:
    topology = generate(make_options({"topology": "AlibabaHPN", "gpus": 256, "psws": 4})[0])
    draw_topology(topology, tmp_path / "hpn.png")
    assert (tmp_path / "hpn.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"must end in \.png"):
        draw_topology(topology, tmp_path / "hpn.bmp")
