"""What an entry point of a choose-one family must resolve to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from packaging.requirements import InvalidRequirement, Requirement

from jackfield.interfaces import FAMILIES, Family, Option, Plugin
from jackfield.registry.codes import API_VERSION, LOAD_FAILED
from jackfield.registry.ref import RefusedError

SETS = ("kinds", "features", "dtypes", "device_types")


def validate_plugin(found: object, family: Family, name: str) -> type[Plugin]:
    """Return ``found`` as a plugin class of ``family``.

    Raises:
        RefusedError: it is no class of the family, has another name, declares something malformed, or was written for
            an API that this core does not offer.
    """
    if not (isinstance(found, type) and issubclass(found, family.base)):
        raise _malformed(f"{_shown(found)} is not a subclass of {family.base.__name__}")
    if found.name != name:
        raise _malformed(f"the class calls itself '{found.name}', its entry point '{name}'; they must be equal")
    _check_api(found, family)
    _check_declarations(found)
    return found


def validator(family: Family, name: str) -> partial[type[Plugin]]:
    """Return :func:`validate_plugin` for one entry point."""
    return partial(validate_plugin, family=family, name=name)


def api_mismatch(family: str, needed: str) -> RefusedError:
    """Return the refusal of a plugin written for another API; the same words from metadata and from classes."""
    known = FAMILIES.get(family)
    offered = "{}.{}".format(*known.version) if known else "none"
    message = f"needs {family} API {needed}, this core offers {offered}"
    return RefusedError(API_VERSION, "api", message, "install a version of the plugin made for this core")


def _check_api(found: type[Plugin], family: Family) -> None:
    try:
        major, minor = (int(part) for part in found.api)
    except (TypeError, ValueError):
        raise _malformed(f"api is {found.api!r}, not (major, minor)") from None
    if major != family.version[0] or minor > family.version[1]:
        raise api_mismatch(family.name, f"{major}.{minor}")


def _check_declarations(found: type[Plugin]) -> None:
    for name in SETS:
        value: object = getattr(found, name)
        if not isinstance(value, frozenset | set):
            raise _malformed(f"{name} is {value!r}, not a set of strings")
    requires: object = found.requires
    if not isinstance(requires, tuple | list):
        raise _malformed(f"requires is {requires!r}, not a tuple of requirement strings")
    options: object = found.options
    if not (isinstance(options, Mapping) and all(isinstance(option, Option) for option in options.values())):
        raise _malformed("options is not a mapping of names to Option")
    try:
        for text in requires:
            Requirement(text)
    except InvalidRequirement as error:
        raise _malformed(f"requires holds {text!r}: {error}") from None


def _malformed(message: str) -> RefusedError:
    return RefusedError(LOAD_FAILED, "class", message)


def _shown(found: object) -> str:
    return found.__qualname__ if isinstance(found, type) else repr(found)
