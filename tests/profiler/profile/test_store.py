"""Profiles on disk: they are read back as written, torch can open them, and damaged or hostile files do no harm."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profiler.errors import InputError
from profiler.profile import store
from profiler.profile.profile import SCHEMA_VERSION, TABLE_COLUMNS, TEXT_COLUMNS, Device, Profile, Table
from profiler.profile.store import load_plain, read_profile, write_profile

DEVICE = Device("toy", {"bf16": 1e15, "fp32": 1e14}, 80e9, 2e12, 132, 8, 4.5e11, 5e10, "NVLink", 3)


def profile(rows: int = 5) -> Profile:
    """Return a profile whose tables have ``rows`` rows of different words and numbers each."""
    rng = np.random.default_rng(7)

    def values(name: str) -> Any:
        if name in TEXT_COLUMNS:
            return [f"{name} {i % 3}" for i in range(rows)]
        if name in ("seconds", "spread", "gemm_slowdown", "collective_slowdown"):
            return rng.uniform(1e-6, 1.0, rows)
        flag = name in ("accumulate", "causal")
        return rng.integers(0 if flag else 1, 2 if flag else 2**40 if name == "bytes" else 2**15 - 1, rows)

    tables = {op: Table.from_columns(op, {name: values(name) for name in names}) for op, names in TABLE_COLUMNS.items()}
    return Profile("toy", DEVICE, tables, {"date": "2025-01-01", "laws": {"inter_node": {"latency": 5e-6}}})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "data.pt"
    write_profile(path, profile())
    return path


def plain_of(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


def refused(path: Path) -> str:
    """Read a profile that must be refused; return the error, one sentence that names the file."""
    with pytest.raises(InputError) as caught:
        read_profile(path)
    sentence = str(caught.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence


def test_round_trip(written: Path) -> None:
    before, after = profile(), read_profile(written)
    assert after.name == "toy" and after.device == DEVICE
    assert after.meta["date"] == "2025-01-01" and after.meta["laws"] == {"inter_node": {"latency": 5e-6}}
    assert set(after.tables) == set(TABLE_COLUMNS)
    for op, table in before.tables.items():
        for name, column in table.columns.items():
            if column.dtype == np.float64:  # stored as float32, a relative error of at most 2^-24
                np.testing.assert_allclose(after.tables[op][name], column, rtol=6e-8)
                assert after.tables[op][name].dtype == np.float64
            else:
                assert after.tables[op][name].tolist() == column.tolist(), (op, name)


def test_an_empty_table_is_read_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.pt"
    write_profile(path, Profile("bare", DEVICE, {}))
    assert len(read_profile(path).table("linear")) == 0


def test_the_digest_is_that_of_the_content(written: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.pt", tmp_path / "other.pt"
    copy.write_bytes(written.read_bytes())
    write_profile(other, profile(rows=6))
    assert read_profile(copy).digest == read_profile(written).digest != read_profile(other).digest


def test_torch_opens_it_with_weights_only(written: Path) -> None:
    plain = torch.load(written, weights_only=True)
    assert plain["schema"] == SCHEMA_VERSION and plain["meta"]["device"]["num_sms"] == 132
    seconds = plain["tables"]["linear"]["seconds"]
    np.testing.assert_allclose(seconds.numpy(), profile().tables["linear"]["seconds"], rtol=6e-8)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool],
)
def test_tensors_of_every_kind_and_shape_are_read_as_torch_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.arange(24) % 2).reshape(4, 6).to(dtype)
    views = {"whole": whole, "transposed": whole.T, "part": whole[1:3, 2:], "scalar": whole[2, 3], "none": whole[:0]}
    torch.save(views, tmp_path / "views.pt")
    read = load_plain(tmp_path / "views.pt")
    for name, tensor in views.items():
        np.testing.assert_array_equal(read[name], tensor.numpy(), err_msg=name)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such profile" in refused(tmp_path / "absent.pt")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99, -1])
def test_truncated(written: Path, keep: float) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    refused(written)


@pytest.mark.parametrize(
    "content", [b"hello", b"\x80\x04K\x01.", b"PK\x03\x04", bytes(range(256)) * 20], ids=["text", "pickle", "torn zip", "noise"]
)
def test_not_written_by_torch(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.pt"
    path.write_bytes(content)
    refused(path)


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    refused(path)
    with zipfile.ZipFile(path, "w"):
        pass
    refused(path)


class Innocent:
    """No class may be unpickled."""


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("where", ["top", "meta", "table"])
@pytest.mark.parametrize("how", ["system", "popen", "eval", "open", "class"])
def test_objects_are_refused_and_nothing_runs(written: Path, tmp_path: Path, where: str, how: str) -> None:
    trace = tmp_path / "ran"
    attack = {
        "system": Hostile(os.system, f"touch {trace}"),
        "popen": Hostile(subprocess.check_call, ["touch", str(trace)]),
        "eval": Hostile(eval, f"open({str(trace)!r}, 'w').close()"),
        "open": Hostile(open, str(trace), "w"),
        "class": Innocent(),
    }[how]
    plain = plain_of(written)
    if where == "meta":
        plain["meta"] = {**plain["meta"], "date": attack}
    elif where == "table":
        plain["tables"]["linear"]["seconds"] = attack
    hostile = tmp_path / "hostile.pt"
    torch.save(attack if where == "top" else plain, hostile)
    before = hostile.read_bytes()
    assert "only plain values are read" in refused(hostile)
    assert not trace.exists()
    assert hostile.read_bytes() == before
    # the attack is real: an ordinary unpickler runs it
    if how in ("system", "eval") and where == "top":
        torch.load(hostile, weights_only=False)
        assert trace.exists()


def archive_of(path: Path, pickled: bytes, storages: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/data.pkl", pickled)
        for key, content in storages.items():
            archive.writestr(f"data/data/{key}", content)
    return path


def tensor_pickle(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Pickle one float tensor on storage "0", with any geometry."""

    class Storage:
        pass

    class Rebuild:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(Rebuild())
    return buffer.getvalue()


