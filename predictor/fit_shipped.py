"""``python -m predictor.fit_shipped``: fit the kernels' physical models of the shipped profiles, and keep their constants.

They are read where these profiles are fitted again (predictor.kernels.known_constants).
"""

from __future__ import annotations

import json

from predictor.fitted import SHIPPED_CONSTANTS
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.known_constants import KnownConstants
from predictor.kernels.linear import LinearModel
from profiler.files import write_text
from profiler.profile.profiles import find_profile, shipped_profiles

_ABOUT = "Constants of GemmPhysics and AttnPhysics, fitted to the shipped profiles by python -m predictor.fit_shipped"


def main() -> None:
    constants = KnownConstants()
    for name in shipped_profiles():
        profile = find_profile(name)[0]
        LinearModel.fit(profile.table("linear"), profile.device, constants)
        FlashAttnModel.fit(profile.table("flash_attn"), profile.device, constants)
        print(f"{name}: fitted")
    write_text(SHIPPED_CONSTANTS, json.dumps({"about": _ABOUT, "constants": constants.found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
