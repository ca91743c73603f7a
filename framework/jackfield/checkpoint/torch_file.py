"""Reads which tensors a file of ``torch.save`` holds, and where their bytes lie. No torch, and nothing is executed.

Source: since torch 1.6 such a file is a zip archive without compression, with the records ``data.pkl`` (the table, see
:mod:`jackfield.checkpoint.torch_pickle`), ``byteorder``, and ``data/KEY`` for each storage.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.safetensors_header import DTYPES, MAX_DIMS
from jackfield.checkpoint.torch_pickle import PickledTensor, PickleProblem, WrappedTensor, read_pickle
from jackfield.interfaces.facts import TensorFacts

TABLE_LIMIT = 32 << 20
"""Bytes; the table of a thousand tensors takes about 150 kB."""
_BITS = dict(DTYPES.values())
_LOCAL = struct.Struct("<4s22xHH")
_CONVERT = "save it again with torch.save, or better as safetensors"


def read_torch(path: Path) -> dict[str, TensorFacts]:
    """Return the tensors of one PyTorch file, by name.

    Raises:
        CheckpointError: the file is none that ``torch.save`` writes, is damaged, or holds more than tensors.
    """
    try:
        with path.open("rb") as file:
            _check_magic(path, file.read(4))
            with zipfile.ZipFile(file) as archive:
                return _read(path, file, archive)
    except OSError as error:
        corrupt(path, f"{path.name} cannot be read: {error.strerror or error}", remedy="check the path and its rights")
    except (zipfile.BadZipFile, NotImplementedError, EOFError, struct.error, ValueError, RuntimeError) as error:
        corrupt(path, f"{path.name} is a damaged PyTorch file: {error}")


def _check_magic(path: Path, magic: bytes) -> None:
    if magic[:1] == b"\x80":
        corrupt(path, f"{path.name} is a bare pickle, as torch wrote before version 1.6", remedy=_CONVERT)
    if magic != b"PK\x03\x04":
        corrupt(path, f"{path.name} is no PyTorch file: it begins with {magic!r}", remedy="check which file this is")


def _read(path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> dict[str, TensorFacts]:
    records = _records(path, archive)
    table = records["data.pkl"]
    if table.file_size > TABLE_LIMIT:
        corrupt(path, f"{path.name}: a table of {table.file_size} bytes is over the limit of {TABLE_LIMIT}")
    order = archive.read(records["byteorder"]) if "byteorder" in records else b"little"
    if order != b"little":
        corrupt(path, f"{path.name} has the byte order {order[:10]!r}", remedy="save it on a little-endian machine")
    try:
        tensors = _flat(path, read_pickle(archive.read(table)))
    except PickleProblem as error:
        remedy = "if you trust its source, load it in torch and save the tensors alone, as safetensors"
        corrupt(path, f"{path.name} holds more than tensors, or is damaged: {error}; nothing was run", remedy=remedy)
    return {name: _facts(path, file, records, name, tensor) for name, tensor in tensors.items()}


def _records(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the records without the name of the folder that all of them lie in."""
    records: dict[str, zipfile.ZipInfo] = {}
    folders = set()
    for info in archive.infolist():
        folder, _, name = info.filename.partition("/")
        folders.add(folder)
        if name in records:
            corrupt(path, f"{path.name} holds the record '{info.filename}' twice")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            corrupt(path, f"{path.name}: the record '{info.filename}' is compressed, which torch never does")
        records[name] = info
    if len(folders) != 1 or "data.pkl" not in records:
        corrupt(path, f"{path.name} is no file of torch.save: it has no data.pkl", remedy="check which file this is")
    return records


def _flat(path: Path, table: object) -> Mapping[str, PickledTensor]:
    if not isinstance(table, dict):
        corrupt(path, f"{path.name} holds {type(table).__name__}, no dictionary of tensors", remedy=_CONVERT)
    others = [str(name) for name, value in table.items() if not isinstance(value, PickledTensor | WrappedTensor)]
    names = [str(name) for name in table if not isinstance(name, str)]
    if others or names:
        listing = ", ".join([*others, *names][:10])
        remedy = "save the dictionary of the model's tensors (model.state_dict()) alone"
        corrupt(path, f"{path.name} holds entries that are no named tensors: {listing}", remedy=remedy)
    flat: dict[str, PickledTensor] = {}
    for name, tensor in table.items():
        parts = _parts(name, tensor) if isinstance(tensor, WrappedTensor) else {name: tensor}
        if twice := flat.keys() & parts.keys():
            corrupt(path, f"{path.name} holds the tensor '{min(twice)}' twice")
        flat |= parts
    return flat


def _parts(name: str, tensor: WrappedTensor) -> dict[str, PickledTensor]:
    """Return what a tensor is made of under the names that safetensors files have for it: ``up._weight_qdata``."""
    module, _, parameter = name.rpartition(".")
    start = f"{module}." if module else ""
    return {f"{start}_{parameter}_{part}": inner for part, inner in tensor.parts.items()}


def _facts(
    path: Path, file: BinaryIO, records: Mapping[str, zipfile.ZipInfo], name: str, tensor: PickledTensor
) -> TensorFacts:
    record = records.get(f"data/{tensor.storage.key}")
    if record is None:
        corrupt(path, f"{path.name}: the storage '{tensor.storage.key}' of tensor '{name}' is absent")
    if len(tensor.shape) > MAX_DIMS:
        corrupt(path, f"{path.name}: tensor '{name}' has {len(tensor.shape)} dimensions")
    size = _BITS[tensor.dtype] // 8 or 1
    offset, nbytes = tensor.offset * size, math.prod(tensor.shape) * size
    if offset + nbytes > record.file_size or _claimed(tensor) > record.file_size:
        message = f"{path.name}: tensor '{name}' reaches past the {record.file_size} bytes of its storage"
        corrupt(path, message)
    if not _contiguous(tensor):
        corrupt(path, f"{path.name}: tensor '{name}' is stored transposed or with gaps", remedy=_CONVERT)
    return TensorFacts(name, tensor.dtype, tensor.shape, str(path), _start(path, file, record) + offset, nbytes)


def _claimed(tensor: PickledTensor) -> int:
    return tensor.storage.numbers * (_BITS[tensor.storage.dtype] // 8 if tensor.storage.dtype else 1)


def _contiguous(tensor: PickledTensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _start(path: Path, file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin. Its own header may differ from the archive's directory."""
    file.seek(record.header_offset)
    magic, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
    start = record.header_offset + _LOCAL.size + name + extra
    if magic != b"PK\x03\x04" or start + record.file_size > path.stat().st_size:
        corrupt(path, f"{path.name}: the record '{record.filename}' lies outside the file")
    return int(start)
