"""Tables of torchtitan's files under the names that they have since 0.2."""

from __future__ import annotations

from solver.formats.syntax.literal_python import Section

#: Tables of quantize in the summer of 2025 (models/deepseek_v3/train_configs, commit 0a8d2b0) -> their names in 0.2.
_QUANTIZE = {"dense": "linear", "moe": "grouped_mm"}


def with_names_of_today(tables: Section) -> Section:
    """Return the tables, with those of quantize and the converters that name them as 0.2 calls them."""
    quantize, model = tables.get("quantize"), tables.get("model")
    for old, new in _QUANTIZE.items():
        if isinstance(quantize, Section) and old in quantize and new not in quantize:
            quantize.put(new, quantize.pop(old), quantize.lines.get(old, 0))
        if isinstance(model, Section) and isinstance(model.get("converters"), list):
            begins = f"quantize.{old}."
            model["converters"] = [
                f"quantize.{new}.{name[len(begins) :]}" if str(name).startswith(begins) else name
                for name in model["converters"]
            ]
    return tables
