"""Known training frameworks, one file per family, and finding the one that a name means."""

from solver.spec.frameworks.lookup import (
    FRAMEWORKS,
    first_with_experts,
    framework_of,
    known_framework,
    names_another,
    release_for_search,
    unknown_release,
)
from solver.spec.frameworks.megatron import GENERIC

__all__ = [
    "FRAMEWORKS",
    "GENERIC",
    "first_with_experts",
    "framework_of",
    "known_framework",
    "release_for_search",
    "names_another",
    "unknown_release",
]
