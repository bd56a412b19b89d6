"""Which framework's YAML a file is, by its sections."""

from __future__ import annotations

from profiler.errors import InputError
from solver.formats.accelerate.config import is_accelerate, read_accelerate
from solver.formats.bridge.config import is_bridge, read_bridge
from solver.formats.file_run import FileRun, Source
from solver.formats.llama_factory.config import is_llama_factory, read_llama_factory
from solver.formats.megatron.run import is_megatron_test, read_megatron_test
from solver.formats.nanotron.config import is_nanotron, read_nanotron
from solver.formats.nemo.config import is_nemo, read_nemo
from solver.formats.not_read import yaml_not_read
from solver.formats.primus.config import is_primus, read_primus
from solver.formats.syntax.yaml_text import read_yaml

_KINDS = (
    (is_nanotron, read_nanotron),
    (is_megatron_test, read_megatron_test),
    (is_bridge, read_bridge),
    (is_nemo, read_nemo),
    (is_primus, read_primus),
    (is_accelerate, read_accelerate),
    (is_llama_factory, read_llama_factory),
)


def read_yaml_file(source: Source) -> FileRun:
    """Return the run of a YAML file. Raises InputError for a file of no framework that is known here."""
    sections = read_yaml(source.text, source.path)
    for is_it, read in _KINDS:
        if is_it(sections):
            return read(sections, source)
    if known := yaml_not_read(sections):
        raise InputError(f"{source.path}: {known}")
    raise InputError(
        f"{source.path}: a YAML configuration is nanotron's (sections parallelism and tokens), Megatron-Bridge's (model and "
        "train), NeMo 1's (trainer and model), Primus's (modules), accelerate's (distributed_type), LLaMA-Factory's "
        "(model_name_or_path and stage) or one of Megatron-LM's tests (MODEL_ARGS)"
    )
