"""Reads the table of tensors that ``torch.save`` writes, without running anything in it.

A pickle is a program. This reads its opcodes and knows only what a dictionary of tensors is made of: numbers, texts,
lists, tuples, dictionaries, storages and a few functions by name, none of which is called. Everything else is refused.

Source: the opcodes that Python's ``pickletools`` documents; ``torch.serialization`` for what they mean: a storage is
``("storage", type, key, device, numbers)``, a tensor ``_rebuild_tensor_v2(storage, offset, size, stride, ...)``, and a
tensor that is made of others ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, ..., attributes)``.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_OPCODES = 1 << 20
"""A tensor takes about 40; shards of the largest models have a few thousand tensors."""
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "",
}
"""torch's storage classes and the types of their numbers; of untyped ones the tensor says it."""

DTYPES = frozenset(
    (
        *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
)
"""Types without a storage class of their own."""

WRAPPERS = ("torchao.",)
"""Packages whose classes may be named: tensors that are made of others, and settings of theirs, which are left out."""
NAMED = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "bool",
    *(f"int{bits}" for bits in (16, 32, 64)),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)),
)
"""Types that such tensors say of themselves that they are of; they have no storages of these."""

_TENSOR, _TYPED, _PARAMETER = "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"
_FROM_TYPE, _WRAPPER = "_rebuild_from_type_v2", "_rebuild_wrapper_subclass"
_PLACES = ("_get_layout", "device", "Size")
"""Functions that say how and where a tensor lies."""
_KNOWN = {
    **{f"torch {name}": name for name in NAMED},
    **{f"torch {name}": name for name in DTYPES},
    **{f"torch {name}": name for name in STORAGES},
    "torch.storage UntypedStorage": "UntypedStorage",
    **{f"torch._utils {name}": name for name in (_TENSOR, _TYPED, _PARAMETER, _WRAPPER)},
    f"torch._tensor {_FROM_TYPE}": _FROM_TYPE,
    "torch.serialization _get_layout": "_get_layout",
    "torch device": "device",
    "torch Size": "Size",
    "collections OrderedDict": "OrderedDict",
}


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that the pickle names; nothing is looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of numbers: the record of the archive that holds it, their type, and how many it claims to have."""

    key: str
    dtype: str
    numbers: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A view of a storage; ``offset`` and ``stride`` count numbers."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrappedTensor:
    """A tensor that is made of others: its class, and those by the names it has for them."""

    kind: str
    parts: Mapping[str, PickledTensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """Something about a wrapped tensor that is not looked at."""

    kind: str


_MARK = object()


class PickleProblem(ValueError):
    """The pickle is damaged, or does more than describe tensors."""


def read_pickle(raw: bytes) -> Any:
    """Return what a pickle describes, tensors as :class:`PickledTensor` and :class:`WrappedTensor`.

    Raises:
        PickleProblem: see there.
    """
    machine = _Machine()
    for count, (name, argument) in enumerate(_opcodes(raw)):
        if name == "STOP":
            return machine.pop()
        if count > MAX_OPCODES:
            raise PickleProblem(f"it has more than {MAX_OPCODES} steps")
        machine.run(name, argument)
    raise PickleProblem("it ends too early")


def _opcodes(raw: bytes) -> Iterator[tuple[str, Any]]:
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            yield opcode.name, argument
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        raise PickleProblem(f"it is damaged: {error}") from None


class _Machine:
    """A stack of plain values. The names of opcodes decide what happens, and unknown ones stop it."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in _NOTHING:
            raise PickleProblem(f"it holds {name}, which no table of tensors needs")

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleProblem("it takes a value where there is none")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                found = self._stack[at + 1 :]
                del self._stack[at:]
                return found
        raise PickleProblem("it ends a list that it did not begin")

    def _mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _put(self, index: Any) -> None:
        value = self.pop()
        self._memo[len(self._memo) if index is None else index] = value
        self._stack.append(value)

    def _get(self, index: Any) -> None:
        if index not in self._memo:
            raise PickleProblem(f"it asks for value {index}, which it did not keep")
        self._stack.append(self._memo[index])

    def _global(self, name: Any) -> None:
        path = str(name).replace(" ", ".")
        if name not in _KNOWN and not path.startswith(WRAPPERS):
            raise PickleProblem(f"it names {path}, which is no part of a tensor")
        self._stack.append(Name(_KNOWN.get(name, path)))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._global(f"{module} {name}")

    def _new(self, kind: Callable[[], Any]) -> None:
        self._stack.append(kind())

    def _tuple_of(self, count: int) -> None:
        self._stack.append(tuple(self.pop() for _ in range(count))[::-1])

    def _marked_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _persistent(self, _: Any) -> None:
        self._stack.append(_storage(self.pop()))

    def _reduce(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        self._stack.append(_result(function, arguments))

    def _build(self, _: Any) -> None:
        self.pop()  # attributes of an OrderedDict, such as _metadata, and of settings say nothing of tensors
        if not isinstance(self._top(), dict | Settings):
            raise PickleProblem("it sets attributes of something that has none")

    def _top(self) -> Any:
        value = self.pop()
        self._stack.append(value)
        return value

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise PickleProblem("it appends to something that is no list")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(values) % 2:
            raise PickleProblem("it sets items of something that is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int):
                raise PickleProblem(f"it has a key that is no text: {type(key).__name__}")
            target[key] = value


_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
)
_NOTHING = frozenset(("PROTO", "FRAME"))
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine._get),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "EMPTY_DICT": lambda machine, _: machine._new(dict),
    "EMPTY_LIST": lambda machine, _: machine._new(list),
    "EMPTY_TUPLE": lambda machine, _: machine._tuple_of(0),
    "TUPLE1": lambda machine, _: machine._tuple_of(1),
    "TUPLE2": lambda machine, _: machine._tuple_of(2),
    "TUPLE3": lambda machine, _: machine._tuple_of(3),
    "TUPLE": _Machine._marked_tuple,
    "BINPERSID": _Machine._persistent,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._reduce,
    "BUILD": _Machine._build,
    "APPEND": lambda machine, _: machine._append([machine.pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._since_mark()),
    "SETITEM": lambda machine, _: machine._set([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine._set(machine._since_mark()),
}


def _storage(value: Any) -> Storage:
    match value:
        case ("storage", Name(name=kind), str(key), str(), int(numbers)) if kind in STORAGES and numbers >= 0:
            return Storage(key, STORAGES[kind], numbers)
    raise PickleProblem("it names a storage in a way that torch does not")


def _result(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case Name(name="OrderedDict"), ():
            return {}
        case Name(name=name), (PickledTensor() as tensor, *_) if name == _PARAMETER:
            return tensor
        case Name(name=name), (Storage() as storage, int(offset), tuple(shape), tuple(stride), *_) if name == _TENSOR:
            return _tensor(storage, storage.dtype, offset, shape, stride)
        case (
            Name(name=name),
            (Storage() as storage, int(offset), tuple(shape), tuple(stride), _, _, Name(name=dtype), *_),
        ) if name == _TYPED and dtype in DTYPES:
            return _tensor(storage, dtype, offset, shape, stride)
        case Name(name=name), (Name(name=inner), Name(name=kind), tuple(), dict(attributes)) if (
            name == _FROM_TYPE and inner == _WRAPPER and kind.startswith(WRAPPERS)
        ):
            return _wrapped(kind, attributes)
        case Name(name=name), tuple() if name.startswith(WRAPPERS) or name in _PLACES:
            return Settings(name)
    raise PickleProblem(f"it calls {getattr(function, 'name', 'a value')} in a way that torch does not")


def _wrapped(kind: str, attributes: Mapping[Any, Any]) -> WrappedTensor:
    """Return a tensor with all that it is made of, parts of parts included."""
    parts: dict[str, PickledTensor] = {}
    for name, value in attributes.items():
        if isinstance(value, PickledTensor):
            parts[str(name)] = value
        elif isinstance(value, WrappedTensor):
            parts |= {f"{name}_{inner}": part for inner, part in value.parts.items()}
    return WrappedTensor(kind, parts)


def _tensor(storage: Storage, dtype: str, offset: int, shape: Any, stride: Any) -> PickledTensor:
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) or not dtype:
        raise PickleProblem("a tensor has an impossible shape, stride or type")
    return PickledTensor(storage, dtype, offset, shape, stride)
