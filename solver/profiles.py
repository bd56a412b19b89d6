"""Moved to profiler.profiles; this name stays until its importers have followed."""

from profiler.profiles import DEFAULT_PROFILE, OWN_PROFILE, PROF_DATA, find_profile, shipped_profiles

__all__ = ["DEFAULT_PROFILE", "OWN_PROFILE", "PROF_DATA", "find_profile", "shipped_profiles"]