STORAGE = {"0": np.arange(4, dtype=np.float32).tobytes()}


def test_a_tensor_inside_its_storage_is_read(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "t.pt", tensor_pickle(1, (3,), (1,)), STORAGE)
    assert load_plain(path).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (5,), (1,)),
        (2, (3,), (1,)),
        (0, (2,), (4,)),
        (5, (1,), (1,)),
        (-1, (1,), (1,)),
        (3, (2,), (-1,)),
        (0, (2, 2), (3, 1)),
        (0, (2**62,), (1,)),
        (0, (-2,), (1,)),
        (0, (2, 2), (1,)),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(
    tmp_path: Path, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    path = archive_of(tmp_path / "t.pt", tensor_pickle(offset, size, stride), STORAGE)
    with pytest.raises(InputError, match="not a profile that can be trusted"):
        load_plain(path)


def test_a_few_bytes_cannot_claim_terabytes(tmp_path: Path) -> None:
    # stride 0 repeats one number: the geometry stays inside the storage, but the copy would take 4 TB
    path = archive_of(tmp_path / "t.pt", tensor_pickle(0, (10**12,), (0,)), STORAGE)
    with pytest.raises(InputError):
        load_plain(path)


def test_damage_raises_no_other_error(written: Path) -> None:
    # flipped bits and bytes anywhere: the file is read or refused, without any other error
    whole, rng = written.read_bytes(), np.random.default_rng(3)
    kept = []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            damaged[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
        written.write_bytes(bytes(damaged))
        try:
            kept.append(read_profile(written))
        except InputError as error:
            assert "\n" not in str(error)
    assert len(kept) < 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": SCHEMA_VERSION + 1}, "newer"),
        ({"schema": 0}, "schema 0 is no version of a profile's format"),
        (
            {"meta": {"device": vars(DEVICE), "units": {"time": "us"}}},
            "it gives time in 'us'; a profile's is s: convert it first",
        ),
        ({"format": "something else"}, "not a profile of this program"),
        ({"meta": {}}, "device"),
        ({"meta": {"device": {"name": "half"}}}, "incomplete"),
        ({"meta": {"device": {**vars(DEVICE), "colour": "green"}}}, "colour"),
        ({"meta": {"device": vars(DEVICE), "power_slowdown": 0.9}}, "power_slowdown is 0.9; it must be a number from 1 to 10"),
        ({"meta": {"device": vars(DEVICE), "power_slowdown": "1.2"}}, "power_slowdown"),
        ({"tables": {"weather": {}}}, "weather"),
        ({"tables": {"linear": {"mass": torch.ones(2)}}}, "mass"),
        ({"tables": {"linear": {"m": torch.ones(2), "n": torch.ones(3), "seconds": torch.ones(2)}}}, "lengths"),
        ({"tables": {"linear": {"m": torch.ones(2), "seconds": torch.tensor([1.0, -1.0])}}}, "positive"),
        ({"tables": {"linear": {"m": torch.ones(2), "seconds": torch.tensor([1.0, float("inf")])}}}, "positive"),
        ({"tables": {"linear": {"m": torch.ones(2)}}}, "positive"),
        ({"tables": {"linear": {"dtype": {"codes": torch.tensor([3]), "words": ["bf16"]}}}}, "incomplete"),
        ({"tables": [1, 2]}, "incomplete"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_contents_that_are_not_a_profile(written: Path, change: dict[str, Any], message: str) -> None:
    torch.save({**plain_of(written), **change}, written)
    assert message in refused(written)


def test_lists_and_numbers_are_not_a_profile(tmp_path: Path) -> None:
    for content in ([1, 2], 3.0, {"linear": 1}, torch.ones(3)):
        torch.save(content, tmp_path / "x.pt")
        assert "not a profile of this program" in refused(tmp_path / "x.pt")


def test_writing_is_all_or_nothing(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written.read_bytes()

    def half(content: Any, file: Any) -> None:
        file.write(b"half a file")
        raise RuntimeError("the power is gone")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(RuntimeError, match="power"):
        write_profile(written, profile(rows=9))
    assert written.read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["data.pt"], "no part of the new file is left"


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="cannot write there"):
        write_profile(tmp_path / "file" / "data.pt", profile())


def test_reading_needs_no_torch(written: Path) -> None:
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"  # any import of torch fails
        "from profiler.profile.store import read_profile\n"
        f"print(len(read_profile({str(written)!r}).table('linear')))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "5"


@pytest.mark.parametrize(
    ("op", "column", "value"),
    [
        ("linear", "m", 0),
        ("linear", "k", -8),
        ("linear", "n", 2**31),
        ("linear", "accumulate", 2),
        ("flash_attn", "seq_q", 0),
        ("all_reduce", "intra", 0),
        ("all_reduce", "bytes", -1),
        ("flash_attn", "head_dim", 2**20),
    ],
)
def test_sizes_that_no_measurement_has_are_refused(op: str, column: str, value: int) -> None:
    columns = {column: [64, value], "seconds": [1e-3, 1e-3]}
    with pytest.raises(InputError, match=f"table {op} holds {column} below"):
        Table.from_columns(op, columns)
    with pytest.raises(InputError, match="no whole numbers"):
        Table.from_columns(op, {column: [64.0, 2.5], "seconds": [1e-3, 1e-3]})


def pickled(tmp_path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x/data.pkl", content)
        archive.writestr("x/data/0", b"\0" * 4096)
    return path


def test_files_that_would_take_memory_or_time_are_refused_at_once(tmp_path: Path) -> None:
    memo = b"\x80\x02N" + b"r" + (300_000_000).to_bytes(4, "little") + b"."  # a memo index of 3e8: gigabytes of table
    nested = b"\x80\x02" + b"]" * 100 + b"a" * 99 + b"."  # lists in one another
    for content, message in ((memo, "malformed"), (nested, "nested too deeply")):
        start = time.perf_counter()
        assert message in refused(pickled(tmp_path, content)) and time.perf_counter() - start < 5
    assert "compressed or too large" in refused(pickled(tmp_path, b"\x80\x02N" + b"." * 10**6, zipfile.ZIP_DEFLATED))
    assert "compressed or too large" in refused(pickled(tmp_path, b"\x80\x02N." + b"\0" * (9 << 20)))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "not a regular file" in refused(fifo)
    assert "not a regular file" in refused(Path("/dev/zero"))


def test_tensors_that_share_a_storage_count_each(written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = torch.zeros(1 << 16)
    path = tmp_path / "shared.pt"
    torch.save({"many": [shared.view(256, 256) for _ in range(40)]}, path)
    monkeypatch.setattr(store, "MOST_BYTES", 8 << 20)  # 40 times 256 KiB are more, the file is less
    assert "its tensors are too large" in refused(path)


def test_messages_show_no_containers(written: Path) -> None:
    plain = plain_of(written)
    deep: list[Any] = []
    for _ in range(12):
        deep = [deep, deep]  # 2^12 lists when written out
    for change in ({"schema": deep}, {"meta": {**plain["meta"], "laws": deep}}):
        torch.save({**plain, **change}, written)
        assert len(refused(written)) < 400
    device = {**plain["meta"]["device"], "num_sms": deep}
    torch.save({**plain, "meta": {**plain["meta"], "device": device}}, written)
    assert len(refused(written)) < 400
