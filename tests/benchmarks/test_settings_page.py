"""docs/settings.md lists every field of a strategy as the code has it."""

from __future__ import annotations

import settings as settings_page

from solver.spec.strategy import AXES, CONSTANTS


def test_every_field_is_explained() -> None:
    assert [name for name, *_ in settings_page.remarks()] == [*AXES, *CONSTANTS]
    assert all(meaning for *_, meaning in settings_page.remarks())


def test_the_page_is_as_the_code_has_it() -> None:
    assert settings_page.OUTPUT.read_text(encoding="utf-8") == settings_page.page()
