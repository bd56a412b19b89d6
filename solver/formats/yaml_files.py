"""Which framework's YAML a file is, by its sections."""

from __future__ import annotations

from profiler.errors import InputError
from solver.formats.file_run import FileRun, Source
from solver.formats.nanotron_config import is_nanotron, read_nanotron
from solver.formats.yaml_text import read_yaml


def read_yaml_file(source: Source) -> FileRun:
    """Return the run of a YAML file. Raises InputError for a file of no framework that is known here."""
    sections = read_yaml(source.text, source.path)
    for is_it, read in ((is_nanotron, read_nanotron),):
        if is_it(sections):
            return read(sections, source)
    raise InputError(f"{source.path}: a YAML configuration is nanotron's (sections parallelism and tokens)")
